"""One vector per client: float32 or int8 in memory; one interface. Rows on disk are in `system.disk_rows`.

    rows = create("int8", clients=range(100), length=1_200_000, seed=0)
    rows.exchange(3, v, total)        # total <- total + v - row_3; row_3 <- v

Whoever makes rows says how much memory there is (`free`); what cannot fit is refused with one sentence instead of a
machine that swaps. Rows come and go with their clients (`insert`, `discard`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from . import kernels, rng
from .errors import DoesNotFit, ParameterError, StateError
from .system.words import human
from .types import Accumulator, State, Vector
from .weights import Weights

R = TypeVar("R", bound="Rows")

KINDS = ("dense", "int8", "disk")

_DOMINANT = 2.0**30
"""Times what remains of a sum: a number so much larger has left nothing but its rounding of the others."""


FreeBytes = Callable[[], int]
"""Says how many bytes may still be taken."""


def unlimited() -> int:
    """For rows that nobody bounds: more bytes than there are."""
    return 2**62


class RowMaker(Protocol):
    """Makes zero rows for the given clients, or raises `DoesNotFit` before anything is allocated."""

    def __call__(
        self, kind: str, clients: Iterable[int], length: int, *, seed: int = 0, folder: str | None = None
    ) -> Rows: ...


def create(
    kind: str, clients: Iterable[int], length: int, *, seed: int = 0, folder: str | None = None,
    free: FreeBytes = unlimited,
) -> Rows:  # fmt: skip
    """Zero rows in memory; `system.disk_rows.create` also makes those on disk, and knows how much memory there is."""
    kinds: dict[str, type[DenseRows | Int8Rows]] = {"dense": DenseRows, "int8": Int8Rows}
    if kind not in kinds:
        raise ParameterError(f"rows of kind {kind!r} do not exist; expected one of {', '.join(KINDS)}")
    return filled(kinds[kind](length, seed=seed, free=free), clients)


def filled(rows: R, clients: Iterable[int]) -> R:
    """The rows, with a zero row for each client; `DoesNotFit` before anything is allocated."""
    ids = list(clients)
    rows.require(len(ids))
    rows.reserve(len(ids))
    for client in ids:
        rows.insert(client, check=False)
    return rows


def exact(rows: Rows) -> DenseRows:
    """The rows, if they keep every bit ("dense" and "disk") and can hand a row to a kernel."""
    if not isinstance(rows, DenseRows):
        raise ParameterError(f"rows of kind {rows.kind!r} round what they store; expected 'dense' or 'disk'")
    return rows


class Rows(ABC):
    """One row per client. All arithmetic on rows happens here, so that a rule need not know how they are stored."""

    kind: ClassVar[str]
    _advice: ClassVar[str]

    def __init__(self, length: int, *, seed: int = 0, free: FreeBytes = unlimited) -> None:
        self.length = length
        self.free = free

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
        need, free = clients * self.row_bytes(self.length), self.free()
        if need > free:
            raise DoesNotFit(
                f"{clients} {self.kind} rows of {self.length} weights need {human(need)}, but {self._where()} has "
                f"{human(free)} free; use {self._advice}fewer clients or a smaller model"
            )

    def reserve(self, clients: int) -> None:
        """Takes the space of that many further rows at once, where taking it piecemeal costs more."""

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
    def exchange_step(self, client: int, vector: Vector, total: Accumulator, w: Weights, a: float) -> None:
        """`exchange`, then w <- w + a*total, in one pass."""

    @abstractmethod
    def add_to(self, total: Accumulator, a: float, client: int) -> None:
        """total <- total + a*row."""

    @abstractmethod
    def largest(self, client: int) -> float:
        """The largest absolute number of a row, or a little more."""

    def take_out(self, client: int, total: Accumulator, kept: Iterable[int] | None = None) -> None:
        """total <- total - row, and the row goes; `kept` are the clients whose rows `total` holds (None: all others).

        Where the row was so large that the sum has lost the digits of the others, they are summed again.
        """
        largest = self.largest(client)
        self.add_to(total, -1.0, client)
        self.discard(client)
        if largest > _DOMINANT * max(total.max(), -total.min()):
            total[:] = 0.0
            for other in self if kept is None else kept:
                self.add_to(total, 1.0, other)

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

    def __init__(self, length: int, *, seed: int = 0, free: FreeBytes = unlimited) -> None:
        super().__init__(length, seed=seed, free=free)
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

    def blank(self, client: int) -> Vector:
        """The client's row, to be overwritten: its numbers mean nothing if the client had none."""
        if client not in self._rows:
            self._rows[client] = self._pool.pop() if self._pool else self._new(client)
        return self._rows[client]

    def recycle(self, client: int) -> None:
        """Removes a row; its vector is kept for the next one, so that inserting allocates nothing."""
        self._pool.append(self._rows.pop(client))

    def take(self, client: int, other: DenseRows) -> None:
        """row <- the other's row of that client, which goes; no copy is made, the other gets the spare vector."""
        other._pool.append(self._rows[client])
        self._rows[client] = other._rows.pop(client)

    def exchange(self, client: int, vector: Vector, total: Accumulator) -> None:
        kernels.exchange(self._rows[client], vector, total)

    def exchange_step(self, client: int, vector: Vector, total: Accumulator, w: Weights, a: float) -> None:
        kernels.exchange_step(self._rows[client], vector, total, w.high, w.low, a)

    def add_to(self, total: Accumulator, a: float, client: int) -> None:
        kernels.add(total, a, self._rows[client])

    def largest(self, client: int) -> float:
        return kernels.largest(self._rows[client])

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


class Int8Rows(Rows):
    """8 bits per weight and one float32 scale per block of 256: 1.016 bytes per weight, unbiased.

    A vector is stored by stochastic rounding, E[stored] = vector. The random bits of the j-th store come from the
    seed and j alone, so a run repeats bit for bit.
    """

    kind = "int8"
    _advice = 'cache="disk", '

    def __init__(self, length: int, *, seed: int = 0, free: FreeBytes = unlimited) -> None:
        super().__init__(length, seed=seed, free=free)
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

    def exchange_step(self, client: int, vector: Vector, total: Accumulator, w: Weights, a: float) -> None:
        kernels.int8_exchange_step(*self._rows[client], vector, total, self._key(), w.high, w.low, a)

    def add_to(self, total: Accumulator, a: float, client: int) -> None:
        kernels.int8_add(total, a, *self._rows[client])

    def largest(self, client: int) -> float:
        return 128.0 * kernels.largest(self._rows[client][1])

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
