"""Step sizes the papers prove, from S (contributions per round), K (local steps) and T (server steps).

Yan, W., Zhong, X., Wang, X., Zhang, Y.-J. A.: Momentum-Driven Adaptivity: Towards Tuning-Free Asynchronous Federated
Learning. ICML 2025. Theorems 3.1 and 4.1. The server and the client use the same numbers, so they share this module.
"""

from __future__ import annotations

import math

from .errors import ParameterError


def momentum(s: int, k: int, t: int) -> float:
    """beta = sqrt(S*K/T)."""
    if s * k > t:
        raise ParameterError(
            f"beta = sqrt(buffer*steps/rounds) = sqrt({s}*{k}/{t}) exceeds 1; expected rounds of at least {s * k}, or "
            "an explicit beta"
        )
    return math.sqrt(s * k / t)


def masfl_gamma(s: int, k: int, t: int, smoothness: float) -> float:
    """gamma = sqrt(S*K/T)/(4 L)."""
    return math.sqrt(s * k / t) / (4.0 * smoothness)


def adamasfl_gamma(s: int, k: int, t: int) -> float:
    """gamma = (S*K)^(1/4) / T^(3/4)."""
    return float((s * k) ** 0.25 / t**0.75)


def adamasfl_eta(k: int, t: int) -> float:
    """eta = 1/(K*sqrt(T))."""
    return 1.0 / (k * math.sqrt(t))
