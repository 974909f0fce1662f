"""The weighted mean of every client's latest model, newer ones counting more: what twafl and rolling-fedavg share.

    M_i <- x_K, stamp_i <- t+1
    w^{t+1} = sum_j weight_j M_j / sum_j weight_j,    weight_j = r_j * exp(-decay*(t+1 - stamp_j))

The factor exp(-decay*(t+1)) is common to all weights and cancels. What is kept is therefore

    total = sum_j e_j M_j,   mass = sum_j e_j,   e_j = r_j * exp(decay*(stamp_j - base)),

over the clients that have reported; an arrival changes one e_j, so it costs O(d). `base` moves up (and total and mass
are scaled down) before exp can overflow, however many arrivals there are.

Both sums are rounded to the digits of the largest weight they ever held. When a client of 10^18 examples reports again
with one example, a difference would leave nothing but that rounding. `peak` is the largest mass since both were last
summed; once the mass is below 2^-20 of it they are summed again from the rows, so that at least 32 bits stay right.

Where one step answers several arrivals, all their models and stamps are replaced first.

Clients that have not reported hold M_j = w^0, stamp_j = 0. Their r_j is what `start` was told, else the mean of those
that have reported: with clients of equal size every weight is right from the first arrival on. A client that joins
later has no weight until it reports: w^0 is no longer anybody's model by then.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping

import numpy as np

from .. import kernels, rows
from ..types import Accumulator, Receipt, State, Update, Vector
from .base import Strategy
from .caching import CacheParams

_LARGEST_EXPONENT = 40.0
_LEAST_PART = 2.0**-20
"""Of the largest mass the sums have held: below it they are made from scratch."""


class LatestModels(Strategy):
    """Base of the rules that average the newest model of every client."""

    needs = ("model",)
    can_take = True
    keeps = (
        "rows", "total", "mass", "peak", "base", "stamps", "examples", "reported", "silent", "told", "unknown", "w0"
    )  # fmt: skip
    p: CacheParams

    @property
    @abstractmethod
    def decay(self) -> float:
        """How fast a model's weight fades per version of age."""

    def _allocate(self, length: int) -> None:
        self.rows = rows.exact(self.make_rows(self.p.cache, self.clients, length, folder=self.p.cache_dir))
        self.total: Accumulator = kernels.zeros(length, np.float64)
        self.w0: Vector = kernels.zeros(length, np.float32)
        self.mass = self.peak = 0.0
        self.base = 0
        self.stamps: dict[int, int] = {}
        self.examples: dict[int, int] = {}
        self.reported = 0
        self.silent: dict[int, int] = {}  # the clients that still hold w^0, with their examples (0: unknown)
        self.told = self.unknown = 0

    def _told(self, examples: Mapping[int, int]) -> None:
        self.silent = {client: examples.get(client, 0) for client in sorted(self.clients)}
        self.told = sum(self.silent.values())
        self.unknown = sum(not count for count in self.silent.values())

    def _begin(self) -> None:
        self.w0[:] = self.w.high

    def _receive(self, update: Update, staleness: int) -> Receipt:
        client, model = update.client, update.vectors["model"]
        new, old = self._replace_weight(update)
        silent = self._silent_mass()
        inverse = 1.0 / (self.mass + silent)
        kernels.exchange_mean(
            row=self.rows.row(client),
            x=model,
            total=self.total,
            new=new,
            old=old,
            w=self.w.high,
            low=self.w.low,
            a=inverse,
            b=silent * inverse,
            start=self.w0,
        )
        return self._applied(staleness)

    def _take(self, update: Update, staleness: int) -> Receipt:
        client, model = update.client, update.vectors["model"]
        new, old = self._replace_weight(update)
        kernels.exchange_weighted(row=self.rows.row(client), x=model, total=self.total, new=new, old=old)
        return self._count_taken(staleness)

    def _step_with_taken(self) -> None:
        silent = self._silent_mass()
        inverse = 1.0 / (self.mass + silent)
        kernels.weighted_mean(
            w=self.w.high, low=self.w.low, a=inverse, total=self.total, b=silent * inverse, start=self.w0
        )

    def _replace_weight(self, update: Update) -> tuple[float, float]:
        """Gives the client its new stamp and examples; returns its new and its old weight in the sums."""
        client, now = update.client, self.version + 1
        self._rebase(now)
        old = self._weight(client) if client in self.stamps else 0.0
        self.reported += update.examples - self.examples.get(client, 0)
        self.stamps[client], self.examples[client] = now, update.examples
        self._hear(client)
        new = self._weight(client)
        self.mass += new - old
        if self.mass < _LEAST_PART * self.peak:
            self.rows.store(client, update.vectors["model"])
            self._resum()
            new = old = 0.0  # the sums hold the new row already
        self.peak = max(self.peak, self.mass)
        return new, old

    def _weight(self, client: int) -> float:
        return self.examples[client] * math.exp(self.decay * (self.stamps[client] - self.base))

    def _hear(self, client: int) -> None:
        """The client no longer holds w^0."""
        count = self.silent.pop(client, None)
        if count:
            self.told -= count
        elif count == 0:
            self.unknown -= 1

    def _silent_mass(self) -> float:
        """The weight of all clients that still hold w^0: they share its stamp 0."""
        mean = self.reported / len(self.examples) if self.unknown else 0.0
        return (self.told + self.unknown * mean) * math.exp(-self.decay * self.base)

    def _rebase(self, now: int) -> None:
        if self.decay * (now - self.base) > _LARGEST_EXPONENT:
            factor = math.exp(-self.decay * (now - self.base))
            self.total *= factor
            self.mass *= factor
            self.peak *= factor
            self.base = now

    def _join(self, client: int) -> None:
        self.rows.insert(client)

    def _leave(self, client: int) -> None:
        self._hear(client)
        self.rows.discard(client)
        self.reported -= self.examples.pop(client, 0)
        if self.stamps.pop(client, None) is not None:
            self._resum()

    def _resum(self) -> None:
        """The sums from scratch: when the client with the largest weight goes, a difference would keep no digits."""
        self.total[:] = 0.0
        self.mass = 0.0
        for client in self.stamps:
            weight = self._weight(client)
            self.mass += weight
            self.rows.add_to(self.total, weight, client)
        self.peak = self.mass

    def _loaded(self, state: State) -> Strategy:
        """A state saved before there was a `peak` lacks it."""
        return super()._loaded({**state, "keeps": {"peak": state["keeps"]["mass"], **state["keeps"]}})
