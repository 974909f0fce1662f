"""Small archives, made in memory."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping
from typing import Any


def tar(compression: str, files: Mapping[str, bytes]) -> bytes:
    """A tar file; compression is "", "gz", "xz" or "bz2"."""
    out = io.BytesIO()
    mode: Any = f"w:{compression}"
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, body in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body))
    return out.getvalue()


def zipped(files: Mapping[str, bytes]) -> bytes:
    """A zip file."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    return out.getvalue()
