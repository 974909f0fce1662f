"""CA2FL: cached update calibration.

    on an arrival:    Delta <- Delta + (Delta_i - h^i_t);    h^i_{t+1} <- Delta_i;    S_t <- S_t + {i}
    at m arrivals:    v_t = h_t + Delta/|S_t|,   h_t = (1/N) sum_j h^j_t
                      w_{t+1} = w_t + eta * v_t;    h^j_{t+1} = h^j_t for j not in S_t;    Delta <- 0

h^i_t is the value at the start of the round, also for a client that arrives twice in it; |S_t| counts distinct clients;
all h start at 0. A client that joins enters N with h = 0; one that leaves takes its row with it, while what it sent to
the open round still counts there.

Wang, Y., Cao, Y., Wu, J., Chen, R., Chen, J.: Tackling the Data Heterogeneity in Asynchronous Federated Learning with
Cached Update Calibration. ICLR 2024. Algorithm a.3 of the ACE paper (see `ace`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ... import kernels, rows
from ...params import positive
from ...types import Accumulator, Update
from ..buffered import Buffered, BufferParams
from ..caching import CacheParams
from ..registry import register


@dataclass(frozen=True)
class Ca2flParams(CacheParams, BufferParams):
    """Hyper-parameters of ca2fl."""

    lr: float = positive(1.0, "eta, server step size")


@register(
    "ca2fl",
    paper="Wang et al., ICLR 2024",
    rule="acc += delta - h_i; at m: w <- w + lr*(mean_j h_j + acc/|S|), then h_i <- delta for i in S",
    optimum="true",
    params=Ca2flParams,
)
class Ca2fl(Buffered):
    """FedBuff whose buffer is corrected by what every client said last.

    `total` is the sum of all h^j_t. With each client once in the round it grows by exactly `acc`; `surplus` holds what
    acc counts too much when a client came more than once.
    """

    needs = ("delta",)
    keeps = (*Buffered.keeps, "rows", "fresh", "distinct", "total", "acc", "surplus", "repeated")
    p: Ca2flParams

    def _allocate(self, length: int) -> None:
        super()._allocate(length)
        self.rows = rows.exact(self.make_rows(self.p.cache, self.clients, length, folder=self.p.cache_dir))
        self.fresh = rows.DenseRows(length, free=self.rows.free)
        self.fresh.require(min(self.p.buffer, self.n))
        self.fresh.prepare(min(self.p.buffer, self.n))
        self.distinct = 0
        self.total: Accumulator = kernels.zeros(length, np.float64)
        self.acc: Accumulator = kernels.zeros(length, np.float64)
        self.surplus: Accumulator = kernels.zeros(length, np.float64)
        self.repeated = False

    def _hold(self, update: Update, staleness: int) -> None:
        client, delta = update.client, update.vectors["delta"]
        row = self.rows.row(client)
        kernels.add_difference(self.acc, delta, row)
        if client in self.fresh:
            kernels.add_difference(self.surplus, self.fresh.row(client), row)
            self.fresh.store(client, delta)
            self.repeated = True
        else:
            self.fresh.insert(client, delta, check=False)
            self.distinct += 1

    def _release(self, m: int) -> None:
        lr = self.p.lr
        kernels.drain_calibrated(
            w=self.w.high, low=self.w.low, a=lr / max(1, self.n), total=self.total, b=lr / self.distinct, acc=self.acc
        )
        if self.repeated:
            kernels.add(self.total, -1.0, self.surplus)
            self.surplus[:] = 0.0
            self.repeated = False
        for client in list(self.fresh):
            self.rows.take(client, self.fresh)
        self.distinct = 0

    def _join(self, client: int) -> None:
        self.rows.insert(client)

    def _leave(self, client: int) -> None:
        if client in self.fresh:  # its arrivals stay in acc, but its new row must not enter the sum with them
            kernels.add_difference(self.surplus, self.fresh.row(client), self.rows.row(client))
            self.fresh.discard(client)
            self.repeated = True
        self.rows.take_out(client, self.total)
