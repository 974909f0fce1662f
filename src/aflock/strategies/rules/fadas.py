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

from ... import kernels
from ...params import positive, threshold, unit
from ...system.compiled import compiled
from ...types import Accumulator, Update, Vector
from ..buffered import Buffered, BufferParams
from ..registry import register


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
        amsgrad(
            w=self.w.high, low=self.w.low, eta=step, acc=self.acc, m=m,
            mom=self.mom, v=self.var, vh=self.top, b1=p.beta1, b2=p.beta2, eps=p.eps,
        )  # fmt: skip
        self.oldest = 0


@compiled()
def amsgrad(
    w: Vector, low: Vector, eta: float, acc: Accumulator, m: int, mom: Accumulator, v: Accumulator, vh: Accumulator,
    b1: float, b2: float, eps: float,
) -> None:  # fmt: skip
    """The server step, coordinate by coordinate, in one pass over the seven vectors; acc <- 0."""
    share = 1.0 / m
    for k in range(acc.shape[0]):
        d = share * acc[k]
        mom[k] = b1 * mom[k] + (1.0 - b1) * d
        v[k] = b2 * v[k] + (1.0 - b2) * d * d
        vh[k] = max(vh[k], v[k])
        x = np.float64(w[k]) + np.float64(low[k]) + eta * (mom[k] / (np.sqrt(vh[k]) + eps))
        w[k] = np.float32(x)
        low[k] = np.float32(x - np.float64(w[k]))  # what rounding has left out (see `weights.Weights`)
        acc[k] = 0.0
