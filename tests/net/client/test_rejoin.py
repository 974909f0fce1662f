"""A client that the server does not know, or not any more; and training that fails after its job became void."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from aflock import strategies
from aflock.errors import AflockError, MissingVector, ParameterError, StateError
from aflock.local import Memory, Trained
from aflock.net.client import run as runs
from aflock.net.client.client import Client, JobReport
from aflock.net.protocol.refusals import Refused
from aflock.types import Job
from tests.net.client.fake_server import FakeServer, Refusal, serving
from tests.net.real_server import invite, start, until

pytestmark = pytest.mark.timeout(120)

D = 15
UNKNOWN_CLIENT = Refusal(403, "not-a-member", "say hello first")


def plain(name: str = "asgd", **options: Any) -> Any:
    return serving(strategies.create(name, clients=1), np.zeros(D, np.float32), **options)


def made(server: FakeServer, folder: Path | None = None) -> Client:
    return Client(server.url, server.token(), state_dir=folder, keep=folder is not None)


def one(job: Job, number: int, memory: Memory, delay: float) -> Trained:
    return Trained({"gradient": np.ones(D, np.float32)}, 1, {"told": np.full(2, number, np.float32)})


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draws = torch.Generator().manual_seed(0)
    return [(torch.randn(10, 4, generator=draws), torch.randint(3, (10,), generator=draws))]


def after(jobs: int, act: Callable[[], None]) -> Callable[[JobReport], None]:
    """Calls a function once so many jobs are done."""
    return lambda progress: act() if progress.jobs == jobs else None


def new_terms(server: FakeServer, change: dict[str, Any]) -> Callable[[JobReport], None]:
    """After two jobs the server answers hello with other settings, and does not know the client any more."""

    def changed() -> None:
        server.greeting |= change
        server.forget("alice")

    return after(2, changed)


# --- it joins again, a few times -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["job", "update"])
def test_who_is_let_go_again_and_again_is_told(kind: str, tmp_path: Path) -> None:
    with plain() as server:
        server.faults[kind] = [UNKNOWN_CLIENT] * 50
        with pytest.raises(Refused, match=r"joined again 3 times in a row.*say hello first") as raised:
            made(server, tmp_path).run_with(one, jobs=1)
        assert (raised.value.status, raised.value.code) == (403, "not-a-member")
        assert server.kinds().count("hello") == 1 + runs.MOST_REJOINS
        assert server.kinds().count(kind) == 1 + runs.MOST_REJOINS


def test_only_those_in_a_row_count() -> None:
    with plain() as server:
        server.faults["update"] = [*[UNKNOWN_CLIENT] * 3, ""] * 3
        assert made(server).run_with(one, jobs=3).jobs == 3
        assert server.kinds().count("hello") == 10


# --- on the terms it then finds --------------------------------------------------------------------------------------


def test_who_joins_again_works_by_the_new_terms() -> None:
    x, y = batches()[0]
    seen: list[Any] = []

    def loader() -> Any:
        while True:
            if server.kinds().count("hello") == 2:  # the new lease is short: a job that takes a while is kept alive
                until(lambda: "heartbeat" in server.kinds())
            yield x, y

    def check(progress: JobReport) -> None:
        seen.append(server.strategy.model.copy())
        if progress.jobs == 2:
            server.encoding = "float16"
            server.greeting |= {
                "encoding": "float16",
                "steps": 3,
                "lease": 0.06,
                "local": {"name": "sgd", "eta_l": 1e-6},
            }
            server.forget("alice")

    strategy = strategies.create("fedbuff", clients=1, buffer=1)
    with serving(strategy, np.zeros(D, np.float32), advice={"eta_l": 0.1}) as server:
        made(server).run(nn.Linear(4, 3), loader, examples=10, jobs=4, progress=check)
        assert [event.steps for event in server.happened("arrival")] == [1, 1, 3, 3]
        sent = [headers["aflock-encoding"] for kind, headers in server.asked if kind == "update"]
        assert sent[-2:] == ["float16"] * 2
    moved = [float(np.abs(late - early).max()) for early, late in pairwise(seen)]
    assert moved[0] > 1e-3
    assert max(moved[1:]) < 1e-5


@pytest.mark.parametrize(
    ("change", "options", "error", "says"),
    [
        ({"length": D + 1}, {}, ParameterError, "has 15 weights, the federation's 16"),
        ({"needs": ["delta", "control"]}, {"local": "sgd"}, ParameterError, "sgd sends no 'control'"),
        ({"local": {"name": "sgdd"}}, {}, AflockError, "sgd"),
    ],
)
def test_new_terms_that_cannot_be_met_are_told(
    change: dict[str, Any], options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with plain() as server:
        with pytest.raises(error, match=says):
            made(server).run(nn.Linear(4, 3), batches(), jobs=6, progress=new_terms(server, change), **options)
        assert not server.coordinator.working


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"needs": ["delta"]}, MissingVector, "gave no vector 'delta'"),
        ({"length": D + 1}, AflockError, "the body has 60 bytes instead of 64"),
    ],
)
def test_training_of_ones_own_is_held_to_the_new_terms(
    change: dict[str, Any], error: type[Exception], says: str
) -> None:
    with plain() as server, pytest.raises(error, match=says):
        made(server).run_with(one, jobs=6, progress=new_terms(server, change))


# --- another federation in the same place ----------------------------------------------------------------------------


def test_another_federation_has_a_memory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    memories: list[list[str]] = []

    def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
        memories.append(sorted(memory))
        return one(job, number, memory, delay)

    with plain() as server:

        def replaced() -> None:
            server.greeting["federation"] = "beef"
            server.forget("alice")

        client = Client(server.url, server.token())
        assert client.run_with(train, jobs=4, progress=after(2, replaced)).jobs == 4
        asked = [headers.get("aflock-have") for kind, headers in server.asked if kind == "job"]
    assert memories == [[], ["told"], ["told"], [], ["told"]]  # the third was for the federation that is gone
    assert asked == [None, None]
    old, new = tmp_path / "aflock" / "f00d" / "alice", tmp_path / "aflock" / "beef" / "alice"
    assert {file.name for file in old.iterdir()} == {"lock", "memory.safetensors", "pending.safetensors"}
    assert {file.name for file in new.iterdir()} == {"lock", "memory.safetensors"}


def test_a_job_on_terms_that_have_changed_on_the_way_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client without a number says hello once more when it has its first job."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with plain() as server:
        server.greeting["number"] = None
        pull: Callable[[int, float], Job | None] = server.coordinator.pull

        def replaced(client: int, now: float) -> Job | None:
            server.greeting |= {"federation": "beef", "number": 0}
            return pull(client, now)

        monkeypatch.setattr(server.coordinator, "pull", replaced)
        assert Client(server.url, server.token()).run_with(one, jobs=1).jobs == 1
        assert server.kinds() == ["hello", "job", "hello", "decline", "job", "update"]
    assert (tmp_path / "aflock" / "beef" / "alice" / "memory.safetensors").exists()
    assert not (tmp_path / "aflock" / "f00d" / "alice" / "memory.safetensors").exists()


def test_one_folder_is_not_for_two_federations(tmp_path: Path) -> None:
    with plain() as server:

        def replaced() -> None:
            server.greeting["federation"] = "beef"
            server.forget("alice")

        with pytest.raises(StateError, match="belongs to another federation"):
            made(server, tmp_path).run_with(one, jobs=6, progress=after(2, replaced))
        server.greeting["federation"] = "f00d"
        assert made(server, tmp_path).run_with(one, jobs=1).jobs == 1  # nothing of it was lost, and nobody holds it


def test_a_real_server_gives_way_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    one_step: dict[str, Any] = {
        "strategy": {"name": "asgd"},
        "model": {"name": "vector", "length": D},
        "federation": {"clients": 1, "steps": 1},
    }
    three_steps = one_step | {
        "strategy": {"name": "fedbuff", "buffer": 1},
        "federation": {"clients": 1, "steps": 3, "encoding": "float16"},
    }
    token = invite(tmp_path / "first", "alice")
    (tmp_path / "second").mkdir(mode=0o700)
    shutil.copy(tmp_path / "first" / "members.json", tmp_path / "second")
    servers = [start(tmp_path / "first", one_step)]

    def replace() -> None:
        servers[0].stop()
        servers.append(start(tmp_path / "second", three_steps, port=servers[0].port))

    try:
        client = Client(servers[0].url, token)
        summary = client.run(nn.Linear(4, 3), batches(), jobs=4, progress=after(2, replace))
        assert summary.jobs == 4
        assert servers[1].status()["updates"] == 2
        servers[1].stop()
    finally:
        for server in servers:
            server.kill()
    assert _steps(tmp_path / "first") == [1, 1]
    assert _steps(tmp_path / "second") == [3, 3]


def _steps(folder: Path) -> list[int]:
    """The numbers of local steps of the updates that arrived."""
    events = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    return [event["steps"] for event in events if event["kind"] == "arrival"]


# --- errors of training after the job became void --------------------------------------------------------------------


@pytest.mark.parametrize("why", ["stopped", "ended"])
def test_an_error_of_training_is_told_after_the_end(why: str, caplog: pytest.LogCaptureFixture) -> None:
    with plain(lease=0.06) as server:
        client = made(server)

        def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
            if why == "stopped":
                client.stop()
                until(lambda: "decline" in server.kinds())
            else:
                server.ended = True
                until(lambda: "is void" in caplog.text)
            raise ZeroDivisionError("my own")

        assert client.run_with(train).why == why
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in told] == ["training failed on job 0, whose result was no longer needed"]
    assert "ZeroDivisionError: my own" in caplog.text


def test_a_stop_iteration_is_an_error_like_any_other() -> None:
    def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
        return next(iter([]))

    with plain() as server:
        with pytest.raises(RuntimeError, match="StopIteration") as raised:
            made(server).run_with(train)
        assert isinstance(raised.value.__cause__, StopIteration)
        assert server.kinds()[-1] == "decline"


def test_training_that_was_cut_short_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    x, y = batches()[0]
    with plain() as server:
        client = made(server)

        def loader() -> Any:
            client.stop()
            until(lambda: "decline" in server.kinds())
            while True:
                yield x, y

        assert client.run(nn.Linear(4, 3), loader, examples=10, steps=5).why == "stopped"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


FAILING = """
import logging, sys, time
from aflock.net.client.client import Client

logging.basicConfig(level=logging.INFO, format="%(message)s")

def train(job, number, memory, delay):
    print("training", flush=True)
    time.sleep(0.5)
    raise ZeroDivisionError("my own")

print(Client(*sys.argv[1:], keep=False).run_with(train).why)
"""


def test_ctrl_c_does_not_hide_an_error_of_training() -> None:
    with plain() as server:
        command = [sys.executable, "-c", FAILING, server.url, server.token()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "training\n"
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=20)
            finally:
                process.kill()
    assert (process.returncode, out) == (0, "stopped\n")
    assert "training failed on job 0" in err
    assert "ZeroDivisionError: my own" in err
