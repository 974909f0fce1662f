"""AFA-CS: anarchic federated averaging for the cross-silo setting.

    on an arrival:    G_i <- G
    at m arrivals:    G_t = (1/M) * sum over ALL M clients of G_j;    x_{t+1} = x_t - eta * G_t

G_j = 0 until a client has reported. The sum over all clients is kept, so that a step costs O(d). A client that joins
enters M with G_j = 0; one that leaves takes its row with it.

Yang, H., Zhang, X., Khanduri, P., Liu, J.: Anarchic Federated Learning. ICML 2022. Algorithm 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ... import kernels
from ...params import positive
from ...types import Accumulator, Update
from ..buffered import Buffered, BufferParams
from ..caching import CacheParams
from ..gradient_steps import GradientParams
from ..registry import register


@dataclass(frozen=True)
class AfaCsParams(CacheParams, BufferParams, GradientParams):
    """Hyper-parameters of afa-cs."""

    lr: float = positive(0.1, "eta*eta_L, server step size")


@register(
    "afa-cs",
    paper="Yang et al., Anarchic Federated Learning, ICML 2022",
    rule="G_i <- G; at m: w <- w - lr*(1/n)*sum over all n of G_j",
    optimum="true",
    params=AfaCsParams,
)
class AfaCs(Buffered):
    """Every step uses the newest gradient of every client."""

    needs = ("gradient",)
    keeps = (*Buffered.keeps, "rows", "total")
    p: AfaCsParams

    def _allocate(self, length: int) -> None:
        super()._allocate(length)
        self.rows = self.make_rows(self.p.cache, self.clients, length, folder=self.p.cache_dir)
        self.total: Accumulator = kernels.zeros(length, np.float64)

    def _hold(self, update: Update, staleness: int) -> None:
        self.rows.exchange(update.client, update.vectors[self.sends], self.total)

    def _release(self, m: int) -> None:
        self.w.step(-self.p.lr / max(1, self.n), self.total)

    def _join(self, client: int) -> None:
        self.rows.insert(client)

    def _leave(self, client: int) -> None:
        self.rows.take_out(client, self.total)
