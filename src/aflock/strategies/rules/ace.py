"""ACE: all-client engagement.

    before the loop:      U_i <- grad f_i(w^0) for every client;   w^1 = w^0 - eta * u^0,   u^0 = (1/n) sum_i U_i
    on an arrival of G:   U_j <- G;   u^t = (1/n) sum_i U_i;   w^{t+1} = w^t - eta * u^t

Where one step answers several arrivals, all their rows are replaced first. The sum of the rows is kept in float64 and
moved by G - U_j, so an arrival costs O(d) and the mean does not drift.

    memory="client"   (algorithm a.5) the client sends G_new - G_prev as its `gradient` and keeps G_prev; the server
                      holds no rows: u <- u + that/n. Equal to direct aggregation up to rounding.
    cache="int8"      (ACE-8bit, F.3.3) rows are stored with unbiased 8-bit rounding; the mean is over what is stored.
    cache="disk"      rows live in a memory-mapped file.

Open federation: a client that joins enters n with its first gradient, one that leaves takes its row with it, and the
mean is over the clients present. With memory="client" the server has no row to take out: the last gradient of a client
that leaves stays in the mean and the client stays in n, frozen.

Anonymous authors: Mitigating Participation Imbalance Bias in Asynchronous Federated Learning under Client
Heterogeneity. Under review. Algorithms 1 and a.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ... import kernels, rows
from ...params import choice, positive
from ...types import Accumulator, Receipt, Update, Vector
from ..base import Strategy
from ..caching import CacheParams
from ..gradient_steps import GradientParams
from ..registry import register


@dataclass(frozen=True)
class AceParams(CacheParams, GradientParams):
    """Hyper-parameters of ace."""

    lr: float = positive(0.1, "eta, server step size")
    memory: str = choice("server", ("server", "client"), "who keeps the last gradient of each client")
    cache: str = choice("dense", rows.KINDS, "how the server keeps its rows", only={"memory": ("server",)})


@register(
    "ace",
    paper="Mitigating participation imbalance bias in asynchronous FL, algorithms 1 and a.5",
    rule="U_i <- G; w <- w - lr*mean_j U_j",
    optimum="true",
    params=AceParams,
)
class Ace(Strategy):
    """Every arrival is one step along the mean of every client's newest gradient."""

    needs = ("gradient",)
    first = True
    can_take = True
    keeps = ("rows", "total", "frozen")
    p: AceParams

    @property
    def changes(self) -> tuple[str, ...]:
        return (self.sends,) if self.p.memory == "client" else ()

    def _allocate(self, length: int) -> None:
        holders = self.clients if self.p.memory == "server" else ()
        self.rows = self.make_rows(self.p.cache, holders, length, seed=self.seed, folder=self.p.cache_dir)
        self.total: Accumulator = kernels.zeros(length, np.float64)
        self.frozen = 0

    def _begin(self) -> None:
        self.w.step(-self.p.lr / (self.n + self.frozen), self.total)
        self._advance()

    def _enter(self, client: int, gradient: Vector) -> None:
        if self.p.memory == "server":
            self.rows.exchange(client, gradient, self.total)
        else:
            kernels.add(self.total, 1.0, gradient)

    def _receive(self, update: Update, staleness: int) -> Receipt:
        a, gradient = -self.p.lr / (self.n + self.frozen), update.vectors[self.sends]
        if self.p.memory == "server":
            self.rows.exchange_step(update.client, gradient, self.total, self.w, a)
        else:
            kernels.shift_step(v=gradient, total=self.total, w=self.w.high, low=self.w.low, a=a)
        return self._applied(staleness)

    def _take(self, update: Update, staleness: int) -> Receipt:
        self._enter(update.client, update.vectors[self.sends])
        return self._count_taken(staleness)

    def _step_with_taken(self) -> None:
        self.w.step(-self.p.lr / (self.n + self.frozen), self.total)

    def _join(self, client: int) -> None:
        if self.p.memory == "server":
            self.rows.insert(client)

    def _leave(self, client: int) -> None:
        if self.p.memory == "server":
            self.rows.take_out(client, self.total)
        elif client not in self.awaited:
            self.frozen += 1
