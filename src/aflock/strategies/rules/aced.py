"""ACED: all-client engagement with bounded delay.

    before the loop:      as ACE; t_i^start <- 1 for all i
    on an arrival of G:   U_j <- G;   A(t) = {i : t - t_i^start <= tau_algo}
                          if A(t) is not empty:   w^{t+1} = w^t - eta * (1/|A(t)|) * sum over A(t) of U_i
                          else:                   w^{t+1} = w^t
                          t_j^start <- t + 1

Read literally: A(t) is formed before t_j^start is reset, so an arrival that was too slow does not count in its own step
but is fresh in the next one; t grows either way. tau_algo >= tau_max gives ACE exactly. Where one step answers several
arrivals, A(t) is formed before any t_j^start is reset.

`starts` lists the active clients in the order of their t^start; the sum over A(t) is kept: an expired row is taken out
once, a row that reports is put back once, so an arrival costs O(d) amortised.

Open federation: a client that joins enters with its first gradient and the current version as its t^start; one that
leaves takes its row with it. cache="int8" is ACED-8bit.

Anonymous authors: Mitigating Participation Imbalance Bias in Asynchronous Federated Learning under Client
Heterogeneity. Under review. Algorithm a.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ... import kernels, rows
from ...params import choice, positive, threshold
from ...types import Accumulator, Receipt, Update, Vector
from ..base import Strategy
from ..caching import CacheParams
from ..gradient_steps import GradientParams
from ..registry import register


@dataclass(frozen=True)
class AcedParams(CacheParams, GradientParams):
    """Hyper-parameters of aced."""

    lr: float = positive(0.1, "eta, server step size")
    tau_algo: float = threshold(50, "tau_algo, versions after which a silent client no longer counts")
    cache: str = choice("dense", rows.KINDS, "how the server keeps its rows")


@register(
    "aced",
    paper="Mitigating participation imbalance bias in asynchronous FL, algorithm a.1",
    rule="U_i <- G; w <- w - lr*mean of U_j over A = {j : t - start_j <= tau_algo}; start_i <- t+1",
    optimum="biased",
    params=AcedParams,
)
class Aced(Strategy):
    """ACE over the clients heard from recently."""

    needs = ("gradient",)
    first = True
    keeps = ("rows", "total", "starts")
    can_take = True
    takes = ("arrived",)
    p: AcedParams

    def _allocate(self, length: int) -> None:
        self.rows = self.make_rows(self.p.cache, self.clients, length, seed=self.seed, folder=self.p.cache_dir)
        self.total: Accumulator = kernels.zeros(length, np.float64)
        self.starts: dict[int, int] = {}
        self.arrived: dict[int, int] = {}
        """The clients that were taken since the last step, in order, with the version of their arrival."""

    def _enter(self, client: int, gradient: Vector) -> None:
        self.rows.exchange(client, gradient, self.total)
        self.starts[client] = max(1, self.version)

    def _begin(self) -> None:
        self.w.step(-self.p.lr / self.n, self.total)
        self._advance()

    def _receive(self, update: Update, staleness: int) -> Receipt:
        client, gradient = update.client, update.vectors[self.sends]
        self._expire()
        if client in self.starts:
            a = -self.p.lr / len(self.starts)
            self.rows.exchange_step(client, gradient, self.total, self.w, a)
            del self.starts[client]
        else:
            self.rows.store(client, gradient)
            if self.starts:
                self.w.step(-self.p.lr / len(self.starts), self.total)
            self.rows.add_to(self.total, 1.0, client)
        self.starts[client] = self.version + 1
        return self._applied(staleness)

    def _take(self, update: Update, staleness: int) -> Receipt:
        client, gradient = update.client, update.vectors[self.sends]
        self._expire()
        if client in self.starts:
            self.rows.exchange(client, gradient, self.total)
        else:
            self.rows.store(client, gradient)
        self.arrived[client] = self.version
        return self._count_taken(staleness)

    def _step_with_taken(self) -> None:
        if self.starts:
            self.w.step(-self.p.lr / len(self.starts), self.total)
        for client in self.arrived:
            if self.starts.pop(client, None) is None:
                self.rows.add_to(self.total, 1.0, client)
            self.starts[client] = self.version + 1
        self.arrived.clear()

    def _expire(self) -> None:
        """Takes the rows out of the sum that A(t) no longer holds; the oldest start stands first."""
        while self.starts:
            client = next(iter(self.starts))
            if self.version - self.starts[client] <= self.p.tau_algo:
                return
            del self.starts[client]
            self.rows.add_to(self.total, -1.0, client)
        self.total[:] = 0.0  # nothing is active: not even rounding may remain

    def _join(self, client: int) -> None:
        self.rows.insert(client)

    def _leave(self, client: int) -> None:
        self.arrived.pop(client, None)
        if self.starts.pop(client, None) is not None:
            self.rows.take_out(client, self.total, self.starts)
        else:
            self.rows.discard(client)
