"""What the float64 twins of the server rules share."""

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def f64(vector: Array) -> Array:
    """A float64 copy that shares no memory with the caller's."""
    return np.array(vector, dtype=np.float64)


def mean_of(rows: list[Array]) -> Array:
    """The plain mean of a list of vectors."""
    return np.asarray(np.mean(np.stack(rows), axis=0), dtype=np.float64)


def sum_of(rows: list[Array]) -> Array:
    """The plain sum of a list of vectors."""
    return np.asarray(np.sum(np.stack(rows), axis=0), dtype=np.float64)


def weighted_mean(rows: list[Array], weights: list[float]) -> Array:
    """Sum of weight * row over the sum of the weights."""
    return sum_of([weight * row for row, weight in zip(rows, weights, strict=True)]) / sum(weights)


class Twin(ABC):
    """A server: the model w and its version t."""

    w: Array
    t: int

    def __init__(self, n: int, w0: Array) -> None:
        self.n = n
        self.w = f64(w0)
        self.t = 0

    @abstractmethod
    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        """Take one update; "applied" (t grew), "buffered" or "rejected"."""

    def job(self, client: int) -> tuple[int, Array]:
        return self.t, self.w.copy()

    def extra(self) -> Array | None:
        return None
