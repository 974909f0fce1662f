"""FedAsync: mixing with a staleness function.

    alpha_t = alpha * s(tau);    w^{t+1} = (1 - alpha_t)*w^t + alpha_t*x_K
    where one step answers k arrivals: the mean of their x_K, with the mean of their alpha_t

    s(tau) = 1                                       staleness="constant"
             (tau+1)^(-a)                            staleness="polynomial" (the default, with a = 0.5)
             1 if tau <= b else 1/(a*(tau-b)+1)      staleness="hinge"

alpha itself never changes between arrivals. The original adds a proximal term at the client (local rule `fedprox`).

Xie, C., Koyejo, S., Gupta, I.: Asynchronous Federated Optimization. arXiv:1903.03934, 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ... import kernels
from ...params import Params, choice, non_negative, unit
from ...types import Accumulator, Receipt, Update
from .. import staleness as weights
from ..base import Strategy
from ..registry import register


@dataclass(frozen=True)
class FedAsyncParams(Params):
    """Hyper-parameters of fedasync."""

    alpha: float = unit(0.6, "alpha, mixing weight of a fresh model", one=True)
    staleness: str = choice("polynomial", ("constant", "polynomial", "hinge"), "the function s")
    a: float = non_negative(0.5, "a of polynomial and hinge", only={"staleness": ("polynomial", "hinge")})
    b: float = non_negative(4, "b of hinge", only={"staleness": ("hinge",)})


@register(
    "fedasync",
    paper="Xie et al., arXiv:1903.03934",
    rule="w <- (1-alpha_t)*w + alpha_t*x_K, alpha_t = alpha*s(tau)",
    optimum="biased",
    params=FedAsyncParams,
)
class FedAsync(Strategy):
    """Every arrival pulls the model towards the client's."""

    needs = ("model",)
    can_take = True
    takes = ("taken_sum", "taken_alpha")
    p: FedAsyncParams

    def _weight(self, tau: int) -> float:
        match self.p.staleness:
            case "polynomial":
                return weights.polynomial(tau, self.p.a)
            case "hinge":
                return weights.hinge(tau, self.p.a, self.p.b)
            case _:
                return 1.0

    def _receive(self, update: Update, staleness: int) -> Receipt:
        alpha = self.p.alpha * self._weight(staleness)
        self.w.mix(alpha, update.vectors["model"])
        return self._applied(staleness)

    def _allocate_taken(self, length: int) -> None:
        self.taken_sum: Accumulator = kernels.zeros(length, np.float64)
        self.taken_alpha = 0.0

    def _take(self, update: Update, staleness: int) -> Receipt:
        self._prepare_to_take()
        kernels.add(self.taken_sum, 1.0, update.vectors["model"])
        self.taken_alpha += self.p.alpha * self._weight(staleness)
        return self._count_taken(staleness)

    def _step_with_taken(self) -> None:
        self.taken_sum /= self.taken
        self.w.mix(self.taken_alpha / self.taken, self.taken_sum)
        self.taken_sum[:] = 0.0
        self.taken_alpha = 0.0
