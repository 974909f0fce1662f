"""Heartbeats, void jobs, errors and stops while a client trains or sends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from aflock import strategies
from aflock.errors import InputError
from aflock.local import Memory, Trained
from aflock.net.client import client as clients
from aflock.types import Job, Vector
from tests.net.client.fake_server import Refusal, serving
from tests.net.client.helpers import ZERO, blobs, made, one, plain

pytestmark = pytest.mark.timeout(60)


def test_heartbeats_keep_a_job_alive() -> None:
    with plain(lease=0.09) as server:
        server.faults["heartbeat"] = ["", "drop before", Refusal(503), ""]

        def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
            while server.kinds().count("heartbeat") < 6:
                time.sleep(0.01)
            return one(job, number, memory, delay)

        assert made(server).run_with(train, jobs=1).jobs == 1
        assert server.taken.total() == 1


def test_heartbeats_keep_a_job_alive_while_its_update_is_sent() -> None:
    """The server does not answer the update until heartbeats have arrived over the other connection."""
    with plain(lease=0.09, order=[]) as server:

        def answer_at_last() -> None:
            while (
                "update" not in server.kinds()
                or server.kinds()[server.kinds().index("update") :].count("heartbeat") < 3
            ):
                time.sleep(0.01)
            assert server.order is not None
            server.order.append(0)

        threading.Thread(target=answer_at_last, daemon=True).start()
        assert made(server, timeout=10.0, give_up=1.0).run_with(one, jobs=1).jobs == 1
        assert (server.kinds().count("update"), server.taken.total()) == (1, 1)


def test_the_result_of_a_void_job_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    with plain(lease=0.06) as server:

        def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
            if number == 0:
                server.faults["heartbeat"] = [Refusal(409, "unknown-job", "gone")]
                while "is void: gone" not in caplog.text:
                    time.sleep(0.01)
                time.sleep(0.05)
            return one(job, number, memory, delay)

        made(server).run_with(train, jobs=1)
        assert server.kinds().count("update") == 1
        assert [event.job for event in server.happened("arrival")] == [1]


def test_an_error_in_training_gives_the_job_back(tmp_path: Path) -> None:
    def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
        raise ZeroDivisionError("my own")

    with plain() as server:
        with pytest.raises(ZeroDivisionError, match="my own"):
            made(server, tmp_path).run_with(train)
        assert server.kinds() == ["hello", "job", "decline"]
        assert not server.coordinator.working


@pytest.mark.parametrize(
    ("vectors", "says"), [({"delta": ZERO}, "gave no vector 'gradient'"), ({"gradient": ZERO[:2]}, r"of shape \(2,\)")]
)
def test_vectors_the_server_cannot_use_are_not_sent(vectors: dict[str, Vector], says: str) -> None:
    with plain() as server:
        with pytest.raises(InputError, match=says):
            made(server).run_with(lambda *_: Trained(vectors, 1))
        assert server.kinds()[-1] == "decline"


def test_vectors_the_server_has_not_asked_for_are_not_sent(tmp_path: Path) -> None:
    steps: Any = np.int64(2)
    with plain(encoding="int8") as server:
        done = Trained({"control": ZERO, "gradient": ZERO, "delta": ZERO}, steps, {"control": ZERO})
        assert made(server, tmp_path).run_with(lambda *_: done, jobs=1).jobs == 1
        assert [headers["aflock-vectors"] for kind, headers in server.asked if kind == "update"] == ["gradient"]


@pytest.mark.parametrize("where", ["training", "waiting", "pushing", "silence"])
def test_stop_ends_a_run_wherever_it_is(where: str, tmp_path: Path) -> None:
    x, y = blobs(10)
    reached = threading.Event()

    def batches() -> Iterator[Any]:
        while True:
            if where == "training":
                reached.set()
                time.sleep(0.01)
            yield x, y

    strategy = strategies.create("asgd", clients=1)
    with serving(strategy, np.zeros(15, np.float32), order=[] if where == "pushing" else None) as server:
        if where == "waiting":
            server.coordinator.pull = lambda client, now, *, waits=True: None  # type: ignore[method-assign]
        if where == "silence":
            server.faults["update"] = ["drop before"] * 1000
        client = made(server, tmp_path)
        summaries: list[clients.Summary] = []
        steps = 10**9 if where == "training" else 1
        model = nn.Linear(4, 3)
        run = threading.Thread(target=lambda: summaries.append(client.run(model, batches, steps=steps, examples=10)))
        run.start()
        kind = {"waiting": "job", "pushing": "update", "silence": "update", "training": "job"}[where]
        while kind not in server.kinds() or (where == "training" and not reached.is_set()):
            time.sleep(0.005)
        client.stop()
        if where == "pushing":  # the request that is on its way is awaited
            time.sleep(0.1)
            assert run.is_alive()
            assert server.order is not None
            server.order.append(0)
        run.join(10)
        assert [summary.why for summary in summaries] == ["stopped"]
        assert [summary.jobs for summary in summaries] == [1 if where == "pushing" else 0]
        assert ("decline" in server.kinds()) == (where in ("training", "pushing"))  # a push brings the next job
        assert (tmp_path / "pending.safetensors").exists() == (where == "silence")
        if where == "silence":
            server.faults["update"].clear()
            assert made(server, tmp_path).run_with(one, jobs=0).jobs == 0
            assert server.taken.total() == 1


def test_stop_before_a_run_counts_and_counts_once() -> None:
    with plain() as server:
        client = made(server)
        client.stop()
        assert client.run_with(one).why == "stopped"
        assert client.run_with(one, jobs=1).why == "jobs"


def test_a_run_inside_an_event_loop_has_a_thread_of_its_own() -> None:
    """As in a notebook."""

    async def cell() -> str:
        return made(server).run_with(one, jobs=2).why

    with plain() as server:
        assert asyncio.run(cell()) == "jobs"
