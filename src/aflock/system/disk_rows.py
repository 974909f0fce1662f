"""Rows on disk, and a `create` that checks whether rows fit into memory.

    rows = create("disk", clients=range(100), length=1_200_000, folder="/scratch")

Rules open no file themselves: `strategies.create` passes this `create` to them.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .. import rows
from ..errors import DoesNotFit, ParameterError
from ..rows import DenseRows, Rows
from ..types import State, Vector
from . import memory
from .words import human


def create(kind: str, clients: Iterable[int], length: int, *, seed: int = 0, folder: str | None = None) -> Rows:
    """Zero rows of any kind for the given clients, or `DoesNotFit` before anything is allocated."""
    if kind == "disk":
        return rows.filled(DiskRows(length, folder=folder), clients)
    return rows.create(kind, clients, length, seed=seed, free=memory.available)


class DiskRows(DenseRows):
    """float32 in a memory-mapped file: n x d may exceed memory; the system keeps the rows in use in memory.

    The file has no name (it is unlinked while open), so that nothing is left on disk however the process ends. It is
    in `folder`, by default the system's folder for temporary files.
    """

    kind = "disk"
    _advice = "another cache_dir, "

    def __init__(self, length: int, *, folder: str | None = None) -> None:
        super().__init__(length, free=lambda: shutil.disk_usage(_under(folder)).free)
        self.folder = folder
        if folder is not None and not Path(folder).is_dir():
            raise ParameterError(f"cache_dir={folder!r} is not a folder; make it first or leave it out")
        self._slots: dict[int, int] = {}
        self._spare: list[int] = []
        self._stride = self.row_bytes(length) // 4
        self._file, name = tempfile.mkstemp(dir=folder, prefix="aflock-rows-")
        os.unlink(name)
        weakref.finalize(self, os.close, self._file)
        self._map: npt.NDArray[np.float32] = np.empty((0, self._stride), np.float32)

    @staticmethod
    def row_bytes(length: int) -> int:
        return -(-4 * length // 64) * 64  # whole cache lines, so that every row is aligned

    def _where(self) -> str:
        return f"the disk under {_under(self.folder)}"

    def require(self, clients: int) -> None:
        super().require(max(0, clients - len(self._spare)))

    def reserve(self, clients: int) -> None:
        old, new = len(self._map), len(self._map) + clients - len(self._spare)
        if new <= old:
            return
        try:  # real blocks, not a sparse file: a full disk must be an error here, not a SIGBUS in a kernel later
            os.posix_fallocate(self._file, 0, new * self._stride * 4)
        except OSError as error:
            raise DoesNotFit(f"{self._where()} refused {human((new - old) * self._stride * 4)}: {error}") from None
        pages = mmap.mmap(self._file, new * self._stride * 4)
        self._map = np.frombuffer(pages, np.float32).reshape(new, self._stride)
        self._spare.extend(range(new - 1, old - 1, -1))
        for client, slot in self._slots.items():
            self._rows[client] = self._view(slot)

    def _new(self, client: int) -> Vector:
        if not self._spare:
            self.reserve(max(1, len(self._map) // 8))
        self._slots[client] = self._spare.pop()
        return self._view(self._slots[client])

    def _view(self, slot: int) -> Vector:
        return self._map[slot, : self.length]

    def discard(self, client: int) -> None:
        self._rows[client][:] = 0.0  # rows that no client uses are zero
        super().discard(client)
        self._spare.append(self._slots.pop(client))

    def take(self, client: int, other: DenseRows) -> None:
        self.store(client, other.row(client))
        other._pool.append(other._rows.pop(client))

    def state_dict(self, *, detached: bool = True) -> State:
        """As for dense rows, but the detached copy is on disk too."""
        if not detached or not self._slots:
            return super().state_dict(detached=False)
        super().require(len(self._slots))
        copy = DiskRows(self.length, folder=self.folder)
        copy.reserve(len(self))
        for client in self._rows:
            copy.insert(client, self._rows[client], check=False)
        return {"kind": self.kind, "length": self.length, "rows": {str(c): copy.row(c) for c in copy}}


def _under(folder: str | None) -> str:
    """The folder for rows: the one given, or the system's folder for temporary files."""
    return folder or tempfile.gettempdir()
