"""Control variates and momentum on the server: what masfl and adamasfl share.

    c_i = G_i at w^0,   c = (1/N) sum_i c_i,   g = c                           at the start
    c'_i <- G                                                                  on an arrival
    diff = sum over S_t of (c'_i - c_i),   c_i <- c'_i for i in S_t            at S arrivals
    g <- beta*(diff/S + c) + (1-beta)*g,   c <- c + diff/N                     (g uses the c before it moves)

    selection="arrivals"   S_t is whoever was heard in this round; the newest value of a client replaces an older one of
                           the same round.
    selection="random"     (the paper's algorithm 1) at every S arrivals S clients drawn at random contribute the newest
                           value they have sent, old or new.

`rows` are the c_i, `newest` the c'_i: of the clients heard in the round, or ("random") of all.

Open federation: a client that joins enters N with its first gradient; one that leaves takes its c_i with it, and what
it sent to the open round too; c is the mean over the clients present.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .. import kernels, rng, rows, theorems
from ..errors import ParameterError
from ..params import Params, choice, positive, unit, whole
from ..types import Accumulator, Update, Vector
from .buffered import Buffered, BufferParams
from .caching import CacheParams


@dataclass(frozen=True)
class ControlParams(CacheParams, BufferParams):
    """What masfl and adamasfl have in common; S is `buffer`, K is `steps`, T is `rounds`."""

    beta: float | None = unit(None, "beta, momentum; None: sqrt(S*K/T)", one=True)
    gamma: float | None = positive(None, "gamma, server step size; None: the theorem's")
    steps: int = whole(1, "K, local steps, for the theorem's defaults", unless=("beta", "gamma"))
    rounds: int = whole(1000, "T, server steps planned, for the theorem's defaults", unless=("beta", "gamma"))
    selection: str = choice("arrivals", ("arrivals", "random"), "who contributes to a round")


class ControlVariates(Buffered):
    """Base of the rules with a control variate per client and a momentum on the server."""

    needs: tuple[str, ...] = ("gradient",)
    first = True
    keeps: ClassVar[tuple[str, ...]] = (*Buffered.keeps, "rows", "newest", "total", "diff", "g", "draws")
    p: ControlParams

    def __init__(self, clients: int, params: Params, seed: int = 0) -> None:
        super().__init__(clients, params, seed)
        if self.p.selection == "random" and self.p.buffer > clients:
            raise ParameterError(
                f"{self.name}: buffer={self.p.buffer} of {clients} clients cannot be drawn; expected at most {clients}"
            )
        p = self.p
        self.beta = theorems.momentum(p.buffer, p.steps, p.rounds) if p.beta is None else p.beta

    @property
    def client_half(self) -> tuple[str, dict[str, Any]]:
        return self.name.split("+")[0], {"beta": self.beta}

    def _allocate(self, length: int) -> None:
        super()._allocate(length)
        self.rows = self._make_rows(self.clients, length)
        self.newest = self._make_rows(self.clients, length) if self._random else self._make_spares(length)
        self.total: Accumulator = kernels.zeros(length, np.float64)
        self.diff: Accumulator = kernels.zeros(length, np.float64)
        self.g: Accumulator = kernels.zeros(length, np.float64)
        self.draws = rng.stream(self.seed, self.name, "selection")

    @property
    def _random(self) -> bool:
        return self.p.selection == "random"

    def _make_spares(self, length: int) -> rows.DenseRows:
        spares = rows.DenseRows(length, free=self.rows.free)
        spares.require(min(self.p.buffer, self.n))
        spares.prepare(min(self.p.buffer, self.n))
        return spares

    def _make_rows(self, clients: set[int] | tuple[int, ...], length: int) -> rows.DenseRows:
        return rows.exact(self.make_rows(self.p.cache, clients, length, folder=self.p.cache_dir))

    def _begin(self) -> None:
        np.divide(self.total, self.n, out=self.g)

    def _enter(self, client: int, gradient: Vector) -> None:
        self.rows.exchange(client, gradient, self.total)
        if self._random:
            self.newest.store(client, gradient)

    def _make_extras(self) -> dict[str, Vector]:
        """beta*c + (1-beta)*g, which local training adds to its corrected gradient."""
        momentum = np.empty(self.w.size, np.float32)
        kernels.blend(momentum, a=self.beta / max(1, self.n), x=self.total, b=1.0 - self.beta, y=self.g)
        return {"momentum": momentum}

    def _hold(self, update: Update, staleness: int) -> None:
        client, gradient = update.client, update.vectors["gradient"]
        if client not in self.newest:
            kernels.add_difference(self.diff, gradient, self.rows.row(client))
            self.newest.insert(client, gradient, check=False)
        elif self._random:
            self.newest.store(client, gradient)
        else:
            self.newest.exchange(client, gradient, self.diff)

    def _select(self) -> list[int]:
        """S_t of selection="random", in client order."""
        present = sorted(self.clients)
        size = min(self.p.buffer, len(present))
        return sorted(int(client) for client in self.draws.choice(present, size, replace=False))

    def _release(self, m: int) -> None:
        if self._random:
            chosen = self._select()
            for client in chosen:
                self.rows.exchange(client, self.newest.row(client), self.diff)
            self._move(chosen, len(chosen))
            return
        for client in list(self.newest):
            self.rows.take(client, self.newest)
        self._move([], m)

    def _move(self, chosen: list[int], size: int) -> None:
        """One server step; `diff` holds the sum over the S = size contributions."""
        kernels.momentum(
            self.g, total=self.total, diff=self.diff, beta=self.beta, a=1.0 / max(1, size), b=1.0 / max(1, self.n)
        )

    def _join(self, client: int) -> None:
        self.rows.require(2 if self._random else 1)
        self.rows.insert(client, check=False)
        if self._random:
            self.newest.insert(client, check=False)

    def _leave(self, client: int) -> None:
        if client in self.newest:
            if not self._random:
                kernels.add_difference(self.diff, self.rows.row(client), self.newest.row(client))
            self.newest.discard(client)
        self.rows.take_out(client, self.total)
