"""MR.AsyncFL: model replacement.

    w^(g)_t = gamma*(w^(g)_{t-1} + c^(i)_{t-1}*(w^(i)_t - M_i)) + (1-gamma)*w^(i)_t;    M_i <- w^(i)_t
    c^(j)_t = gamma*c^(j)_{t-1} for j != i;    c^(i)_t = gamma*c^(i)_{t-1} + (1-gamma)

M_i is the model client i sent last; c^(j)_0 = 1/N and M_j = w_0 at the start, so w^(g) = sum_j c^(j) M_j at all times.
The coefficients are held as one scale times a number per client: all of them shrink in O(1).

    exchange="before"   the client whose update made version t is handed w_{t-1}, the model before this aggregation (the
                        paper's choice, equation 2). Any other pull gets the current model.
    exchange="after"    everyone gets the current model; one client alone then is local training (identity 8).
    max_staleness       an older update is discarded, t does not grow, and the client restarts from the current model.

A client that joins enters with coefficient 0; the part of one that leaves stays in the model and fades with gamma.

Anonymous authors: MR.AsyncFL: Staleness-Aware Aggregation for Asynchronous Federated Learning via Model Replacement.
Under review. Algorithm 1, equations 5 to 8 and 12.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ... import kernels, rows
from ...params import choice, unit, whole
from ...types import Job, Receipt, Update, Vector
from ..base import Strategy
from ..caching import CacheParams
from ..registry import register

_SMALLEST_SCALE = 1e-100


@dataclass(frozen=True)
class MrAsyncFlParams(CacheParams):
    """Hyper-parameters of mr-asyncfl."""

    gamma: float = unit(0.8, "gamma, weight of the past")
    exchange: str = choice("after", ("before", "after"), "which model answers an upload; the paper: before")
    max_staleness: int | None = whole(None, "largest staleness that is still used; None: any", least=0)


@register(
    "mr-asyncfl",
    paper="MR.AsyncFL, algorithm 1",
    rule="w <- gamma*(w + c_i*(x_K - M_i)) + (1-gamma)*x_K; M_i <- x_K; c <- gamma*c, c_i += 1-gamma",
    optimum="biased",
    params=MrAsyncFlParams,
)
class MrAsyncFl(Strategy):
    """A client's old model is replaced by its new one, then the past fades."""

    needs = ("model",)
    keeps = ("rows", "shares", "scale", "previous", "latest")
    p: MrAsyncFlParams

    latest = -1

    def _allocate(self, length: int) -> None:
        self.rows = rows.exact(self.make_rows(self.p.cache, self.clients, length, folder=self.p.cache_dir))
        self.shares: dict[int, float] = {}
        self.scale = 1.0
        self.previous: Vector = kernels.zeros(length, np.float32)
        self.latest = -1

    def _begin(self) -> None:
        for client in self.clients:
            self.rows.store(client, self.w.high)
        self.shares = dict.fromkeys(sorted(self.clients), 1.0 / self.n)

    @property
    def coefficients(self) -> dict[int, float]:
        """c^(j) of every client present."""
        return {client: self.scale * share for client, share in self.shares.items()}

    def job(self, client: int, id: int | None = None) -> Job:
        if self.p.exchange == "after" or client != self.latest or client not in self.clients:
            return super().job(client, id)
        model = self.previous.copy()
        model.flags.writeable = False
        return Job(client, self.version - 1, model, super().job(client).extras, False, id)

    def restart(self, client: int) -> None:
        if self.latest == client:
            self.latest = -1

    def _receive(self, update: Update, staleness: int) -> Receipt:
        client, gamma, limit = update.client, self.p.gamma, self.p.max_staleness
        if limit is not None and staleness > limit:
            self.restart(client)
            return Receipt("rejected", staleness, f"staleness {staleness} exceeds max_staleness={limit}")
        c, row = self.scale * self.shares[client], self.rows.row(client)
        kernels.replace_model(
            w=self.w.high, low=self.w.low, previous=self.previous, row=row, x=update.vectors["model"], gamma=gamma, c=c
        )
        self.scale *= gamma
        self.shares[client] += (1.0 - gamma) / self.scale
        if self.scale < _SMALLEST_SCALE:
            self.shares, self.scale = self.coefficients, 1.0
        self.latest = client
        return self._applied(staleness)

    def _join(self, client: int) -> None:
        self.rows.insert(client, self.w.high)
        self.shares[client] = 0.0

    def _leave(self, client: int) -> None:
        self.rows.discard(client)
        del self.shares[client]
