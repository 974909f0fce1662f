"""MasFL's client half.

    direction_k = beta*(grad F_i(x_k) - ct_i) + job extra,    job extra = beta*c + (1-beta)*g of the pulled version

ct_i is the mean gradient of the client's own last job, set by its first one and renewed after every K steps. beta must
be the server's: the same explicit number, or the same buffer, steps and rounds.

Yan, W., Zhong, X., Wang, X., Zhang, Y.-J. A.: Momentum-Driven Adaptivity: Towards Tuning-Free Asynchronous Federated
Learning. ICML 2025. Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...params import positive
from ..momentum import Momentum, MomentumParams
from ..registry import register


@dataclass(frozen=True)
class MasFlParams(MomentumParams):
    """Hyper-parameters of masfl."""

    eta_l: float = positive(0.1, "eta, local step size")


@register(
    "masfl",
    paper="Yan et al., Momentum-driven adaptivity, algorithm 2",
    rule="beta*(grad F_i(x_k) - ct_i) + job extra",
    params=MasFlParams,
)
class MasFl(Momentum):
    """SGD along the corrected momentum."""

    p: MasFlParams

    @property
    def eta_l(self) -> float:
        return self.p.eta_l
