"""The one module that writes files: whole and synced, or not at all. Also: file locks, and JSON by the standard.

A file is written under another name in the same folder, synced, and renamed; then the folder is synced. So the name
always has the old content or all of the new one, after a loss of power, too. Files that only grow (journals, traces,
measurements) are written by the modules that append to them.
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
    """Writes a file, part after part; after an error the old file is still there, and no temporary one.

    The file has `mode` from its creation on, less the bits of the user's umask, as any other file.
    """
    if file.exists() and not file.is_file() and not file.is_dir():  # /dev/stdout, say: no file to replace
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
    """A synced temporary file with that content, beside `file`; removed at the end unless the caller has renamed it."""
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
    """Renames the temporary file; raises FileExistsError if `file` exists."""
    try:
        os.link(temporary, file)  # a rename would replace an existing file; a link fails
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links, such as FAT
        if os.path.lexists(file):
            raise FileExistsError(file) from None
        os.replace(temporary, file)


def remove_leftovers(folder: Path, *names: str) -> None:
    """Removes the temporary files of processes that were killed while they wrote these names (patterns of `glob`).

    Call it only if no other process writes to the folder: it would remove the file that one is writing.
    """
    for name in names:
        for leftover in folder.glob(f".{name}.*"):
            leftover.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Syncs a folder, so that new and renamed files in it survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def write_through(descriptor: int, content: bytes | memoryview) -> None:
    """Writes all of the content. Syncs large content piece by piece and drops it from the page cache.

    Nobody reads it soon, and a kernel that must free memory for the page cache takes longer than the disk.
    """
    rest = memoryview(content).cast("B") if len(content) else memoryview(b"")
    while rest:
        written = os.write(descriptor, rest[:_PIECE])
        rest = rest[written:]
        if written >= _LARGE and hasattr(os, "posix_fadvise"):
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def locked(descriptor: int, *, wait: bool = False) -> bool:
    """Locks an open file for this process until it is closed; false if another process has it and `wait` is false."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows has no flock: there, nothing is locked
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Holds an exclusive lock on the file `lock` inside. The kernel frees it if the process is killed."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, PRIVATE)
    try:
        locked(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON text. NaN and infinities, which the standard does not allow, become null (the accuracy of a regression)."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
