"""Vanilla asynchronous SGD.

    on an arrival of G from client i:       w^{t+1} = w^t - eta * G
    where one step answers k arrivals:      w^{t+1} = w^t - eta * (1/k) * sum of the k G

Mishchenko, K., Bach, F., Even, M., Woodworth, B.: Asynchronous SGD Beats Minibatch SGD Under Arbitrary Delays.
NeurIPS 2022. It is FedBuff with m = 1 and K = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...params import positive
from ..gradient_steps import GradientParams, GradientSteps
from ..registry import register


@dataclass(frozen=True)
class AsgdParams(GradientParams):
    """Hyper-parameters of asgd."""

    lr: float = positive(0.1, "eta, server step size")


@register(
    "asgd",
    paper="Mishchenko et al., NeurIPS 2022",
    rule="w <- w - lr*G",
    optimum="biased",
    params=AsgdParams,
)
class Asgd(GradientSteps):
    """Every arrival is one step."""

    p: AsgdParams

    def _rate(self, staleness: int) -> float:
        return self.p.lr
