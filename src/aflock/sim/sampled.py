"""The protocol `sampled`: no clock, an arrival process.

Every server step draws clients without replacement, uniformly or with given probabilities, until the rule has made its
step: one client for a rule that steps at every arrival, m for one with a buffer of m. Each starts from the model of tau
versions ago, w^(t - tau), with tau uniform over the last `window` models, or drawn from the delays, rounded down and
cut at t. Time counts server steps; clients may leave for good or join at a step. Absences, losses and leases need a
clock and are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from .. import rng
from ..coordination import selection as policies
from ..types import Job, State
from .engine import Engine, Item, Stalled


class Sampled(Engine):
    """One run without a clock."""

    def configure(
        self, window: int | None, history: int, seed: int, probabilities: Mapping[int, float] | None = None
    ) -> None:
        """How far back clients start, how many models are kept for it, and how clients are drawn."""
        self.window = window
        self.history: deque[Job] = deque(maxlen=window or history)
        self._key = rng.counter_key(seed, "sampled")
        self._arrivals = policies.create("uniform" if probabilities is None else "biased", seed, probabilities)
        self.draws = 0
        self.heard: dict[int, None] = {}

    def plan(self) -> None:
        """Everybody who is there may be drawn."""
        for client in sorted(self.coordinator.clients):
            self._arrivals.add(client)
        super().plan()

    def step(self) -> None:
        """One arrival, or one client's first gradient."""
        coordinator, now = self.coordinator, float(self.coordinator.strategy.version)
        while self.clock.heap and self.clock.heap[0][0] <= now:
            self.deliver(self.clock.next())
        self.clock.now = now
        owed = coordinator.dispatch_first(now)
        if owed:
            for job in owed:
                self._work(job)
            return
        client = self._draw()
        version = coordinator.strategy.version
        self._work(coordinator.assign(self.past(client, self._staleness(client)), now))
        self.heard[client] = None
        if coordinator.strategy.version > version:
            self._let_all_return()

    def _let_all_return(self) -> None:
        """The server has made its step: everybody may be drawn again."""
        for client in self.heard:
            if self.coordinator.knows(client):
                self._arrivals.add(client)
        self.heard.clear()

    def past(self, client: int, staleness: int) -> Job:
        """A job from so many versions ago, or from as far back as is known."""
        self._remember()
        job = self.history[-1 - min(staleness, len(self.history) - 1)]
        return Job(client, job.version, job.model, job.extras)

    def _remember(self) -> None:
        """Keeps the current version's job, once."""
        strategy = self.coordinator.strategy
        if not self.history or self.history[-1].version < strategy.version:
            self.history.append(Job(-1, strategy.version, strategy.model, strategy.extras))

    def _draw(self) -> int:
        """The next client of this server step."""
        if not len(self._arrivals):  # a buffer larger than the federation: everybody has come, and may come again
            self._let_all_return()
        if not len(self._arrivals):
            raise Stalled(self._why_stalled())
        self.draws += 1
        client = self._arrivals.next()
        self._arrivals.take(client)
        return client

    def _staleness(self, client: int) -> int:
        u = rng.fraction(self._key, 1, self.draws)
        if self.window is not None:
            return int(u * self.window)
        return int(self.fleet.speeds[client] * self.fleet.delay.quantile(u))

    def _work(self, job: Job) -> None:
        self.send(job, on_clock=False)
        order = self.records[job.client].order
        assert order is not None
        self.deliver(order)

    # -- coming and going -------------------------------------------------------------------------------------------

    def _on_join(self, item: Item) -> None:
        super()._on_join(item)
        self._arrivals.add(item.client)

    def _on_leave(self, item: Item) -> None:
        super()._on_leave(item)
        self._arrivals.forget(item.client)

    # -- state ------------------------------------------------------------------------------------------------------

    def sampling(self) -> State:
        """What the protocol remembers beside the clock."""
        history = {
            str(k): {"version": job.version, "model": job.model, "extras": dict(job.extras)}
            for k, job in enumerate(self.history)
        }
        arrivals = self._arrivals.state_dict()
        return {"draws": self.draws, "heard": list(self.heard), "arrivals": arrivals, "history": history}

    def load_sampling(self, saved: State) -> None:
        """Takes over a saved state."""
        self.draws, self.heard = saved["draws"], dict.fromkeys(saved["heard"])
        self._arrivals.load_state_dict(saved["arrivals"])
        self.history.clear()
        for part in saved["history"].values():
            self.history.append(Job(0, part["version"], part["model"], part["extras"]))
