"""MR.AsyncFL: model replacement.

    w^(g)_t = gamma*(w^(g)_{t-1} + c^(i)_{t-1}*(w^(i)_t - M_i)) + (1-gamma)*w^(i)_t;    M_i <- w^(i)_t
    c^(j)_t = gamma*c^(j)_{t-1} for j != i;    c^(i)_t = gamma*c^(i)_{t-1} + (1-gamma)

M_i is the model client i sent last; c^(j)_0 = 1/N and M_j = w_0 at the start, so w^(g) = sum_j c^(j) M_j at all times.
The coefficients are held as one scale times a number per client: all of them shrink in O(1).

    exchange="before"   the client whose update made version t is handed w_{t-1}, the model before this aggregation (the
                        paper's choice, equation 2), whenever it pulls next. Any other pull gets the current model.
    exchange="after"    everyone gets the current model; one client alone then is local training (identity 8).
    max_staleness       an older update is discarded, t does not grow, and the client restarts from the current model.
    reset="arrival"     that happens when the client reports (section 5.1)
    reset="silent"      a client that has been silent for more than max_staleness versions is reset at once (section
                        3.2): whoever drives the rule drops its job (`Coordinator.overdue`, `Coordinator.reset`)

The rule aggregates one arrival at a time by definition: it cannot take several for one step.

A client that joins enters with coefficient 0; the part of one that leaves stays in the model and fades with gamma.

Anonymous authors: MR.AsyncFL: Staleness-Aware Aggregation for Asynchronous Federated Learning via Model Replacement.
Under review. Algorithm 1, equations 5 to 8 and 12.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ... import kernels, rows
from ...params import GIVEN, choice, unit, whole
from ...types import Job, Receipt, State, Update, Vector
from ..base import Strategy
from ..caching import CacheParams
from ..registry import register

_SMALLEST_SCALE = 1e-100


@dataclass(frozen=True)
class MrAsyncFlParams(CacheParams):
    """Hyper-parameters of mr-asyncfl."""

    gamma: float = unit(0.8, "gamma, weight of the past")
    exchange: str = choice("before", ("before", "after"), "which model answers an upload; the paper: before")
    max_staleness: int | None = whole(None, "largest staleness that is still used; None: any", least=0)
    reset: str = choice(
        "arrival",
        ("silent", "arrival"),
        "when a client that is too old restarts: at once, or when it reports",
        only={"max_staleness": (GIVEN,)},
    )


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
    keeps = ("rows", "shares", "scale", "before", "versions")
    p: MrAsyncFlParams

    def _allocate(self, length: int) -> None:
        self.rows = rows.exact(self.make_rows(self.p.cache, self.clients, length, folder=self.p.cache_dir))
        self.shares: dict[int, float] = {}
        self.scale = 1.0
        self.before = rows.DenseRows(length, free=self.rows.free)
        """Of each client that was not served since its update: the model before the update was aggregated."""
        self.versions: dict[int, int] = {}
        """The versions of these models."""
        self._unused: Vector = kernels.zeros(length, np.float32)

    def _begin(self) -> None:
        for client in self.clients:
            self.rows.store(client, self.w.high)
        self.shares = dict.fromkeys(sorted(self.clients), 1.0 / self.n)

    @property
    def coefficients(self) -> dict[int, float]:
        """c^(j) of every client present."""
        return {client: self.scale * share for client, share in self.shares.items()}

    def job(self, client: int, id: int | None = None) -> Job:
        current = super().job(client, id)
        version = self.versions.get(client)
        if version is None:
            return current
        model = self.before.read(client)
        model.flags.writeable = False
        self.restart(client)
        return Job(client, version, model, current.extras, False, id)

    def restart(self, client: int) -> None:
        if self.versions.pop(client, None) is not None:
            self.before.recycle(client)

    def _receive(self, update: Update, staleness: int) -> Receipt:
        client, gamma, limit = update.client, self.p.gamma, self.p.max_staleness
        if limit is not None and staleness > limit:
            self.restart(client)
            return Receipt("rejected", staleness, f"staleness {staleness} exceeds max_staleness={limit}")
        c, row, previous = self.scale * self.shares[client], self.rows.row(client), self._unused
        if self.older:  # earlier versions knew only whose update was the last, and forgot the others
            for other in list(self.versions):
                self.restart(other)
        if self.p.exchange == "before":
            previous, self.versions[client] = self.before.blank(client), self.version
        kernels.replace_model(
            w=self.w.high, low=self.w.low, previous=previous, row=row, x=update.vectors["model"], gamma=gamma, c=c
        )
        self.scale *= gamma
        self.shares[client] += (1.0 - gamma) / self.scale
        if self.scale < _SMALLEST_SCALE:
            self.shares, self.scale = self.coefficients, 1.0
        return self._applied(staleness)

    def _join(self, client: int) -> None:
        self.rows.insert(client, self.w.high)
        self.shares[client] = 0.0

    def _leave(self, client: int) -> None:
        self.rows.discard(client)
        del self.shares[client]

    def _loaded(self, state: State) -> Strategy:
        """Earlier versions saved the model before the last aggregation only, and whose update that was."""
        kept = dict(state["keeps"])
        if "latest" in kept:
            latest, previous = kept.pop("latest"), kept.pop("previous")
            served = latest < 0 or self.p.exchange == "after"
            known = {} if served else {str(latest): previous}
            kept["before"] = {"kind": "dense", "length": previous.size, "rows": known}
            ids, values = ([], []) if served else ([latest], [int(state["version"]) - 1])
            kept["versions"] = {"ids": np.array(ids, np.int64), "values": np.array(values, np.int64)}
        return super()._loaded({**state, "keeps": kept})
