"""The few system calls that a journal makes on its files; tests replace `Disk` by one that fails or forgets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..protocol.wire import BytesLike


class Disk:
    """The real disk: each method makes one system call."""

    def open(self, path: Path, flags: int) -> int:
        """Opens a file and returns its descriptor; only the owner may read or write a file that this creates."""
        return os.open(path, flags, 0o600)

    def close(self, descriptor: int) -> None:
        """Closes a descriptor."""
        os.close(descriptor)

    def size(self, file: int | Path) -> int:
        """The size of a file in bytes."""
        return os.stat(file).st_size

    def names(self, folder: Path) -> list[str]:
        """The names of the files in a folder."""
        return os.listdir(folder)

    def remove(self, path: Path) -> None:
        """Deletes a file; it is no error if it does not exist."""
        path.unlink(missing_ok=True)

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Reads from `offset` into the buffer; returns how many bytes, at least one unless the file ends."""
        return os.preadv(descriptor, [buffer], offset)

    def write(self, descriptor: int, buffers: Sequence[BytesLike], offset: int) -> int:
        """Writes the buffers one after the other from `offset` on; returns how many bytes, maybe not all."""
        return os.pwritev(descriptor, buffers, offset)

    def truncate(self, descriptor: int, size: int) -> None:
        """Cuts a file off at `size` bytes."""
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        """Makes a file, or the names in a folder, durable."""
        os.fsync(descriptor)

    def sync_data(self, descriptor: int) -> None:
        """Makes the content of a file durable, not its times, which is cheaper; not every system has such a call."""
        getattr(os, "fdatasync", os.fsync)(descriptor)

    def drop_cache(self, descriptor: int, offset: int, count: int) -> None:
        """Tells the system, where that is possible, that it need not keep these bytes in its page cache."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)


DISK = Disk()
