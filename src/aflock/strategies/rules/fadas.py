"""FADAS: federated adaptive asynchronous optimisation (AMSGrad on the server).

    on an arrival:    Delta <- Delta + Delta_i
    at m arrivals:    D = Delta/m
                      mom <- b1*mom + (1-b1)*D;   v <- b2*v + (1-b2)*D^2;   vh <- max(vh, v)
                      w^{t+1} = w^t + eta_t * mom/(sqrt(vh) + eps)
    eta_t = eta, or min(eta, 1/tau_m) if tau_c is given and the largest staleness tau_m in the buffer exceeds it

Wang, Y., Wang, S., Lu, S., Chen, J.: FADAS: Towards Federated Adaptive Asynchronous Optimization. ICML 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import kernels
from ..params import positive, threshold, unit
from ..types import Accumulator, Update
from .buffered import Buffered, BufferParams
from .registry import register


@dataclass(frozen=True)
class FadasParams(BufferParams):
    """Hyper-parameters of fadas."""

    lr: float = positive(0.001, "eta, server step size")
    beta1: float = unit(0.9, "b1, decay of the first moment", zero=True)
    beta2: float = unit(0.99, "b2, decay of the second moment", zero=True)
    eps: float = positive(1e-8, "eps, keeps the division finite")
    tau_c: float | None = threshold(None, "tau_c, staleness above which the step is at most 1/tau; None: never")


@register(
    "fadas",
    paper="Wang et al., ICML 2024",
    rule="at m: AMSGrad step along the mean delta, w <- w + step*mom/(sqrt(vh)+eps)",
    optimum="biased",
    params=FadasParams,
)
class Fadas(Buffered):
    """FedBuff with an adaptive server step."""

    needs = ("delta",)
    keeps = (*Buffered.keeps, "acc", "mom", "var", "top", "oldest")
    p: FadasParams

    def _allocate(self, length: int) -> None:
        super()._allocate(length)
        self.acc: Accumulator = kernels.zeros(length, np.float64)
        self.mom: Accumulator = kernels.zeros(length, np.float64)
        self.var: Accumulator = kernels.zeros(length, np.float64)
        self.top: Accumulator = kernels.zeros(length, np.float64)
        self.oldest = 0

    def _hold(self, update: Update, staleness: int) -> None:
        kernels.add(self.acc, 1.0, update.vectors["delta"])
        self.oldest = max(self.oldest, staleness)

    def _release(self, m: int) -> None:
        p, step = self.p, self.p.lr
        if p.tau_c is not None and self.oldest > p.tau_c:
            step = min(step, 1.0 / self.oldest)
        kernels.amsgrad(
            self.w, self.low, step, self.acc, 1.0 / m, self.mom, self.var, self.top, p.beta1, p.beta2, p.eps
        )
        self.oldest = 0
