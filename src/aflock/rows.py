"""One vector per client: dense float32 in memory, int8 in memory, or float32 on disk; one interface.

    rows = create("int8", clients=range(100), length=1_200_000, seed=0)
    rows.exchange(3, v, total)        # total <- total + v - row_3; row_3 <- v

Each kind says how many bytes it takes before it takes them (`estimate`), and what cannot fit is refused with one
sentence instead of a machine that swaps. Rows come and go with their clients (`insert`, `discard`).
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from . import kernels, memory, rng
from .errors import DoesNotFit, ParameterError, StateError
from .memory import human
from .types import Accumulator, State, Vector

KINDS = ("dense", "int8", "disk")


def estimate(kind: str, clients: int, length: int) -> int:
    """The bytes that many rows of that kind take, in memory or (kind "disk") on disk."""
    return clients * _kind(kind).row_bytes(length)


def create(kind: str, clients: Iterable[int], length: int, *, seed: int = 0, folder: str | None = None) -> Rows:
    """Zero rows for the given clients, or `DoesNotFit` before anything is allocated."""
    ids = list(clients)
    rows = _kind(kind)(length, seed=seed, folder=folder)
    rows.require(len(ids))
    rows.reserve(len(ids))
    for client in ids:
        rows.insert(client, check=False)
    return rows


def exact(kind: str, clients: Iterable[int], length: int, *, folder: str | None = None) -> DenseRows:
    """As `create`, for the kinds that keep every bit ("dense" and "disk") and can hand a row to a kernel."""
    made = create(kind, clients, length, folder=folder)
    if not isinstance(made, DenseRows):
        raise ParameterError(f"rows of kind {kind!r} round what they store; expected 'dense' or 'disk'")
    return made


def _kind(kind: str) -> type[Rows]:
    if kind not in _CLASSES:
        raise ParameterError(f"rows of kind {kind!r} do not exist; expected one of {', '.join(KINDS)}")
    return _CLASSES[kind]


class Rows(ABC):
    """One row per client. All arithmetic on rows happens here, so that a rule need not know how they are stored."""

    kind: ClassVar[str]
    _advice: ClassVar[str]

    def __init__(self, length: int, *, seed: int = 0, folder: str | None = None) -> None:
        self.length = length
        self.folder = folder

    # -- how large -------------------------------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def row_bytes(length: int) -> int:
        """The bytes of one row."""

    @property
    def nbytes(self) -> int:
        """The bytes of the rows present."""
        return len(self) * self.row_bytes(self.length)

    def require(self, clients: int) -> None:
        """Raises `DoesNotFit` unless that many further rows fit."""
        need, free = clients * self.row_bytes(self.length), self._free()
        if need > free:
            raise DoesNotFit(
                f"{clients} {self.kind} rows of {self.length} weights need {human(need)}, but {self._where()} has "
                f"{human(free)} free; use {self._advice}fewer clients or a smaller model"
            )

    def reserve(self, clients: int) -> None:
        """Takes the space of that many further rows at once, where taking it piecemeal costs more."""

    def _free(self) -> int:
        return memory.available()

    def _where(self) -> str:
        return "memory"

    # -- who is here ------------------------------------------------------------------------------------------------

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, client: int) -> bool: ...

    @abstractmethod
    def __iter__(self) -> Iterator[int]: ...

    @abstractmethod
    def insert(self, client: int, vector: Vector | None = None, *, check: bool = True) -> None:
        """Adds a row, zero unless a vector is given."""

    @abstractmethod
    def discard(self, client: int) -> None:
        """Removes a row and gives its space back."""

    # -- what is done with rows -------------------------------------------------------------------------------------

    @abstractmethod
    def read(self, client: int) -> Vector:
        """A copy of the stored row."""

    @abstractmethod
    def store(self, client: int, vector: Vector) -> None:
        """row <- vector."""

    @abstractmethod
    def exchange(self, client: int, vector: Vector, total: Accumulator) -> None:
        """total <- total + vector - row; row <- vector (as stored)."""

    @abstractmethod
    def exchange_step(self, client: int, vector: Vector, total: Accumulator, w: Vector, low: Vector, a: float) -> None:
        """`exchange`, then w <- w + a*total, in one pass."""

    @abstractmethod
    def add_to(self, total: Accumulator, a: float, client: int) -> None:
        """total <- total + a*row."""

    # -- state ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def state_dict(self, *, detached: bool = True) -> State:
        """Everything; unless `detached` from what happens next, its arrays are the rows themselves."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Takes over a saved state."""

    def _check(self, state: State) -> None:
        if state.get("kind") != self.kind or state.get("length") != self.length:
            raise StateError(
                f"saved rows are {state.get('kind')} of {state.get('length')} weights; expected {self.kind} of "
                f"{self.length}"
            )


class DenseRows(Rows):
    """float32 in memory: exact, 4 bytes per weight."""

    kind = "dense"
    _advice = 'cache="disk", or cache="int8" where the rule has it, '

    def __init__(self, length: int, *, seed: int = 0, folder: str | None = None) -> None:
        super().__init__(length, seed=seed, folder=folder)
        self._rows: dict[int, Vector] = {}
        self._pool: list[Vector] = []

    @staticmethod
    def row_bytes(length: int) -> int:
        return 4 * length

    def prepare(self, clients: int) -> None:
        """Keeps that many vectors ready, so that inserting a vector allocates nothing."""
        self._pool.extend(kernels.zeros(self.length, np.float32) for _ in range(clients - len(self._pool)))

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, client: int) -> bool:
        return client in self._rows

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def row(self, client: int) -> Vector:
        """The stored row itself, to be handed to a kernel."""
        return self._rows[client]

    def insert(self, client: int, vector: Vector | None = None, *, check: bool = True) -> None:
        if check:
            self.require(1)
        if vector is None:
            self._rows[client] = self._new(client)
        else:
            self._rows[client] = self._pool.pop() if self._pool else self._new(client)
            self._rows[client][:] = vector

    def _new(self, client: int) -> Vector:
        return kernels.zeros(self.length, np.float32)

    def discard(self, client: int) -> None:
        del self._rows[client]

    def read(self, client: int) -> Vector:
        return np.array(self._rows[client])

    def store(self, client: int, vector: Vector) -> None:
        self._rows[client][:] = vector

    def take(self, client: int, other: DenseRows) -> None:
        """row <- the other's row of that client, which goes; no copy is made, the other gets the spare vector."""
        other._pool.append(self._rows[client])
        self._rows[client] = other._rows.pop(client)

    def exchange(self, client: int, vector: Vector, total: Accumulator) -> None:
        kernels.exchange(self._rows[client], vector, total)

    def exchange_step(self, client: int, vector: Vector, total: Accumulator, w: Vector, low: Vector, a: float) -> None:
        kernels.exchange_step(self._rows[client], vector, total, w, low, a)

    def add_to(self, total: Accumulator, a: float, client: int) -> None:
        kernels.add(total, a, self._rows[client])

    def state_dict(self, *, detached: bool = True) -> State:
        rows = {str(client): row.copy() if detached else row for client, row in self._rows.items()}
        return {"kind": self.kind, "length": self.length, "rows": rows}

    def load_state_dict(self, state: State) -> None:
        self._check(state)
        self.require(max(0, len(state["rows"]) - len(self)))
        for client in list(self._rows):
            self.discard(client)
        for client, row in state["rows"].items():
            self.insert(int(client), row, check=False)


class DiskRows(DenseRows):
    """float32 in a memory-mapped file: n x d may exceed memory; the system keeps the rows in use in memory.

    The file has no name (it is unlinked while open), so that nothing is left behind however the process ends. It lives
    in `folder`, by default the system's folder for temporary files.
    """

    kind = "disk"
    _advice = "another cache_dir, "

    def __init__(self, length: int, *, seed: int = 0, folder: str | None = None) -> None:
        super().__init__(length, seed=seed, folder=folder)
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

    def _free(self) -> int:
        return shutil.disk_usage(self.folder or tempfile.gettempdir()).free

    def _where(self) -> str:
        return f"the disk under {self.folder or tempfile.gettempdir()}"

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
        self._rows[client][:] = 0.0  # what is spare is zero
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


class Int8Rows(Rows):
    """8 bits per weight and one float32 scale per block of 256: 1.016 bytes per weight, unbiased.

    A vector is stored by stochastic rounding, E[stored] = vector. The random bits of the j-th store come from the
    seed and j alone, so a run repeats bit for bit.
    """

    kind = "int8"
    _advice = 'cache="disk", '

    def __init__(self, length: int, *, seed: int = 0, folder: str | None = None) -> None:
        super().__init__(length, seed=seed, folder=folder)
        self._rows: dict[int, tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]] = {}
        self._seed = rng.key(seed, "quantiser") & (2**64 - 1)
        self._stores = 0

    @staticmethod
    def row_bytes(length: int) -> int:
        return length + 4 * -(-length // kernels.BLOCK)

    def _key(self) -> np.uint32:
        """32 fresh bits per store: a step of the splitmix64 sequence."""
        self._stores += 1
        mask = 2**64 - 1
        z = (self._seed + self._stores * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return np.uint32((z ^ (z >> 31)) >> 32)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, client: int) -> bool:
        return client in self._rows

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def insert(self, client: int, vector: Vector | None = None, *, check: bool = True) -> None:
        if check:
            self.require(1)
        blocks = -(-self.length // kernels.BLOCK)
        self._rows[client] = (kernels.zeros(self.length, np.int8), kernels.zeros(blocks, np.float32))
        if vector is not None:
            self.store(client, vector)

    def discard(self, client: int) -> None:
        del self._rows[client]

    def read(self, client: int) -> Vector:
        total = np.zeros(self.length)
        self.add_to(total, 1.0, client)
        return total.astype(np.float32)

    def store(self, client: int, vector: Vector) -> None:
        kernels.int8_store(*self._rows[client], vector, self._key())

    def exchange(self, client: int, vector: Vector, total: Accumulator) -> None:
        kernels.int8_exchange(*self._rows[client], vector, total, self._key())

    def exchange_step(self, client: int, vector: Vector, total: Accumulator, w: Vector, low: Vector, a: float) -> None:
        kernels.int8_exchange_step(*self._rows[client], vector, total, self._key(), w, low, a)

    def add_to(self, total: Accumulator, a: float, client: int) -> None:
        kernels.int8_add(total, a, *self._rows[client])

    def state_dict(self, *, detached: bool = True) -> State:
        levels = {str(client): q.copy() if detached else q for client, (q, _) in self._rows.items()}
        scales = {str(client): s.copy() if detached else s for client, (_, s) in self._rows.items()}
        state: State = {"kind": self.kind, "length": self.length, "levels": levels, "scales": scales}
        return state | {"seed": self._seed, "stores": self._stores}

    def load_state_dict(self, state: State) -> None:
        self._check(state)
        self.require(max(0, len(state["levels"]) - len(self)))
        self._rows.clear()
        for client, levels in state["levels"].items():
            self.insert(int(client), check=False)
            q, scales = self._rows[int(client)]
            q[:], scales[:] = levels, state["scales"][client]
        self._seed, self._stores = int(state["seed"]), int(state["stores"])


_CLASSES: dict[str, type[Rows]] = {"dense": DenseRows, "int8": Int8Rows, "disk": DiskRows}
