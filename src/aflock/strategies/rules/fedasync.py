"""FedAsync: mixing with a staleness function.

    alpha_t = alpha * s(tau);    w^{t+1} = (1 - alpha_t)*w^t + alpha_t*x_K

    s(tau) = 1                                       staleness="constant"
             (tau+1)^(-a)                            staleness="polynomial"
             1 if tau <= b else 1/(a*(tau-b)+1)      staleness="hinge"

alpha itself never changes between arrivals. The original adds a proximal term at the client (local rule `fedprox`).

Xie, C., Koyejo, S., Gupta, I.: Asynchronous Federated Optimization. arXiv:1903.03934, 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...params import Params, choice, non_negative, unit
from ...types import Receipt, Update
from .. import staleness as weights
from ..base import Strategy
from ..registry import register


@dataclass(frozen=True)
class FedAsyncParams(Params):
    """Hyper-parameters of fedasync."""

    alpha: float = unit(0.6, "alpha, mixing weight of a fresh model", one=True)
    staleness: str = choice("constant", ("constant", "polynomial", "hinge"), "the function s")
    a: float = non_negative(0.5, "a of polynomial and hinge")
    b: float = non_negative(4, "b of hinge")


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
