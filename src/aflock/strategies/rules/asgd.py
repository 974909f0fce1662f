"""Vanilla asynchronous SGD.

    on an arrival of G from client i:    w^{t+1} = w^t - eta * G

Mishchenko, K., Bach, F., Even, M., Woodworth, B.: Asynchronous SGD Beats Minibatch SGD Under Arbitrary Delays.
NeurIPS 2022. It is FedBuff with m = 1 and K = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...params import Params, positive
from ...types import Receipt, Update
from ..base import Strategy
from ..registry import register


@dataclass(frozen=True)
class AsgdParams(Params):
    """Hyper-parameters of asgd."""

    lr: float = positive(0.1, "eta, server step size")


@register(
    "asgd",
    paper="Mishchenko et al., NeurIPS 2022",
    rule="w <- w - lr*G",
    optimum="biased",
    params=AsgdParams,
)
class Asgd(Strategy):
    """Every arrival is one step."""

    needs = ("gradient",)
    p: AsgdParams

    def _receive(self, update: Update, staleness: int) -> Receipt:
        self.w.step(-self.p.lr, update.vectors["gradient"])
        return self._applied(staleness)
