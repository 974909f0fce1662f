"""A federation that has ended and goes on under new terms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aflock.net.server.settings import Settings
from tests.net.storage.folders import HOLDING, LENGTH, settings


@pytest.mark.parametrize(("target", "state"), [(0.8, "ended"), (0.9, "ended"), (0.95, "running"), (None, "running")])
def test_a_federation_goes_on_that_does_not_reach_its_new_target(target: float | None, state: str) -> None:
    federation = settings().federation(np.zeros(LENGTH, np.float32))
    federation.apply({"k": "hello", "t": 0.0, "name": "alice", "gen": 1}, b"")
    federation.apply({"k": "end", "t": 1.0, "why": "accuracy 0.9000 reaches the target", "accuracy": 0.9}, b"")
    again = settings().federation(np.zeros(LENGTH, np.float32))
    again.load_state_dict(federation.state_dict())
    for each in (federation, again):
        each.apply({"k": "terms", "t": 2.0, "terms": [None, None, target]}, b"")
        assert each.state == state


@pytest.mark.parametrize("rule", [{"name": "fedavg"}, {"name": "ace"}, {"name": "asgd"}, HOLDING])
def test_who_has_left_after_the_end_is_not_waited_for_when_it_goes_on(rule: dict[str, Any]) -> None:
    p = settings(rule).resolved()
    p["federation"] |= {"clients": 2, "concurrency": 2}
    federation = Settings.build(p).federation(np.zeros(LENGTH, np.float32))

    def happens(kind: str, body: bytes = b"", **head: Any) -> Any:
        return federation.apply({"k": kind, "t": 0.0, **head}, body)

    for name in ("alice", "bob"):
        happens("hello", name=name, gen=1)
    assert all(happens("pull", name=name) for name in ("alice", "bob"))
    happens("end", why="accuracy 0.9000 reaches the target", accuracy=0.9)
    happens("leave", name="alice")
    happens("terms", terms=[None, None, 0.99])
    assert federation.coordinator.clients == {1}
    happens("hello", name="carol", gen=1)
    version = federation.version
    for name in ["bob", "carol"] * 4:  # bob has lost his job: he asks again
        given = happens("pull", name=name)
        if given is not None:
            names = ["gradient"] if given.job.first else list(federation.strategy.needs)
            happens(
                "update", np.ones(LENGTH * len(names), np.float32).tobytes(),
                name=name, j=given.id, v=given.job.version, s=1, e=1, n=names, enc="float32", next=0,
            )  # fmt: skip
    assert federation.version > version
