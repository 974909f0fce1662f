"""The simulator and the network are the same thing: a trace that eight processes made over sockets, replayed.

Two replays must end with the model of the stopped server, bit for bit: the one of the journal (the vectors as they
came), and the one of the simulator, which knows the trace alone and trains every job itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aflock import cli, strategies
from aflock.net.commands.replay import replay as replay_journal
from aflock.net.storage import model_file as weights
from aflock.sim import replay
from aflock.sim.experiment import Experiment
from aflock.sim.simulation import Simulation
from tests.contract.cases import Case
from tests.net import real_server as server
from tests.net.sim_client import Errand

CLIENTS = 8
UPLOADS = 56
SEED = 3
PATIENCE = 90.0

DATA = {"name": "synthetic"}
MODEL = {"name": "logistic"}
TRAINING = {"batch": 16, "steps": 2}

VARIANTS = [
    Case("ace", {"memory": "client"}),
    Case("ace", {"memory": "client", "sends": "direction"}),
    Case("aced", {"sends": "direction"}),
    Case("afa-cd+scaffold", {"buffer": 3}),
    Case("mr-asyncfl", {"max_staleness": 6}),
    Case("mr-asyncfl", {"exchange": "after"}),
    Case("masfl", {"buffer": 3, "selection": "random"}),
    Case("adamasfl", {"buffer": 3, "selection": "random"}),
    Case("fedavg", {"buffer": 3}),
    Case("fedbuff+scaffold", {"buffer": 3}),
]
CASES = [*(Case(name) for name in strategies.names()), *VARIANTS]

OPEN = [Case("ace", {"memory": "client"}), Case("masfl"), Case("fedbuff+scaffold", {"buffer": 3})]
"""Rules for federations whose members change: one with a client's memory, two whose jobs depend on who is there."""


class Clients:
    """Eight processes that take part in one federation after the other."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("sim_client.py"))]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_one_thread())
            for _ in range(CLIENTS)
        ]

    def begin(self, number: int, errand: Errand) -> None:
        process = self._processes[number]
        assert process.stdin is not None
        process.stdin.write(errand.text())
        process.stdin.flush()

    def end(self, number: int) -> int:
        """Waits until the errand is done; how many updates were taken."""
        out = self._processes[number].stdout
        assert out is not None
        assert select.select([out], [], [], PATIENCE)[0], f"client {number} does not come to an end"
        line = out.readline()
        assert line, f"client {number} has failed; its error is above"
        return int(line)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


def _one_thread() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    started = Clients()
    try:
        yield started
    finally:
        started.close()


def federation(case: Case, *, uploads: int = UPLOADS) -> dict[str, dict[str, Any]]:
    return {
        "strategy": {"name": case.name, **case.params},
        "data": DATA,
        "model": MODEL,
        "federation": {"clients": CLIENTS, "seed": SEED, **TRAINING},
        "server": {"archive": True, "snapshot": 1},
        "budget": {"uploads": uploads},
    }


def experiment(case: Case, late: int = 0) -> dict[str, dict[str, Any]]:
    """The same in the simulator, where client n holds share n of the data."""
    count = CLIENTS + late
    return {
        "strategy": {"name": case.name, **case.params},
        "data": DATA,
        "partition": {"name": "dirichlet", "clients": count},
        "model": MODEL,
        "seeds": {"data": SEED, "training": SEED},
        "training": TRAINING,
        "fleet": {"late_share": late / count},
    }


def simulated(folder: Path, document: dict[str, dict[str, Any]]) -> str:
    """What the simulator makes of a federation's trace: the SHA-256 of its model."""
    with Simulation(Experiment.build(document)) as simulation:
        skipped = replay.replay(simulation, replay.read(folder / "trace.jsonl"))
        assert skipped == 0
        return simulation.result().model_sha256


def check(folder: Path, document: dict[str, dict[str, Any]]) -> Counter[str]:
    """Both replays end with the server's model; how often what happened."""
    sha256 = hashlib.sha256(weights.flat(folder / "model.safetensors").tobytes()).hexdigest()
    lived = replay_journal(folder / "trace.jsonl")
    assert lived["agrees"]
    assert lived["from_version"] == 0
    assert lived["model_sha256"] == sha256
    assert simulated(folder, document) == sha256
    trace = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    assert len({line["client"] for line in trace if line["kind"] == "arrival"}) > CLIENTS / 2  # some may be slow
    return Counter(line["kind"] for line in trace)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_replays_of_eight_processes_end_with_the_servers_model(
    case: Case, clients: Clients, tmp_path: Path
) -> None:
    folder = tmp_path / "fed"
    tokens = [server.invite(folder, f"c{k}") for k in range(CLIENTS)]
    with server.running(folder, federation(case), level="warning") as running:
        for k, token in enumerate(tokens):
            clients.begin(k, Errand(running.url, token, experiment(case), loses=k % 3 == 0))
        taken = sum(clients.end(k) for k in range(CLIENTS))
        assert running.stop() == 0
    happened = check(folder, experiment(case))
    assert happened["arrival"] == taken == UPLOADS
    assert happened["drop"] > 0


@pytest.mark.parametrize("case", OPEN, ids=str)
def test_the_same_where_a_client_leaves_and_another_joins(case: Case, clients: Clients, tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    tokens = [server.invite(folder, f"c{k}") for k in range(CLIENTS)]
    heir = server.invite(folder, "heir")
    with server.running(folder, federation(case, uploads=3 * UPLOADS), level="warning") as running:
        for k, token in enumerate(tokens):
            errand = Errand(running.url, token, experiment(case, late=1))
            clients.begin(k, replace(errand, jobs=3, heir=heir) if k == 0 else errand)
        taken = sum(clients.end(k) for k in range(CLIENTS))
        assert running.stop() == 0
    happened = check(folder, experiment(case, late=1))
    assert happened["arrival"] == taken == 3 * UPLOADS
    assert happened["leave"] == happened["join"] == 1


def test_the_same_where_the_server_is_killed_on_the_way(clients: Clients, tmp_path: Path) -> None:
    case, folder = Case("ace", {"memory": "client"}), tmp_path / "fed"
    tokens = [server.invite(folder, f"c{k}") for k in range(CLIENTS)]
    document = federation(case, uploads=8 * UPLOADS)
    with server.running(folder, document, level="warning") as running:
        for k, token in enumerate(tokens):
            clients.begin(k, Errand(running.url, token, experiment(case)))
        while running.status()["version"] < UPLOADS:
            time.sleep(0.01)
        running.kill()
        with server.running(folder, document, level="warning", port=running.port) as again:
            taken = sum(clients.end(k) for k in range(CLIENTS))
            assert again.stop() == 0
    assert check(folder, experiment(case))["arrival"] == taken == 8 * UPLOADS


def test_the_command_says_the_same(clients: Clients, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case, folder = Case("fedbuff", {"buffer": 5}), tmp_path / "fed"
    tokens = [server.invite(folder, f"c{k}") for k in range(CLIENTS)]
    with server.running(folder, federation(case, uploads=UPLOADS + 1), level="warning") as running:
        for k, token in enumerate(tokens):
            clients.begin(k, Errand(running.url, token, experiment(case)))
        assert sum(clients.end(k) for k in range(CLIENTS)) == UPLOADS + 1
        assert running.stop() == 0
    assert check(folder, experiment(case))["flush"] == 1  # of what the last, partial buffer held
    assert cli.main(["replay", str(folder), "--json"]) == 0  # or its trace.jsonl
    said = json.loads(capsys.readouterr().out)
    assert said["agrees"]
    assert said["updates"] == UPLOADS + 1
    assert said["model_sha256"] == simulated(folder, experiment(case))
