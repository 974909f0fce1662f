"""Shared memory buffers: the run and a worker process both map the same file, so vectors are copied once, not pickled.

A buffer holds the vectors a job needs, one after the other, and behind them the vectors of its result. The process that
writes a vector tells the other one its `Location`, over a pipe.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import AflockError

_ALIGNMENT = 64  # a cache line, and a multiple of every dtype's size

Array = npt.NDArray[Any]


class Location(NamedTuple):
    """Where in a shared buffer a vector is, and of what dtype and shape it is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class BufferTooSmall(AflockError):
    """The vectors do not fit into the shared buffer; `needed` is the size in bytes that would hold them."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"a shared buffer of {needed} bytes is needed")
        self.needed = needed


class SharedBuffer:
    """One file that two processes map into memory: one creates it, the other opens it."""

    def __init__(self, path: Path, size: int, *, create: bool = False) -> None:
        self.path, self.size = path, size
        with open(path, "x+b" if create else "r+b") as file:
            if create:
                _reserve(file.fileno(), size)
            self._map = mmap.mmap(file.fileno(), size)

    def write(self, arrays: Mapping[str, Array], start: int = 0) -> tuple[list[Location], int]:
        """Copies the vectors into the buffer from offset `start` on.

        Returns their locations and the offset at which the free space begins. Raises `BufferTooSmall` before it writes.
        """
        locations, offset = [], start
        for name, array in arrays.items():
            locations.append(Location(name, array.dtype.str, array.shape, offset))
            offset += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if offset > self.size:
            raise BufferTooSmall(offset)
        for location in locations:
            self.view(location)[...] = arrays[location.name]
        return locations, offset

    def view(self, location: Location) -> Array:
        """The vector at that location: a view, valid until the buffer is used for another job."""
        flat = np.frombuffer(self._map, location.dtype, math.prod(location.shape), location.offset)
        return flat.reshape(location.shape)


def _reserve(descriptor: int, size: int) -> None:
    """Gives the file its size and reserves the memory or disk space for it.

    Without the reservation, a full file system shows only when a process first writes to a page: SIGBUS then kills it.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def make_folder(needed: int) -> Path:
    """Makes a folder for shared buffers of `needed` bytes: in memory if there is twice as much free, else on disk."""
    memory = Path("/dev/shm")  # any user may write there; mkdtemp makes a name that nobody can guess
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 * needed
    return Path(tempfile.mkdtemp(prefix="aflock-", dir=memory if roomy else None))
