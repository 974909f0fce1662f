"""The executor `ray` on a real cluster of two nodes: the same bits, and what is lost costs time and nothing else."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aflock import strategies
from aflock.errors import AflockError, ParameterError
from aflock.runs import running
from aflock.sim import ray_executor
from aflock.sim.executors import Placement
from aflock.sim.experiment import Experiment
from aflock.sim.simulation import Simulation

from .two_nodes import TwoNodes, two_nodes

SMALL = [
    "data.name=digits",
    "partition.clients=8",
    "partition.alpha=0.5",
    "budget.uploads=60",
    "evaluation.every=30",
    "training.batch=8",
    "clock.concurrency=6",
]
CNN = ["model.name=cnn", "budget.uploads=24", "training.steps=2"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    with two_nodes() as made:
        yield made


@pytest.fixture(scope="module")
def connected(cluster: TwoNodes) -> Iterator[TwoNodes]:
    """One connection for many runs, as a program of its own may have one."""
    import ray

    ray.init(address=cluster.address, _node_ip_address="127.0.0.2", log_to_driver=False, logging_level=logging.ERROR)
    try:
        wait_for_nodes(2)
        yield cluster
    finally:
        ray.shutdown()


@pytest.fixture
def all_jobs_to_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that would be computed faster by the run itself."""
    monkeypatch.setattr(ray_executor, "LEAST_JOB_SECONDS", 0.0)


def wait_for_nodes(count: int) -> None:
    import ray

    deadline = time.monotonic() + 60
    while sum(node["Alive"] for node in ray.nodes()) != count:  # type: ignore[no-untyped-call]
        assert time.monotonic() < deadline, "the nodes have not come"
        time.sleep(0.1)


def experiment(*changes: str) -> Experiment:
    return Experiment.build({}, [*SMALL, *changes])


def finished(chosen: Experiment, placement: Placement, **options: Any) -> tuple[str, dict[str, Any]]:
    with Simulation(chosen, placement=placement, **options) as simulation:
        simulation.run()
        return simulation.result().model_sha256, simulation.executor.describe()


def inline(chosen: Experiment) -> str:
    return finished(chosen, Placement())[0]


ON_RAY = Placement(executor="ray", workers=2)

RULES = [entry.name for entry in strategies.entries()]
PROTOCOLS = {"events": [], "ticks": ["clock.protocol=ticks"], "sampled": ["clock.protocol=sampled"]}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_the_same_bits(rule: str, protocol: str, connected: TwoNodes, all_jobs_to_actors: None) -> None:
    chosen = experiment(*PROTOCOLS[protocol], "budget.uploads=30").variant(rule, 0)
    found, record = finished(chosen, ON_RAY)
    assert found == inline(chosen)
    assert record["computed"] == ("by the run itself" if protocol == "sampled" else "by workers of the cluster")


@pytest.mark.parametrize("rule", ["ace:memory=client", "fedbuff+scaffold", "masfl"])
def test_a_torch_network_has_the_same_bits_and_both_nodes_work(rule: str, connected: TwoNodes) -> None:
    """Rules with client memory, changes and extra vectors; jobs long enough to travel by themselves."""
    chosen = experiment(*CNN, "budget.uploads=300", "fleet.loss=0.1", "fleet.lease=5").variant(rule, 0)
    found, record = finished(chosen, ON_RAY)
    assert found == inline(chosen)
    assert len(record["jobs_by_node"]) == 2
    assert record["lost"] == []


def test_cheap_jobs_stay_here(connected: TwoNodes) -> None:
    chosen = experiment()
    found, record = finished(chosen, ON_RAY)
    assert found == inline(chosen)
    assert record["computed"] == "by the run itself"
    assert record["workers"] == 0


def test_actors_killed_with_sigkill_cost_only_time(connected: TwoNodes, all_jobs_to_actors: None) -> None:
    killed: list[int] = []

    def kill(simulation: Simulation) -> None:
        if simulation.engine.tally.updates in (20, 40):
            pid = next(pid for pid in actors() if pid not in killed)
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    chosen = experiment("strategy.name=fedbuff")
    found, record = finished(chosen, ON_RAY, on_upload=kill)
    assert found == inline(chosen)
    assert len(killed) == 2
    assert len(record["lost"]) >= 1  # one that had no batch left is missed by nobody


def actors() -> list[int]:
    """The process numbers of the actors; Ray names their processes after their class."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cmdline").read_bytes().startswith(b"ray::RayWorker"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_training_that_diverges_says_the_same_everywhere(connected: TwoNodes, all_jobs_to_actors: None) -> None:
    chosen = experiment("local.eta_l=1e20", "strategy.lr=1e20", "model.name=mlp", "strategy.name=fedbuff")
    with pytest.raises(AflockError) as here:
        finished(chosen, Placement())
    with pytest.raises(AflockError) as there:
        finished(chosen, ON_RAY)
    assert str(there.value) == str(here.value)


# --- the command line, with connections of its own -------------------------------------------------------------------


def command(tmp_path: Path, *arguments: str) -> list[str]:
    changes = [word for change in [*SMALL, *CNN] for word in ("--set", change)]
    (tmp_path / "e.toml").touch()
    return [sys.executable, "-m", "aflock", "run", "e.toml", *changes, "--quiet", *arguments]


def test_a_node_that_is_lost_in_the_middle_costs_only_time(cluster: TwoNodes, tmp_path: Path) -> None:
    """The raylet and all of its workers are killed; the record says so, and the node may come back."""
    size = ["--set", "budget.uploads=1500"]
    more = [*size, "--out", "there", "--executor", "ray", "--address", cluster.address, "--json"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen(command(tmp_path, *more), cwd=tmp_path, **pipes)
    deadline = time.monotonic() + 120
    while len(actors()) < 2 and time.monotonic() < deadline:
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    time.sleep(2.0)  # both have got batches by now
    cluster.kill_other()
    output, errors = run.communicate(timeout=240)
    assert run.returncode == 0, errors
    assert json.loads(output)["uploads"] == 1500  # nothing but the result, though Ray has much to say
    cluster.start_other()
    here = command(tmp_path, *size, "--out", "here")
    assert subprocess.run(here, cwd=tmp_path).returncode == 0
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("here", "there")]
    assert results[0]["model_sha256"] == results[1]["model_sha256"]
    record = json.loads((tmp_path / "there" / "executor.json").read_text())
    assert any(line.startswith("a worker ") for line in record[0]["lost"])


def test_a_killed_run_is_resumed_with_another_executor(cluster: TwoNodes, tmp_path: Path) -> None:
    more = ["--set", "checkpoint.every=2", "--set", "strategy.name=fedbuff", "--set", "strategy.buffer=2"]
    on_ray = [*more, "--executor", "ray", "--address", cluster.address, "--out", "there"]
    run = subprocess.Popen(command(tmp_path, *on_ray), cwd=tmp_path)
    saved = tmp_path / "there" / "checkpoint.safetensors"
    deadline = time.monotonic() + 120
    while not saved.is_file() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    run.kill()
    run.wait()
    assert saved.is_file()
    done = subprocess.run(command(tmp_path, "--resume", "there", *more), cwd=tmp_path)
    assert done.returncode == 0
    assert subprocess.run(command(tmp_path, *more, "--out", "here"), cwd=tmp_path).returncode == 0
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("here", "there")]
    assert results[0]["model_sha256"] == results[1]["model_sha256"]


def test_ctrl_c_saves_and_ends_everything(cluster: TwoNodes, tmp_path: Path) -> None:
    more = ["--set", "budget.uploads=100000", "--out", "there", "--executor", "ray", "--address", cluster.address]
    run = subprocess.Popen(command(tmp_path, *more), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    trace = tmp_path / "there" / "trace.jsonl"
    deadline = time.monotonic() + 120
    while not (trace.is_file() and trace.read_text().count('"arrival"') > 10) and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "go on with --resume there" in errors
    deadline = time.monotonic() + 30
    while actors() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not actors()


# --- a cluster of this machine's own, and bad input ------------------------------------------------------------------


def test_a_cluster_for_one_run_ends_with_it(tmp_path: Path) -> None:
    """In a process of its own, because this one is connected to the other cluster."""
    done = subprocess.run(
        command(tmp_path, "--executor", "ray", "--workers", "2", "--out", "own", "--json"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "own" / "executor.json").read_text())
    assert record[0]["workers"] == 2
    assert sum(record[0]["jobs_by_node"].values()) > 0


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.2:9", r"no Ray cluster answers at 127.0.0.2:9 \(.*\); start one with `ray start --head`"),
        ("nonsense", "'nonsense' is not the address of a cluster; give auto, HOST:PORT or ray://HOST:PORT"),
        ("127.0.0.2:99999", "no Ray cluster answers at 127.0.0.2:99999"),
    ],
)
def test_addresses_without_a_cluster(address: str, says: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    done = subprocess.run(
        command(tmp_path, "--executor", "ray", "--address", address), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert re.search(says, done.stderr.splitlines()[-1]), done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - begun < 60
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"executor": "spark"}, "executor='spark' is not valid; expected one of auto, inline, processes, ray"),
        ({"address": "auto"}, "address='auto' needs executor='ray'"),
        ({"executor": "inline", "workers": 2}, "the executor inline has no workers"),
        ({"executor": "processes"}, "the executor processes needs to know how many workers"),
        ({"workers": -1}, "workers=-1 is not valid"),
    ],
)
def test_placements_that_make_no_sense(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        Placement(**given)


def test_without_ray_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    """Ray hidden from the import system, as on a machine that does not have it."""
    (tmp_path / "hidden.py").write_text(
        "import importlib.util as u\nfound = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'ray' else found(name, *rest)\n"
        "import sys\nfrom aflock.cli import main\nsys.exit(main())\n"
    )
    words = command(tmp_path, "--executor", "ray")[3:]
    done = subprocess.run([sys.executable, "hidden.py", *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("the executor ray needs ray; pip install 'aflock[ray]'")


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_comparison_is_the_same_by_tasks_and_by_jobs(seeds: int, connected: TwoNodes) -> None:
    """Two runs fill the two cores, so that each is a task; a single one shares out its jobs."""
    said: list[str] = []
    there = running.compare(experiment(), ["fedbuff"], seeds, placement=ON_RAY, say=said.append)
    here = running.compare(experiment(), ["fedbuff"], seeds)
    assert [r.model_sha256 for r, _ in there["fedbuff"]] == [r.model_sha256 for r, _ in here["fedbuff"]]
    assert [curve for _, curve in there["fedbuff"]] == [curve for _, curve in here["fedbuff"]]
    assert said[0].startswith("every run is one task" if seeds == 2 else "the jobs of each run are shared out")


def test_a_recipe_runs_as_tasks_of_the_cluster(cluster: TwoNodes, tmp_path: Path) -> None:
    names = {"here": ["--jobs", "1"], "there": ["--executor", "ray", "--address", cluster.address]}
    found = []
    for name, options in names.items():
        words = [sys.executable, "-m", "aflock", "reproduce", "000-figure-2-steps", "--scale", "smoke", "--out", name]
        done = subprocess.run([*words, *options], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        runs = json.loads((tmp_path / name / "000-figure-2-steps.smoke.json").read_text())["runs"]
        found.append({run["key"]: run["result"]["model_sha256"] for run in runs})
    assert found[0] == found[1]
    assert "every run is one task of the Ray cluster" in done.stderr


def test_python_runs_on_a_cluster_too(connected: TwoNodes) -> None:
    there = running.simulate({}, *SMALL, executor="ray")
    assert there.model_sha256 == running.simulate({}, *SMALL).model_sha256
