"""FedBuff: buffered asynchronous aggregation.

    on an arrival:    Delta <- Delta + (1 + tau)^(-a) * Delta_i
    at m arrivals:    w^{t+1} = w^t + eta * Delta / m;    Delta <- 0

a = 0 is the form of the ACE paper (algorithm a.2), a = 0.5 the original. tau is taken at arrival; the sum is divided by
m, not by the sum of the weights, and Delta_i is the client's own x_K - w^s, whatever the model is by now.

Nguyen, J., Malik, K., Zhan, H., Yousefpour, A., Rabbat, M., Malek, M., Huba, D.: Federated Learning with Buffered
Asynchronous Aggregation. AISTATS 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ... import kernels
from ...params import non_negative, positive
from ...types import Accumulator, Update
from .. import staleness as weights
from ..buffered import Buffered, BufferParams
from ..registry import register


@dataclass(frozen=True)
class FedBuffParams(BufferParams):
    """Hyper-parameters of fedbuff."""

    lr: float = positive(1.0, "eta, server step size")
    staleness_exponent: float = non_negative(0.0, "a; 0.5 is the original FedBuff")


@register(
    "fedbuff",
    paper="Nguyen et al., AISTATS 2022",
    rule="acc += (1+tau)^(-a)*delta; at m: w <- w + lr*acc/m",
    optimum="biased",
    params=FedBuffParams,
)
class FedBuff(Buffered):
    """The mean of m deltas is one step."""

    needs = ("delta",)
    keeps = (*Buffered.keeps, "acc")
    p: FedBuffParams

    def _allocate(self, length: int) -> None:
        super()._allocate(length)
        self.acc: Accumulator = kernels.zeros(length, np.float64)

    def _hold(self, update: Update, staleness: int) -> None:
        weight = weights.polynomial(staleness, self.p.staleness_exponent)
        kernels.add(self.acc, weight, update.vectors["delta"])

    def _release(self, m: int) -> None:
        self.w.drain(self.p.lr / m, self.acc)
