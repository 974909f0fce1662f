"""The one place that writes files: whole, synced, or not at all; and JSON that everybody can read.

A file is written under another name in the same folder, synced, moved to its place, and then the folder is synced:
whatever happens, the name stands for the old content or for all of the new one, after a loss of power, too. Files that
only grow (journals, traces, measurements) are the business of those who append to them.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PIECE, _LARGE = 32 << 20, 4 << 20

PRIVATE = 0o600
"""The mode of a file that only its owner may read."""

Content = str | bytes | memoryview


def write_whole(file: Path, *content: Content, mode: int = 0o666) -> None:
    """Writes a file, part after part; what cannot be finished leaves the old one, and nothing beside it.

    `mode` holds from the first moment on; the user's umask takes its part away, as for any other file.
    """
    if file.exists() and not file.is_file() and not file.is_dir():  # /dev/stdout: there is nothing to replace
        file.write_bytes(b"".join(part.encode() if isinstance(part, str) else part for part in content))
        return
    with _written_beside(file, content, mode) as temporary:
        os.replace(temporary, file)
    sync_folder(file.parent)


def write_new(file: Path, *content: Content, mode: int = 0o666) -> None:
    """The same for a file that must not exist yet; FileExistsError otherwise."""
    with _written_beside(file, content, mode) as temporary:
        _name(temporary, file)
    sync_folder(file.parent)


@contextmanager
def _written_beside(file: Path, content: tuple[Content, ...], mode: int) -> Iterator[Path]:
    """A synced file with that content and a name nobody else has; gone at the end unless it was moved."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        try:
            for part in content:
                write_through(descriptor, part.encode() if isinstance(part, str) else part)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _name(temporary: Path, file: Path) -> None:
    """Gives a file a name that nothing has yet."""
    try:
        os.link(temporary, file)  # unlike a rename, it fails where something has the name
    except FileExistsError:
        raise
    except OSError:  # a file system without links: a memory stick, say
        if os.path.lexists(file):
            raise FileExistsError(file) from None
        os.replace(temporary, file)


def remove_leftovers(folder: Path, *names: str) -> None:
    """Removes what a process left that was killed while it wrote files of these names (patterns of `glob`).

    Only for whoever is alone in the folder: another process may be writing such a file just now.
    """
    for name in names:
        for leftover in folder.glob(f".{name}.*"):
            leftover.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes sure that the names in a folder outlast a loss of power, as their contents do."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such thing
            raise
    finally:
        os.close(descriptor)


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


def locked(descriptor: int, *, wait: bool = False) -> bool:
    """Takes an open file for this process alone, until it is closed; false if another has it and this does not wait."""
    try:
        import fcntl
    except ModuleNotFoundError:  # no such thing on this system
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Waits for its turn: one process at a time is inside; one that is killed there does not block the others."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, PRIVATE)
    try:
        locked(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON; a number that is none (the accuracy of a regression, say) becomes null, the word the standard has."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
