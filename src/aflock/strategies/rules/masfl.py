"""MasFL: momentum-driven asynchronous federated learning.

    c~_i <- G                                                                     on an arrival
    c_i^{t+1} = c~_i for i in S_t                                                 at S arrivals
    g^{t+1} = beta*((1/S) sum over S_t of (c_i^{t+1} - c_i^t) + c^t) + (1-beta)*g^t
    theta^{t+1} = theta^t - gamma*g^{t+1}
    c^{t+1} = c^t + (1/N) sum over S_t of (c_i^{t+1} - c_i^t)

The job carries beta*c^t + (1-beta)*g^t as its extra vector `momentum`; the client's half is the local rule `masfl`.
Unless given, beta = sqrt(S*K/T) and gamma = sqrt(S*K/T)/(4 L) (theorem 3.1). See `control_variates` for the selections
and for clients that join and leave.

Yan, W., Zhong, X., Wang, X., Zhang, Y.-J. A.: Momentum-Driven Adaptivity: Towards Tuning-Free Asynchronous Federated
Learning. ICML 2025. Algorithms 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from ... import theorems
from ...params import Params, positive
from ..control_variates import ControlParams, ControlVariates
from ..registry import register


@dataclass(frozen=True)
class MasFlParams(ControlParams):
    """Hyper-parameters of masfl."""

    smoothness: float = positive(1.0, "L, for the theorem's gamma", only={"gamma": (None,)})


@register(
    "masfl",
    paper="Yan et al., Momentum-driven adaptivity, algorithm 1",
    rule="at S: g <- beta*(diff/S + c) + (1-beta)*g; w <- w - gamma*g; c <- c + diff/n",
    optimum="true",
    params=MasFlParams,
)
class MasFl(ControlVariates):
    """A step along a momentum of every client's control variate."""

    p: MasFlParams

    def __init__(self, clients: int, params: Params, seed: int = 0) -> None:
        super().__init__(clients, params, seed)
        theorem = theorems.masfl_gamma(self.p.buffer, self.p.steps, self.p.rounds, self.p.smoothness)
        self.gamma = theorem if self.p.gamma is None else self.p.gamma

    def _move(self, chosen: list[int], size: int) -> None:
        super()._move(chosen, size)
        self.w.step(-self.gamma, self.g)
