"""Vectors two processes share: a file both have mapped into memory. Nothing is pickled, one copy brings a vector in.

A desk holds what a job needs, one vector after the other, and behind it what the job came to. Who writes a vector gets
back where it lies (a `Slot`), and tells the other side.
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

_ALIGNMENT = 64

Array = npt.NDArray[Any]


class Slot(NamedTuple):
    """Where a vector lies on a desk."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Full(AflockError):
    """The desk is too small; `needed` says how large it must be."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"a desk of {needed} bytes is needed")
        self.needed = needed


class Desk:
    """One shared file, made by one side and opened by the other."""

    def __init__(self, path: Path, size: int, *, create: bool = False) -> None:
        self.path, self.size = path, size
        with open(path, "x+b" if create else "r+b") as file:
            if create:
                reserve(file.fileno(), size)
            self._map = mmap.mmap(file.fileno(), size)

    def write(self, arrays: Mapping[str, Array], start: int = 0) -> tuple[list[Slot], int]:
        """Lays the vectors down from `start` on; returns their slots and where the free space begins."""
        slots, offset = [], start
        for name, array in arrays.items():
            slots.append(Slot(name, array.dtype.str, array.shape, offset))
            offset += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if offset > self.size:
            raise Full(offset)
        for slot in slots:
            self.view(slot)[...] = arrays[slot.name]
        return slots, offset

    def view(self, slot: Slot) -> Array:
        """The vector that lies there; valid as long as the desk is not used for something else."""
        flat = np.frombuffer(self._map, slot.dtype, math.prod(slot.shape), slot.offset)
        return flat.reshape(slot.shape)


def reserve(descriptor: int, size: int) -> None:
    """Makes a file that long and its room certain: what only turns out at the first touch would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def folder(needed: int) -> Path:
    """A new folder for desks: in memory where the system has enough room for that, else on disk."""
    memory = Path("/dev/shm")  # what is made in it has a name of its own
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 * needed
    return Path(tempfile.mkdtemp(prefix="aflock-", dir=memory if roomy else None))
