"""The server's model as a pair of float32 vectors, and the ways a rule moves it.

    self.w.step(-lr, gradient)           w <- w - lr*gradient

`high` is what clients see; `high + low` is what the server knows. A step smaller than half a unit in the last place of
a weight collects in `low` instead of being lost. The pair costs the same memory traffic as one float64 vector, and
`high` can be handed out without being converted.
"""

from __future__ import annotations

import numpy as np

from . import kernels
from .types import Accumulator, Vector


class Weights:
    """w^t, exact to about 48 bits."""

    __slots__ = ("high", "low")

    def __init__(self, w0: Vector) -> None:
        self.high: Vector = kernels.zeros(w0.size, np.float32)
        self.low: Vector = kernels.zeros(w0.size, np.float32)
        self.put_back(w0)

    @property
    def size(self) -> int:
        """d, the number of weights."""
        return self.high.size

    @property
    def nbytes(self) -> int:
        """Of both vectors."""
        return self.high.nbytes + self.low.nbytes

    def put_back(self, model: Vector) -> None:
        """w <- model."""
        self.high[:] = model
        self.low[:] = 0.0

    def step(self, a: float, v: Vector | Accumulator) -> None:
        """w <- w + a*v."""
        kernels.step(self.high, self.low, a, v)

    def drain(self, a: float, acc: Accumulator) -> None:
        """w <- w + a*acc; acc <- 0."""
        kernels.drain(self.high, self.low, a, acc)

    def assign(self, a: float, acc: Accumulator) -> None:
        """w <- a*acc; acc <- 0."""
        kernels.assign(self.high, self.low, a, acc)

    def mix(self, alpha: float, x: Vector | Accumulator) -> None:
        """w <- (1-alpha)*w + alpha*x."""
        kernels.mix(self.high, self.low, alpha, x)
