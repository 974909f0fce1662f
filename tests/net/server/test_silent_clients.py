"""mr-asyncfl with reset = "silent": a job that has become too old is given up, and its client pulls a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aflock.net.commands.replay import replay
from tests.net.real_server import ONES, joined, refusal, running, until


def document(reset: str) -> dict[str, dict[str, Any]]:
    return {
        "strategy": {"name": "mr-asyncfl", "max_staleness": 2, "reset": reset},
        "model": {"name": "vector", "length": 8},
        "federation": {"clients": 2},
        "server": {"rate": 1e5},
    }


def test_a_job_that_is_too_old_is_dropped_before_its_update_comes(tmp_path: Path) -> None:
    with running(tmp_path / "fed", document("silent")) as server:
        alice, bob = joined(server, "alice"), joined(server, "bob")
        assert alice.pull()[0] == bob.pull()[0] == 200
        for _ in range(4):
            assert bob.push(ONES, next=True, names="model")[0] == 200
        until(lambda: server.status()["dropped"] == 1, 20)
        assert refusal(alice.push(ONES, names="model")) == (409, "unknown-job")
        assert alice.pull()[0] == 200
        assert alice.job["aflock-version"] == "4", "from the current model"
        assert server.stop() == 0
    assert "the model of the job is too old" in (tmp_path / "fed" / "trace.jsonl").read_text()
    assert replay(tmp_path / "fed" / "trace.jsonl")["agrees"]


def test_without_it_the_update_is_rejected_when_it_comes(tmp_path: Path) -> None:
    with running(tmp_path / "fed", document("arrival")) as server:
        alice, bob = joined(server, "alice"), joined(server, "bob")
        assert alice.pull()[0] == bob.pull()[0] == 200
        for _ in range(4):
            assert bob.push(ONES, next=True, names="model")[0] == 200
        status, headers, _ = alice.push(ONES, names="model")
        assert (status, headers["aflock-outcome"]) == (200, "rejected")
