"""How much an update of staleness tau counts: s(tau), with s(0) = 1."""

from __future__ import annotations


def polynomial(tau: int, a: float) -> float:
    """s(tau) = (tau+1)^(-a)."""
    return float((tau + 1.0) ** -a) if a else 1.0


def hinge(tau: int, a: float, b: float) -> float:
    """s(tau) = 1 if tau <= b, else 1/(a*(tau-b)+1)."""
    return 1.0 if tau <= b else 1.0 / (a * (tau - b) + 1.0)
