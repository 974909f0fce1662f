"""AdaMasFL's client half: the masfl direction, divided by its norm.

    d_k = beta*(grad F_i(x_k) - ct_i) + job extra;    x_{k+1} = x_k - eta * d_k/||d_k||

A zero norm moves nothing. Unless given, eta = 1/(K*sqrt(T)) (theorem 4.1).

Yan, W., Zhong, X., Wang, X., Zhang, Y.-J. A.: Momentum-Driven Adaptivity: Towards Tuning-Free Asynchronous Federated
Learning. ICML 2025. Algorithm 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ... import theorems
from ...params import positive
from ...types import Job, Vector
from ..base import Direction, Known
from ..momentum import Momentum, MomentumParams
from ..registry import register


@dataclass(frozen=True)
class AdaMasFlParams(MomentumParams):
    """Hyper-parameters of adamasfl."""

    eta_l: float | None = positive(None, "eta, local step size; None: 1/(K*sqrt(T))")


@register(
    "adamasfl",
    paper="Yan et al., Momentum-driven adaptivity, algorithm 4",
    rule="the masfl direction divided by its norm",
    params=AdaMasFlParams,
)
class AdaMasFl(Momentum):
    """Steps of constant length."""

    p: AdaMasFlParams

    @property
    def eta_l(self) -> float:
        return theorems.adamasfl_eta(self.p.steps, self.p.rounds) if self.p.eta_l is None else self.p.eta_l

    def _directions(self, job: Job, memory: Known) -> Direction:
        plain = super()._directions(job, memory)

        def direction(gradient: Vector, x: Vector, k: int) -> Vector:
            full = plain(gradient, x, k)
            norm = float(np.sqrt(np.square(full, dtype=np.float64).sum()))
            return (full / norm if norm > 0 else full).astype(np.float32)

        return direction
