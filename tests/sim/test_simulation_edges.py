"""What a simulation refuses, what ends it, and what must not depend on the way it was run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aflock import models, strategies
from aflock.coordination.coordinator import Coordinator
from aflock.errors import InputError, ParameterError, StateError
from aflock.events import Event
from aflock.runs import running as runs
from aflock.sim import replay
from aflock.sim.engine import Diverged, Stalled
from aflock.sim.experiment import ConfigError, explain
from aflock.sim.simulation import Simulation
from aflock.system.files import to_json
from tests.sim.test_simulation import SMALL, experiment, simulated


def replayed(*changes: str, rule: str | None = None) -> tuple[str, str]:
    """The model's sha256 of a run, and of the replay of its trace."""
    chosen = experiment(*changes)
    lines: list[dict[str, Any]] = []

    def note(event: Event) -> None:
        lines.append({name: getattr(event, name) for name in Event._fields})

    whole = Simulation(chosen, on_event=note)
    whole.run()
    again = Simulation(chosen if rule is None else chosen.variant(rule, 0))
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        trace.write_text("".join(f"{to_json(line)}\n" for line in lines))
        replay.replay(again, replay.read(trace))
    return whole.result().model_sha256, again.result().model_sha256


@pytest.mark.parametrize("rule", ["ca2fl", "ace", "masfl", "fedavg"])
def test_a_sampled_trace_replays_from_the_models_of_the_past(rule: str) -> None:
    first, second = replayed("clock.protocol=sampled", "delays.mean=4", f"strategy.name={rule}")
    assert first == second


def test_replay_uses_one_thread() -> None:
    """A product this large is split over threads where there are several, and its last bits with it."""
    big = ["data.features=400", "data.examples=1500", "model.name=mlp", "training.batch=64", "strategy.name=asgd"]
    first, second = replayed(*big, "budget.uploads=20")
    assert first == second


@pytest.mark.parametrize(
    "changes",
    [
        ["strategy.name=asgd", "delays.name=constant", "delays.value=5", "fleet.lease=1"],
        ["strategy.name=fedavg", "strategy.buffer=4", "fleet.silent_share=0.25", "fleet.on=5"],
        ["strategy.name=asgd", "fleet.silent_share=0.9", "clock.concurrency=2", "fleet.on=5"],
    ],
)
def test_a_run_that_gets_nowhere_ends(changes: list[str]) -> None:
    with pytest.raises(Stalled, match="nothing comes back"):
        simulated(*changes)


def test_a_job_that_returns_with_its_lease_in_the_same_tick_is_in_time() -> None:
    changes = ["strategy.name=asgd", "clock.protocol=ticks", "delays.name=constant", "delays.value=1", "fleet.lease=1"]
    assert simulated(*changes).result().uploads == 120


def test_everything_happens_in_whole_ticks() -> None:
    events: list[Event] = []
    simulated(
        "strategy.name=asgd", "clock.protocol=ticks", "fleet.on=6", "fleet.off=4", "fleet.late_share=0.5",
        "fleet.late_at=2.5", "delays.mean=3", on_event=events.append,
    )  # fmt: skip
    assert all(event.time == math.floor(event.time) for event in events)


@pytest.mark.parametrize("change", ["fleet.on=3", "fleet.silent_share=0.5", "fleet.loss=0.1", "fleet.lease=2"])
def test_sampled_refuses_what_needs_a_clock(change: str) -> None:
    with pytest.raises(ParameterError, match="needs a clock, and the protocol 'sampled' has none"):
        simulated("clock.protocol=sampled", change)


def test_sampled_with_nobody_left() -> None:
    with pytest.raises(Stalled, match="no client is left"):
        simulated(
            "clock.protocol=sampled", "strategy.name=asgd", "fleet.dropout_share=0.5", "fleet.dropout_at=5",
            "fleet.late_share=0.5", "fleet.late_at=50",
        )  # fmt: skip


def test_a_round_that_can_never_fill_by_its_probabilities() -> None:
    weights = "clock.probabilities=[1,1,0,0,0,0,0,0]"
    with pytest.raises(ParameterError, match="lets 2 clients come, but a round takes 5"):
        simulated("clock.protocol=sampled", "strategy.name=fedavg", "strategy.buffer=5", weights)


def test_sampled_keeps_every_version_of_mr_asyncfl() -> None:
    """Its jobs may depend on who asks; the history must not."""
    events: list[Event] = []
    simulated(
        "clock.protocol=sampled", "clock.window=1", "strategy.name=mr-asyncfl", "strategy.exchange=before",
        on_event=events.append,
    )  # fmt: skip
    assert {e.staleness for e in events if e.kind == "arrival"} == {0}


# --- halves that do not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (["strategy.name=fedbuff+scaffold", "local.name=sgd"], "sends no 'control'"),
        (["strategy.name=asgd", "local.name=masfl"], "needs the job to carry 'momentum'"),
        (["model.name=resnet18", "model.norm=batch", "model.width=4", "model.rate=0.5", "data.features=256"], "eta_l"),
        (
            ["model.name=resnet18", "model.norm=batch", "model.width=4", "model.rate=0.1", "data.features=256",
             "local.name=sgd", "local.momentum=0.9"],
            "nothing added",
        ),
    ],
)  # fmt: skip
def test_halves_that_do_not_fit_are_refused_before_anything_runs(changes: list[str], text: str) -> None:
    with pytest.raises(ParameterError, match=text):
        Simulation(experiment(*changes))


def test_divergence_is_a_failure_of_the_run_and_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"training diverges: .* lower local.eta_l or strategy.lr"):
        simulated("strategy.name=asgd", "strategy.lr=1e30", "model.name=mlp")
    assert not issubclass(Diverged, InputError)  # exit code 1, not 2


# --- input -----------------------------------------------------------------------------------------------------------


def test_a_parameter_set_by_hand_before_the_name_counts() -> None:
    a = experiment("strategy.buffer=5", "strategy.name=fedbuff")
    assert a == experiment("strategy.name=fedbuff", "strategy.buffer=5")
    assert a.section("strategy").params["buffer"] == 5
    assert experiment("partition.alpha=7", "partition.name=iid").section("partition").params == {}


def test_unknown_keys_know_about_name_and_clients() -> None:
    with pytest.raises(ConfigError, match="did you mean 'clients'"):
        experiment("partition.client=5")
    with pytest.raises(ConfigError, match="did you mean 'name'"):
        experiment("strategy.nmae=ace")


def test_every_parameter_of_everything_is_explained() -> None:
    text = explain()
    for entry in strategies.entries():
        for parameter in entry.params.describe():
            assert f"    {parameter['name']} = " in text


@pytest.mark.parametrize("workers", [-1, "2", 1.5, True])
def test_bad_numbers_of_workers(workers: Any) -> None:
    with pytest.raises(ParameterError, match="expected an integer of at least 0"):
        runs.simulate({}, *SMALL, workers=workers)


def test_bad_traces(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"kind": "join", "time": 1, "client": [1]}\n')
    with pytest.raises(InputError, match="line 1 is not an event"):
        list(replay.read(tmp_path / "t.jsonl"))


def test_numbers_that_are_none_become_null() -> None:
    assert to_json({"a": math.nan, "b": [1.5, math.inf], "c": "NaN"}) == '{"a": null, "b": [1.5, null], "c": "NaN"}'


# --- one process at a time -------------------------------------------------------------------------------------------


def test_a_folder_belongs_to_one_process(tmp_path: Path) -> None:
    """A second resume, or a resume of a run that is alive, is refused and changes nothing."""
    script = (
        "from pathlib import Path; from aflock import runs; from aflock.sim.experiment import Experiment\n"
        f"runs.run(Experiment.build({{}}, {[*SMALL, 'budget.uploads=100000000']!r}), Path('r'))"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    trace = tmp_path / "r" / "trace.jsonl"
    deadline = time.monotonic() + 60
    while not (trace.exists() and trace.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        with pytest.raises(InputError, match="is being written by another process"):
            runs.resume(experiment("budget.uploads=100000000"), tmp_path / "r")
    finally:
        process.kill()
        process.wait()


def test_a_damaged_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    from aflock import state

    chosen = experiment("budget.uploads=60")
    recorder_folder = tmp_path / "r"
    recorder_folder.mkdir()
    (recorder_folder / "config.toml").write_text(chosen.text())
    state.save(recorder_folder / "checkpoint.safetensors", {"lengths": {}, "simulation": {}})
    with pytest.raises(StateError, match="is damaged"):
        runs.resume(chosen, recorder_folder)


# --- cost ------------------------------------------------------------------------------------------------------------


def test_asking_who_is_there_copies_nobody() -> None:
    """Membership is a lookup: a million clients are not gathered to answer for one."""
    coordinator = Coordinator(strategies.create("asgd", clients=10))
    coordinator.start(np.zeros(3, np.float32))
    assert coordinator.knows(3)
    assert not coordinator.knows(10)
    assert not coordinator.knows([1] if False else None)


def test_workers_that_are_not_needed_any_more_say_nothing(tmp_path: Path) -> None:
    """A run that ends before its workers have started: no traceback, no shared files left."""
    script = tmp_path / "short.py"
    script.write_text(
        f"import aflock\nchanges = {[*SMALL, 'budget.uploads=1']!r}\n"
        "if __name__ == '__main__':\n    print(aflock.simulate({}, *changes, workers=3).uploads)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env={**os.environ})
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_the_quadratic_model_reaches_its_optimum() -> None:
    s = simulated(
        "model.name=quadratic", "strategy.name=ace", "strategy.lr=0.05", "partition.name=iid", "training.batch=500",
        "budget.uploads=1500",
    )  # fmt: skip
    best = np.concatenate([s.dataset.train_x[rows] for rows in s.partition.indices]).mean(axis=0)
    per_client = np.mean([s.dataset.train_x[rows].mean(axis=0) for rows in s.partition.indices], axis=0)
    assert np.abs(s.strategy.model - per_client).max() < 1e-3
    assert np.abs(per_client - best).max() < 0.1
    assert math.isnan(s.result().accuracy)
    assert json.loads(to_json({"a": s.result().accuracy})) == {"a": None}
    assert "quadratic" in models.names()


@pytest.mark.parametrize("protocol", ["events", "ticks", "sampled"])
def test_clients_that_vanish_leave_their_rows(protocol: str) -> None:
    """Nobody is told: n stays, no job goes to them, and the run goes on without them."""
    events: list[Event] = []
    s = simulated(
        f"clock.protocol={protocol}", "strategy.name=ace", "fleet.dropout_share=0.5", "fleet.dropout_at=10",
        "fleet.dropout=vanish", "clock.concurrency=4", "budget.uploads=300", on_event=events.append,
    )  # fmt: skip
    gone = {e.client for e in events if e.kind == "away"}
    assert len(gone) == 4
    assert s.strategy.n == 8
    since = next(e.time for e in events if e.kind == "away")
    assert not [e for e in events if e.kind in ("pull", "arrival") and e.client in gone and e.time > since]
    assert s.result().uploads == 300


def test_early_stopping_on_examples_a_client_does_not_train_on() -> None:
    """Adam with a step so long that every epoch makes it worse: the job ends with its patience."""
    changes = [
        "local.name=adam", "local.gamma_0=5.0", "local.patience=2", "local.decay_epochs=false", "strategy.name=fedavg",
        "strategy.buffer=4", "training.kind=epochs", "training.steps=50", "budget.uploads=8",
    ]  # fmt: skip
    plain, early = simulated(*changes), simulated(*changes, "training.validation=0.25")
    assert early.result().gradient_evaluations < 0.5 * plain.result().gradient_evaluations
    held = len(early.partition.indices[0])
    assert early.client_training.examples(0) == held - round(0.25 * held)


@pytest.mark.parametrize("protocol", ["events", "ticks"])
def test_what_is_due_when_the_time_is_over_does_not_happen(protocol: str) -> None:
    """Eight clients, a job takes 1: updates arrive at 1 and 2, and those of 3 come too late."""
    delays = ["delays.name=constant", "delays.value=1", f"clock.protocol={protocol}"]
    s = simulated(*delays, "budget.time=3", "budget.uploads=1000", "clock.concurrency=8")
    assert (s.engine.tally.updates, s.engine.clock.now) == (16, 3.0)
