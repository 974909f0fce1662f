"""What a stored result came from: the code, and the parts of the machine that decide its last bits."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path

from .. import __version__

KIND = ("cpu", "blas", "vectors", "numpy", "torch")
"""Where two origins agree in all of these, the same seeds give the same bits."""


@cache
def origin() -> dict[str, str]:
    """Version and commit of aflock, the CPU, the kernels BLAS and torch choose on it, and their versions."""
    import numpy as np
    from threadpoolctl import threadpool_info

    blas = sorted({str(each.get("architecture", each["internal_api"])) for each in threadpool_info()})
    return {
        "version": __version__,
        "commit": _commit(),
        "cpu": _cpu(),
        "blas": ", ".join(blas),
        "vectors": _vectors(),
        "numpy": np.__version__,
        "torch": _torch(),
    }


def same_kind(a: dict[str, str], b: dict[str, str]) -> bool:
    """Whether runs from these two origins can be expected to agree bit for bit."""
    return bool(a) and bool(b) and all(a.get(key) == b.get(key) for key in KIND)


def _commit() -> str:
    """The commit of the checkout that runs, with a + if it was changed since; "" for an installed package."""
    here = Path(__file__).parent
    try:
        said = [
            subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=20, check=True).stdout
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", "."])
        ]
    except (OSError, subprocess.SubprocessError):
        return ""
    return said[0].strip() + ("+" if said[1].strip() else "")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _vectors() -> str:
    """The widest vectors the CPU has: compiled loops and torch choose their code by it."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return ""
    return next((name for name in ("avx512f", "avx2", "avx") if name in flags), "")


def _torch() -> str:
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
