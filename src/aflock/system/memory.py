"""How much memory is available, and how to return freed memory to the system."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_M_MMAP_THRESHOLD = -3


def available() -> int:
    """Bytes this process can still take without swapping, control-group limit included; 2^62 if that is not known."""
    return min(_system_memory(), _group_memory())


def _system_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:  # no /proc: the size of the whole memory is the best bound
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 2**62


def _group_memory() -> int:
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + int(fields.get("inactive_file", 0))  # the kernel frees cached files when memory is needed
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return 2**62


def resident() -> int:
    """Bytes of memory this process holds; 0 if that is not known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 0


def return_large_blocks() -> None:
    """Asks the C library to give a block of more than a megabyte back to the system as soon as it is free.

    Otherwise glibc keeps up to twice the largest block that was ever freed, 64 MB at most, for the next allocation.
    """
    with contextlib.suppress(OSError, AttributeError):  # a C library without mallopt
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
