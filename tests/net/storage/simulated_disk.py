"""A disk for tests: it forgets at a power cut what was not synced, and its syncs can fail as Linux lets them fail.

Files are pages. A write dirties pages in the cache; a sync puts the dirty ones on the disk. When that fails, the pages
are clean all the same (ext4, XFS and others do so since the data could not be written): whoever reads the file still
sees them, the next sync has nothing to do and succeeds, and the power cut shows what was on the disk.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aflock.net.protocol.wire import BytesLike
from aflock.net.storage.disk import Disk

PAGE = 16
"""Small, so that small records are on several pages."""


def _broken() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


@dataclass
class File:
    """What the cache shows, what is on the disk, and which pages differ as far as the system knows."""

    cache: bytearray = field(default_factory=bytearray)
    disk: bytearray = field(default_factory=bytearray)
    dirty: set[int] = field(default_factory=set)

    def put(self, offset: int, data: bytes) -> None:
        self.cache.extend(bytes(max(0, offset + len(data) - len(self.cache))))
        self.cache[offset : offset + len(data)] = data
        self.dirty |= set(range(offset // PAGE, (offset + len(data) - 1) // PAGE + 1))

    def clean(self, *, lost: bool) -> None:
        """All dirty pages are clean now; those that are `lost` were never written."""
        if not lost:
            del self.disk[len(self.cache) :]
            self.disk.extend(bytes(len(self.cache) - len(self.disk)))
            for page in self.dirty:
                begin, end = page * PAGE, min((page + 1) * PAGE, len(self.cache))
                self.disk[begin:end] = self.cache[begin:end]
        self.dirty.clear()


class SimulatedDisk(Disk):
    """Holds files in memory; folders are real and only stand for themselves."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self.names_on_disk: dict[str, File] = {}
        self.fails = False
        """Whether the next sync fails, and with it everything until `restart`."""
        self.syncs = True
        """Whether a sync of a file does anything: a process that is killed at that moment has none."""
        self._broken = False
        self._open: dict[int, File | None] = {}
        self._next = 1_000_000

    def restart(self) -> None:
        """The process begins anew; what the system has in its memory is there."""
        self.fails, self._broken, self.syncs = False, False, True
        self._open.clear()

    def lose_dirty_pages(self) -> None:
        """The system could not write what was dirty, and nobody was told."""
        for file in self.files.values():
            file.clean(lost=True)

    def cut_power(self) -> None:
        """Only what is on the disk is left."""
        self.restart()
        self.files = dict(self.names_on_disk)
        for file in self.files.values():
            file.cache = bytearray(file.disk)
            file.dirty.clear()

    def open(self, path: Path, flags: int) -> int:
        self._check()
        if path.is_dir():
            found = None
        elif flags & os.O_CREAT:
            assert path.name not in self.files
            found = self.files[path.name] = File()
        else:
            found = self.files[path.name]
        self._next += 1
        self._open[self._next] = found
        return self._next

    def close(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)

    def size(self, file: int | Path) -> int:
        self._check()
        return len(self.files[file.name].cache if isinstance(file, Path) else self._file(file).cache)

    def names(self, folder: Path) -> list[str]:
        return list(self.files)

    def remove(self, path: Path) -> None:
        self._check()
        self.files.pop(path.name, None)

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        self._check()
        found = self._file(descriptor).cache[offset : offset + len(buffer)]
        buffer[: len(found)] = found
        return len(found)

    def write(self, descriptor: int, buffers: Sequence[BytesLike], offset: int) -> int:
        self._check()
        data = b"".join(buffers)
        self._file(descriptor).put(offset, data)
        return len(data)

    def truncate(self, descriptor: int, size: int) -> None:
        self._check()
        file = self._file(descriptor)
        del file.cache[size:]
        file.dirty = {page for page in file.dirty if page * PAGE < size}

    def sync(self, descriptor: int) -> None:
        self._check()
        file = self._open[descriptor]
        if file is None:
            self.names_on_disk = dict(self.files)
            return
        if self.syncs:
            file.clean(lost=self.fails)
        if self.fails:
            self._broken = True
            raise _broken()

    def sync_data(self, descriptor: int) -> None:
        self.sync(descriptor)

    def drop_cache(self, descriptor: int, offset: int, count: int) -> None:
        pass

    def _file(self, descriptor: int) -> File:
        found = self._open[descriptor]
        assert found is not None
        return found

    def _check(self) -> None:
        if self._broken:
            raise _broken()
