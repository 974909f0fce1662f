"""How many local steps a job makes: a fixed number, a random one, or a number of epochs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..errors import CountError


class Steps(Protocol):
    """Draws K for one job."""

    def draw(self, u: float, batches: int) -> int:
        """K for a client whose epoch has that many batches; u is uniform on (0, 1)."""


def _at_least_one(value: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CountError(f"{what} is {value!r}; expected an integer of at least 1")


@dataclass(frozen=True)
class Fixed:
    """K = steps, always."""

    steps: int = 1

    def __post_init__(self) -> None:
        _at_least_one(self.steps, "steps")

    def draw(self, u: float, batches: int) -> int:
        """K."""
        return self.steps


@dataclass(frozen=True)
class Dynamic:
    """K uniform on {1, ..., 2c} for every job: the dynamic local steps of the AFA paper, whose mean is c + 1/2."""

    c: int = 5

    def __post_init__(self) -> None:
        _at_least_one(self.c, "c")

    def draw(self, u: float, batches: int) -> int:
        """K."""
        return 1 + int(u * 2 * self.c)


@dataclass(frozen=True)
class Epochs:
    """K = epochs times the client's batches per epoch."""

    epochs: int = 1

    def __post_init__(self) -> None:
        _at_least_one(self.epochs, "epochs")

    def draw(self, u: float, batches: int) -> int:
        """K."""
        return self.epochs * max(1, batches)
