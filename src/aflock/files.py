"""Files that are there whole or not at all, and JSON that everybody can read."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

_PIECE, _LARGE = 32 << 20, 4 << 20


def write_whole(file: Path, *content: str | bytes | memoryview) -> None:
    """Writes a file, part after part, beside its place and moves it there; what cannot be finished leaves nothing."""
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        with temporary.open("wb", buffering=0) as out:
            for part in content:
                write_through(out.fileno(), part.encode() if isinstance(part, str) else part)
        os.replace(temporary, file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_through(descriptor: int, content: bytes | memoryview) -> None:
    """Writes all of it; a large one goes to the disk piece by piece, and none of it stays in the system's memory.

    Nobody is going to read it soon, and a system that has to find memory for it takes longer than the disk.
    """
    rest = memoryview(content).cast("B") if len(content) else memoryview(b"")
    while rest:
        written = os.write(descriptor, rest[:_PIECE])
        rest = rest[written:]
        if written >= _LARGE and hasattr(os, "posix_fadvise"):
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def locked(descriptor: int) -> bool:
    """Takes an open file for this process alone, until it is closed; false if another has it."""
    try:
        import fcntl
    except ModuleNotFoundError:  # no such thing on this system
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON; a number that is none (the accuracy of a regression, say) becomes null, the word the standard has."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
