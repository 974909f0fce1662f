"""How much an update of staleness tau counts: s(tau), with s(0) = 1."""

from __future__ import annotations

from collections.abc import Callable

Weight = Callable[[int], float]


def constant() -> Weight:
    """s(tau) = 1."""
    return lambda tau: 1.0


def polynomial(a: float) -> Weight:
    """s(tau) = (tau+1)^(-a)."""
    return lambda tau: float((tau + 1.0) ** -a)


def hinge(a: float, b: float) -> Weight:
    """s(tau) = 1 if tau <= b, else 1/(a*(tau-b)+1)."""
    return lambda tau: 1.0 if tau <= b else 1.0 / (a * (tau - b) + 1.0)
