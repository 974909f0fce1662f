"""The protocol `sampled`: no clock, an arrival process.

Every server step draws clients uniformly without replacement until the rule has made its step: one client for a rule
that steps at every arrival, m for one with a buffer of m. Each starts from the model of tau versions ago, w^(t - tau),
with tau uniform over the last `window` models, or drawn from the delays, rounded down and cut at t. Time counts server
steps.
"""

from __future__ import annotations

from collections import deque

from .. import rng
from ..types import Job
from .engine import Engine, Item


class Sampled(Engine):
    """One run without a clock."""

    window: int | None = None
    history_length: int = 1

    def configure(self, window: int | None, history: int, seed: int) -> None:
        """How far back clients start, and how many models are kept for it."""
        self.window = window
        self.history_length = window or history
        self.history: deque[Job] = deque(maxlen=self.history_length)
        self._key = rng.counter_key(seed, "sampled")
        self.draws = 0
        self.heard: dict[int, None] = {}

    def step(self) -> None:
        """One arrival, or one client's first gradient."""
        coordinator, now = self.coordinator, float(self.coordinator.strategy.version)
        self.clock.now = now
        if coordinator.opening:
            for job in coordinator.dispatch(now):
                self._work(job)
            return
        self._remember()
        client = self._draw()
        past = self.history[-1 - min(self._staleness(client), len(self.history) - 1)]
        version = coordinator.strategy.version
        self._work(coordinator.assign(Job(client, past.version, past.model, past.extras), now))
        self.heard[client] = None
        if coordinator.strategy.version > version:
            self.heard.clear()

    def _remember(self) -> None:
        """Keeps the current version's job, once."""
        strategy = self.coordinator.strategy
        if not self.history or self.history[-1].version < strategy.version:
            self.history.append(strategy.job(min(strategy.clients)))

    def _draw(self) -> int:
        """The next client of this server step."""
        present = sorted(self.coordinator.strategy.clients - self.heard.keys())
        if not present:  # a buffer larger than the federation: everybody has come once, so everybody may come again
            self.heard.clear()
            present = sorted(self.coordinator.strategy.clients)
        self.draws += 1
        return present[int(rng.fraction(self._key, 0, self.draws) * len(present))]

    def _staleness(self, client: int) -> int:
        u = rng.fraction(self._key, 1, self.draws)
        if self.window is not None:
            return int(u * self.window)
        return int(self.fleet.speeds[client] * self.fleet.delay.quantile(u))

    def _work(self, job: Job) -> None:
        self.send(job, on_clock=False)
        self.deliver(Item("job", job.client, self.numbers[job.client]))
