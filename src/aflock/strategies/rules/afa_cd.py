"""AFA-CD: anarchic federated averaging for the cross-device setting.

    at m arrivals:    G_t = (1/m) * sum of the m G_i(x_{t - tau_i});    x_{t+1} = x_t - eta * G_t

G_i is the mean of the K_{t,i} stochastic gradients along the client's local steps; the client chooses when to take part
and how many steps to make. The paper writes eta here and eta*eta_L in its proofs: a recipe for its eta = 1, eta_L = 0.1
uses lr = eta*eta_L.

Yang, H., Zhang, X., Khanduri, P., Liu, J.: Anarchic Federated Learning. ICML 2022. Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ... import kernels
from ...params import positive
from ...types import Accumulator, Update
from ..buffered import Buffered, BufferParams
from ..gradient_steps import GradientParams
from ..registry import register


@dataclass(frozen=True)
class AfaCdParams(BufferParams, GradientParams):
    """Hyper-parameters of afa-cd."""

    lr: float = positive(0.1, "eta*eta_L, server step size")


@register(
    "afa-cd",
    paper="Yang et al., Anarchic Federated Learning, ICML 2022",
    rule="at m: w <- w - lr * mean of the m G",
    optimum="biased",
    params=AfaCdParams,
)
class AfaCd(Buffered):
    """The mean of m gradients is one step; nothing is remembered of a client."""

    needs = ("gradient",)
    keeps = (*Buffered.keeps, "acc")
    p: AfaCdParams

    def _allocate(self, length: int) -> None:
        super()._allocate(length)
        self.acc: Accumulator = kernels.zeros(length, np.float64)

    def _hold(self, update: Update, staleness: int) -> None:
        kernels.add(self.acc, 1.0, update.vectors[self.sends])

    def _release(self, m: int) -> None:
        self.w.drain(-self.p.lr / m, self.acc)
