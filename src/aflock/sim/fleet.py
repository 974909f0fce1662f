"""The clients as machines: how fast each computes, how long its messages travel, when it is present.

    duration of job k of client i = speed_i * delay(u_ik) [* K]  +  latency + bytes/bandwidth

Every number depends on the schedule's seed, the client and the job alone: adding a client, or running another rule,
changes nobody else's draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from .. import rng
from ..errors import ParameterError
from ..params import Params, choice, non_negative, positive, switch, unit
from .delays import Delay

# The numbers are part of the seeds: another order draws other fleets.
_SPEED, _JOB, _LOSS, _ROLE, _STRETCH = range(5)


@dataclass(frozen=True)
class FleetParams(Params):
    """How the clients of a federation differ."""

    slow_share: float = unit(0.0, "part of the clients that is slow", zero=True, one=True)
    slowdown: float = positive(8.0, "how many times slower they are")
    spread: float = non_negative(0.0, "standard deviation of the logarithm of every client's own speed")
    correlate: str = choice(
        "none", ("none", "class", "size"), "which clients are slow: any, those of the later classes, the largest"
    )
    per_step: bool = switch(False, "whether a delay is the time of one local step, or of the whole job")
    latency: float = non_negative(0.0, "network time of every job")
    bandwidth: float | None = positive(None, "bytes per unit of time, both ways; None: no limit")
    dropout_share: float = unit(0.0, "part of the clients that leaves for good", zero=True, one=True)
    dropout_at: float = non_negative(0.0, "when they leave")
    dropout: str = choice("leave", ("leave", "vanish"), "whether the server is told, or keeps what it holds of them")
    late_share: float = unit(0.0, "part of the clients (the last ones) that joins late", zero=True)
    late_at: float = non_negative(0.0, "when they join")
    silent_share: float = unit(0.0, "part of the clients whose jobs never return", zero=True)
    loss: float = unit(0.0, "part of the jobs that never return", zero=True)
    lease: float | None = positive(None, "time after which a job that has not returned is given up; None: never")
    on: float | None = positive(None, "mean time a client is there before it goes away; None: always there")
    off: float = positive(1.0, "mean time it is away")
    rhythm: str = choice(
        "random", ("random", "regular"), "stretches of on and off: exponential, or as given (day and night), any phase"
    )


@dataclass(frozen=True)
class Change:
    """A client joins, leaves, goes away or comes back."""

    time: float
    kind: str  # "join", "leave", "away" or "back"
    client: int


class Fleet:
    """The simulated clients of a federation: how long their jobs take and when they are present."""

    def __init__(
        self,
        clients: int,
        delay: Delay,
        params: FleetParams | None = None,
        *,
        seed: int = 0,
        ranking: Sequence[float] | None = None,
    ) -> None:
        """`ranking` orders the clients for correlated speeds: the highest are the slow ones."""
        self.p = params or FleetParams()
        self.clients = clients
        self.delay = delay
        self._key = rng.counter_key(seed, "fleet")
        self._jobs, self._losses, self._stretches = (rng.branch(self._key, part) for part in (_JOB, _LOSS, _STRETCH))
        self.speeds = self._speeds(ranking)
        self._factors: list[float] = self.speeds.tolist()
        self.roles = self._roles()
        p = self.p
        self._plain = not (p.per_step or p.latency or p.bandwidth)
        self._unreliable = bool(p.silent_share or p.loss)
        # A delay that does not override `draw` depends on u alone, not on the client or the job: `duration`, which runs
        # once per job, then calls `quantile` itself and saves a call.
        self._same_for_all = type(delay).draw is Delay.draw
        self._silent = set(np.flatnonzero(self.roles == "silent").tolist())
        if not np.isin(self.roles, ("member", "late")).any():
            raise ParameterError(
                f"fleet: dropout_share={self.p.dropout_share:g} and silent_share={self.p.silent_share:g} leave none of "
                f"{clients} clients; lower them"
            )

    def _uniforms(self, purpose: int) -> npt.NDArray[np.float64]:
        return rng.fractions(self._key, self.clients, purpose)

    def _speeds(self, ranking: Sequence[float] | None) -> npt.NDArray[np.float64]:
        """Time factor of every client."""
        u = self._uniforms(_SPEED)
        own = np.ones(self.clients) if not self.p.spread else np.exp(self.p.spread * _normal(u))
        if self.p.correlate != "none" and ranking is None:
            raise ParameterError(f"fleet: correlate={self.p.correlate!r} needs data to correlate with")
        order = u if self.p.correlate == "none" or ranking is None else np.asarray(ranking, np.float64)
        slow = np.argsort(order, kind="stable")[self.clients - round(self.p.slow_share * self.clients) :]
        own[slow] *= self.p.slowdown
        return own

    def _roles(self) -> npt.NDArray[np.str_]:
        """Who joins late (the last ones), who of the others leaves for good or never answers (drawn at random)."""
        roles = np.full(self.clients, "member", dtype="<U8")
        late, leavers, silent = (
            round(share * self.clients) for share in (self.p.late_share, self.p.dropout_share, self.p.silent_share)
        )
        if late + leavers + silent > self.clients:
            raise ParameterError("fleet: dropout_share, late_share and silent_share add up to more than 1")
        present = self.clients - late
        order = np.argsort(self._uniforms(_ROLE)[:present], kind="stable")
        roles[present:] = "late"
        roles[order[:leavers]] = "leaver"
        roles[order[leavers : leavers + silent]] = "silent"
        return roles

    def returns(self, client: int, job: int) -> bool:
        """Whether the client ever returns that job."""
        if client in self._silent:
            return False
        return not self.p.loss or rng.fraction(self._losses, client, job) >= self.p.loss

    def duration(self, client: int, job: int, steps: int = 1, size: int = 0) -> float:
        """Compute plus network time of a client's job; `size` is the bytes that travel; inf if it never returns."""
        if self._unreliable and not self.returns(client, job):
            return math.inf
        u, delay = rng.fraction(self._jobs, client, job), self.delay
        time = self._factors[client] * (delay.quantile(u) if self._same_for_all else delay.draw(client, job, u))
        if not self._plain:
            p = self.p
            time = time * (steps if p.per_step else 1) + p.latency + (size / p.bandwidth if p.bandwidth else 0.0)
        return time

    def initial(self) -> list[int]:
        """The clients that are present from the start."""
        return np.flatnonzero(self.roles != "late").tolist()

    def planned(self) -> Iterator[Change]:
        """The joins and leaves whose times are known before the run."""
        for client in np.flatnonzero(self.roles == "leaver").tolist():
            yield Change(self.p.dropout_at, "leave", client)
        for client in np.flatnonzero(self.roles == "late").tolist():
            yield Change(self.p.late_at, "join", client)

    def stretch(self, client: int, count: int) -> float:
        """How long the client's count-th stretch of presence (even) or absence (odd) lasts.

        In a regular rhythm the first two are the rest of a period that began at a random time before the start.
        """
        if self.p.on is None:
            return math.inf
        on, off = self.p.on, self.p.off
        if self.p.rhythm == "random":
            mean = off if count % 2 else on
            return -mean * math.log1p(-rng.fraction(self._stretches, client, count))
        phase = rng.fraction(self._stretches, client, 0) * (on + off)
        if count == 0:
            return max(0.0, on - phase)
        if count == 1:
            return min(off, on + off - phase)
        return off if count % 2 else on


def _normal(u: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    inverse = NormalDist().inv_cdf
    return np.array([inverse(x) for x in u])
