"""FedProx: a proximal term holds the client near the model it pulled.

    direction_k = grad F_i(x_k) + mu*(x_k - w^s)

Li, T., Sahu, A. K., Zaheer, M., Sanjabi, M., Talwalkar, A., Smith, V.: Federated Optimization in Heterogeneous
Networks. MLSys 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...params import Params, non_negative, positive
from ...types import Job
from ..base import Direction, Known, LocalRule
from ..registry import register


@dataclass(frozen=True)
class FedProxParams(Params):
    """Hyper-parameters of fedprox."""

    eta_l: float = positive(0.1, "local step size")
    mu: float = non_negative(0.01, "strength of the proximal term")


@register(
    "fedprox",
    paper="Li et al., MLSys 2020",
    rule="grad F_i(x_k) + mu*(x_k - w^s)",
    params=FedProxParams,
)
class FedProx(LocalRule):
    """SGD on the proximal objective."""

    p: FedProxParams

    @property
    def eta_l(self) -> float:
        return self.p.eta_l

    def _directions(self, job: Job, memory: Known) -> Direction:
        mu, start = np.float32(self.p.mu), job.model
        return lambda gradient, x, k: gradient + mu * (x - start)
