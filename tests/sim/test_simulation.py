"""The engine and the experiment around it: fair, repeatable, resumable."""

from __future__ import annotations

import json
import resource
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aflock import state, strategies
from aflock.errors import InputError, ParameterError, StateError
from aflock.events import Event
from aflock.runs import recorder
from aflock.runs import running as runs
from aflock.sim import replay
from aflock.sim.engine import Stalled
from aflock.sim.experiment import ConfigError, Experiment, explain
from aflock.sim.simulation import Simulation

SMALL = [
    "data.name=synthetic",
    "data.examples=400",
    "data.features=6",
    "data.classes=3",
    "partition.clients=8",
    "partition.alpha=0.5",
    "budget.uploads=120",
    "evaluation.every=30",
    "training.batch=8",
]


def experiment(*changes: str) -> Experiment:
    return Experiment.build({}, [*SMALL, *changes])


def simulated(*changes: str, **options: Any) -> Simulation:
    simulation = Simulation(experiment(*changes), **options)
    simulation.run()
    return simulation


@pytest.mark.parametrize("name", [*strategies.names(), "fedbuff+scaffold", "ace:memory=client"])
def test_every_rule_runs_and_repeats_to_the_last_bit(name: str) -> None:
    variants = [experiment().variant(name, 0) for _ in range(2)]
    first, second = (Simulation(variant) for variant in variants)
    first.run()
    second.run()
    assert replace(first.result(), wall_time=0) == replace(second.result(), wall_time=0)
    assert first.result().uploads == 120
    assert np.isfinite(first.result().loss)
    other = Simulation(experiment().variant(name, 1))
    other.run()
    assert other.result().model_sha256 != first.result().model_sha256


@pytest.mark.parametrize("name", [*strategies.names(), "fedbuff+scaffold", "ace:memory=client"])
@pytest.mark.parametrize("protocol", ["events", "ticks", "sampled"])
def test_going_on_from_any_step_gives_the_same_bits(name: str, protocol: str, tmp_path: Path) -> None:
    chosen = experiment(
        f"clock.protocol={protocol}", "clock.concurrency=5", "fleet.lease=6", "fleet.loss=0.1", "fleet.on=20",
        "fleet.dropout_share=0.2", "fleet.dropout_at=10", "fleet.late_share=0.2", "fleet.late_at=5", "delays.mean=3",
        "partition.clients=10",
    )  # fmt: skip
    if protocol == "sampled":
        chosen = experiment("clock.protocol=sampled", "delays.mean=3")
    chosen = chosen.variant(name, 0)
    whole = Simulation(chosen)
    whole.run()
    cut = Simulation(chosen)
    cut.start()
    for _ in range(60):
        if not cut.engine.finished:
            cut.engine.step()
    state.save(tmp_path / "s", cut.state_dict())
    resumed = Simulation(chosen)
    resumed.load_state_dict(state.load(tmp_path / "s"))
    resumed.run()
    assert replace(resumed.result(), wall_time=0) == replace(whole.result(), wall_time=0)
    assert resumed.measurements == whole.measurements


def test_every_rule_meets_the_same_durations() -> None:
    """The n-th job of a client takes the same time under every rule that never waits."""
    seen = {}
    for name in ("asgd", "fedbuff", "ca2fl", "fedasync"):
        events: list[Event] = []
        Simulation(experiment().variant(name, 0), on_event=events.append).run()
        seen[name] = [(e.time, e.client) for e in events if e.kind == "arrival"]
    assert seen["asgd"] == seen["fedbuff"] == seen["ca2fl"] == seen["fedasync"]


def test_every_rule_starts_from_the_same_model() -> None:
    starts = {s.measurements[0].loss for s in (simulated("strategy.name=asgd"), simulated("strategy.name=fedavg"))}
    assert len(starts) == 1


def test_waiting_costs_virtual_time() -> None:
    slow = ["fleet.slow_share=0.25", "fleet.slowdown=20"]
    assert (
        simulated("strategy.name=fedavg", *slow).result().virtual_time
        > 5 * simulated("strategy.name=fedbuff", *slow).result().virtual_time
    )


def test_ticks_deliver_in_client_order() -> None:
    events: list[Event] = []
    simulated(
        "clock.protocol=ticks", "delays.name=constant", "delays.value=2.7", "strategy.name=asgd", on_event=events.append
    )
    arrivals = [(e.time, e.client) for e in events if e.kind == "arrival"]
    assert arrivals == sorted(arrivals)
    assert {time for time, _ in arrivals} == {2.0 * k for k in range(1, 16)}


def test_uploads_follow_the_speeds() -> None:
    """Half of the clients four times slower: four fifths of the uploads come from the others."""
    s = simulated("budget.uploads=2000", "fleet.slow_share=0.5", "fleet.slowdown=4", "strategy.name=asgd")
    fast = sum(count for client, count in s.engine.by_client.items() if s.fleet.speeds[client] == 1.0)
    assert fast / 2000 == pytest.approx(0.8, abs=0.04)


def test_clients_leave_join_and_go_silent() -> None:
    """20 clients: 5 leave for good, 2 join late, 2 never answer and are given up when their lease runs out."""
    fleet = {"dropout_share": 0.25, "dropout_at": 30.0, "late_share": 0.1, "late_at": 20.0}
    fleet |= {"silent_share": 0.1, "lease": 15.0}
    changes = [f"fleet.{key}={value}" for key, value in fleet.items()]
    events: list[Event] = []
    s = simulated("partition.clients=20", "budget.uploads=1500", "strategy.name=ace", *changes, on_event=events.append)
    kinds = Counter(e.kind for e in events)
    assert (kinds["leave"], kinds["join"]) == (5 + 2, 2)
    assert s.strategy.n == 20 - 5 - 2
    silent = {client for client in range(20) if s.fleet.roles[client] == "silent"}
    assert not silent & set(s.engine.by_client)


def test_a_first_gradient_that_never_comes_stalls_with_advice() -> None:
    with pytest.raises(Stalled, match=r"set fleet\.lease, raise concurrency, or lower"):
        simulated("strategy.name=ace", "fleet.silent_share=0.2")


def test_the_tally_adds_up() -> None:
    s = simulated("strategy.name=fedbuff", "training.steps=3")
    result, d = s.result(), s.model.length
    assert result.gradient_evaluations == 3 * result.uploads
    assert result.bytes_up == 4 * d * result.uploads
    assert sum(s.engine.by_client.values()) == result.uploads
    assert result.versions == 12


def test_the_budget_ends_a_run() -> None:
    assert simulated("budget.uploads=50").result().uploads == 50
    by_versions = Simulation(Experiment.build({"budget": {"versions": 7}}, [c for c in SMALL if "budget" not in c]))
    by_versions.run()
    assert by_versions.result().versions == 7
    by_time = Simulation(Experiment.build({"budget": {"time": 3.5}}, [c for c in SMALL if "budget" not in c]))
    by_time.run()
    assert by_time.result().virtual_time == 3.5


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (["clock.concurrency=9"], "concurrency = 9 exceeds the 8 clients; lower it"),
        (["partition.clients=1000"], "1000"),
        (["strategy.name=fedavg", "strategy.buffer=9"], "buffer=9 can never fill with 8 clients"),
        (["fleet.dropout_share=1.0"], "leave none of 8 clients"),
    ],
)
def test_impossible_experiments(changes: list[str], text: str) -> None:
    with pytest.raises(ParameterError, match=text):
        Simulation(experiment(*changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (["strategi.name=ace"], r"there is no section \[strategi\]; did you mean 'strategy'"),
        (["strategy.name=aze"], r"\[strategy\] name = 'aze' is not known; did you mean 'ace'"),
        (["strategy.name=ace", "strategy.l=1"], r"\[strategy\] ace has no parameter 'l'; did you mean 'lr'"),
        (["partition.alpha=0"], r"alpha=0 is not valid; expected a positive number"),
        (["clock.protocol=event"], "expected one of 'events', 'ticks'"),
        (["budget"], "is not of the form section.key=value"),
        (["seeds.data=-1"], "data=-1 is not valid"),
        (["fleet.slow_share=2"], "slow_share=2 is not valid"),
    ],
)
def test_bad_experiments(changes: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        experiment(*changes)


def test_the_resolved_file_is_the_experiment(tmp_path: Path) -> None:
    made = experiment("strategy.name=fedbuff", "strategy.buffer=3", "clock.concurrency=4")
    (tmp_path / "e.toml").write_text(made.text())
    assert Experiment.read(tmp_path / "e.toml").text() == made.text()


def test_changing_the_name_of_a_section_forgets_the_other_names_parameters() -> None:
    made = Experiment.build({"strategy": {"name": "fedbuff", "buffer": 3}}, ["strategy.name=ace"])
    assert made.section("strategy").name == "ace"


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; `aflock config --example` prints one"):
        Experiment.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[strategy\n")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        Experiment.read(tmp_path / "bad.toml")
    (tmp_path / "value.toml").write_text("strategy = 3\n")
    with pytest.raises(ConfigError, match="strategy is a value; expected a section"):
        Experiment.read(tmp_path / "value.toml")


def test_every_key_is_explained() -> None:
    text = explain()
    for section, values in experiment().resolved().items():
        assert f"[{section}]" in text
        if section not in ("data", "strategy"):
            assert all(f"    {key} = " in text for key in values), section


def test_a_state_of_another_experiment_is_refused() -> None:
    a = Simulation(experiment())
    a.start()
    with pytest.raises(StateError, match="belongs to another experiment"):
        Simulation(experiment("strategy.lr=0.2")).load_state_dict(a.state_dict())


def test_a_run_leaves_its_files(tmp_path: Path) -> None:
    result = runs.run(experiment(), tmp_path / "r")
    names = {path.name for path in (tmp_path / "r").iterdir()}
    assert names == {
        "config.toml", "metrics.jsonl", "trace.jsonl", "model.safetensors", "result.json", "accuracy.png",
        "partition.txt", "partition.png", "executor.json",
    }  # fmt: skip
    assert json.loads((tmp_path / "r" / "executor.json").read_text()) == [{"executor": "inline"}]
    model = state.load(tmp_path / "r" / "model.safetensors")["model"]
    import hashlib

    assert hashlib.sha256(model.tobytes()).hexdigest() == result.model_sha256
    with pytest.raises(InputError, match="exists already; choose another --out, or --resume"):
        runs.run(experiment(), tmp_path / "r")
    with pytest.raises(InputError, match="has ended already"):
        runs.resume(experiment(), tmp_path / "r")
    with pytest.raises(InputError, match="was run with another experiment"):
        runs.resume(experiment("strategy.lr=0.2"), tmp_path / "r")
    with pytest.raises(InputError, match="is not the folder of a run"):
        runs.resume(experiment(), tmp_path)


def test_sampled_staleness_is_uniform_over_the_window() -> None:
    """Five models back at most, each as often; a rule that steps at every arrival counts one version per upload."""
    events: list[Event] = []
    s = simulated(
        "clock.protocol=sampled", "clock.window=5", "budget.uploads=3000", "strategy.name=asgd", on_event=events.append
    )
    seen = Counter(e.staleness for e in events if e.kind == "arrival")
    assert set(seen) == {0, 1, 2, 3, 4}
    assert max(seen.values()) - min(seen.values()) < 150
    assert s.result().versions == s.result().uploads == 3000
    assert max(s.engine.by_client.values()) - min(s.engine.by_client.values()) < 120


def test_sampled_draws_a_buffer_without_replacement() -> None:
    events: list[Event] = []
    simulated("clock.protocol=sampled", "strategy.name=fedbuff", "strategy.buffer=6", on_event=events.append)
    arrivals = [e for e in events if e.kind == "arrival"]
    for begin in range(0, 120, 6):
        assert len({e.client for e in arrivals[begin : begin + 6]}) == 6
    assert [e.outcome for e in arrivals[5::6]] == ["applied"] * 20


def test_sampled_delays_are_rounded_down_and_cut_at_the_start() -> None:
    events: list[Event] = []
    changes = ["clock.protocol=sampled", "delays.name=constant", "delays.value=2.9", "strategy.name=asgd"]
    simulated(*changes, on_event=events.append)
    assert [e.staleness for e in events if e.kind == "arrival"][:5] == [0, 1, 2, 2, 2]


@pytest.mark.parametrize("name", [*strategies.names(), "fedbuff+scaffold", "ace:memory=client"])
def test_a_trace_replays_to_the_same_bits(name: str) -> None:
    """Losses, leases, departures and late arrivals included; for every rule."""
    chosen = experiment(
        "fleet.loss=0.1", "fleet.lease=6", "fleet.dropout_share=0.2", "fleet.dropout_at=8", "fleet.late_share=0.2",
        "fleet.late_at=4", "partition.clients=10", "clock.concurrency=6",
    ).variant(name, 0)  # fmt: skip
    events: list[Event] = []
    whole = Simulation(chosen, on_event=events.append)
    whole.run()
    again = Simulation(chosen)
    skipped = replay.replay(again, [{"kind": e.kind, "time": e.time, "client": e.client} for e in events])
    assert skipped == 0
    assert again.result().model_sha256 == whole.result().model_sha256


def test_sampled_arrivals_with_given_probabilities() -> None:
    """Weights 4:2:1:1 of four clients, one draw per step: shares of 1/2, 1/4, 1/8, 1/8."""
    s = simulated(
        "clock.protocol=sampled", "clock.probabilities=[4,2,1,1]", "partition.clients=4", "budget.uploads=4000",
        "strategy.name=asgd",
    )  # fmt: skip
    shares = [s.engine.by_client[client] / 4000 for client in range(4)]
    assert shares == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=0.03)


def test_picked_with_given_probabilities() -> None:
    s = simulated("clock.probabilities=[1,1,1,0]", "partition.clients=4", "clock.concurrency=1", "strategy.name=asgd")
    assert set(s.engine.by_client) == {0, 1, 2}
    with pytest.raises(ParameterError, match="probabilities has 3 numbers for 8 clients; give one each"):
        Simulation(experiment("clock.probabilities=[1,1,1]"))
    with pytest.raises(ConfigError, match="expected a list of numbers of at least 0, not all 0"):
        experiment("clock.probabilities=[0,0]")


@pytest.mark.parametrize("rule", ["asgd", "ace"])
def test_sampled_clients_come_and_go_at_their_step(rule: str) -> None:
    events: list[Event] = []
    s = simulated(
        "clock.protocol=sampled", f"strategy.name={rule}", "fleet.dropout_share=0.25", "fleet.dropout_at=40",
        "fleet.late_share=0.25", "fleet.late_at=20", on_event=events.append,
    )  # fmt: skip
    left = {e.client: e.server for e in events if e.kind == "leave"}
    joined = {e.client: e.server for e in events if e.kind == "join"}
    assert list(left.values()) == [40, 40]
    assert list(joined.values()) == [20, 20]
    for event in events:
        if event.kind == "arrival" and event.client in left:
            assert event.time <= 40
    assert len(s.coordinator.clients) == 6
    assert any(e.kind == "arrival" and e.client in joined and e.time > 20 for e in events)


def test_clients_that_are_away_get_no_job() -> None:
    """Day and night: everybody is there half of the time, and a job given by day may come back at night."""
    events: list[Event] = []
    s = simulated(
        "fleet.on=3", "fleet.off=3", "fleet.rhythm=regular", "budget.uploads=300", "strategy.name=asgd",
        on_event=events.append,
    )  # fmt: skip
    away: set[int | None] = set()
    for event in events:
        if event.kind in ("away", "back"):
            (away.add if event.kind == "away" else away.discard)(event.client)
        assert not (event.kind == "pull" and event.client in away)
    assert sum(e.kind == "arrival" for e in events) == s.engine.tally.updates == 300
    nights = [e.time for e in events if e.kind == "away" and e.client == 0]
    assert np.diff(nights) == pytest.approx(6.0)


def test_going_on_while_clients_are_away(tmp_path: Path) -> None:
    chosen = experiment("fleet.on=2", "fleet.off=2", "fleet.rhythm=regular", "clock.concurrency=4")
    whole, half = Simulation(chosen), Simulation(chosen)
    whole.run()
    half.run(lambda: half.engine.tally.updates >= 50)
    state.save(tmp_path / "s", half.state_dict())
    rest = Simulation(chosen)
    rest.load_state_dict(state.load(tmp_path / "s"))
    rest.run()
    assert rest.result().model_sha256 == whole.result().model_sha256


def test_durations_of_a_run_make_the_next(tmp_path: Path) -> None:
    """Another rule under the recorded durations of a run meets the same arrivals."""
    runs.run(experiment("strategy.name=asgd", "delays.mean=3"), tmp_path / "r")
    shorter = [*SMALL, "strategy.name=fedbuff", "budget.uploads=100"]
    first = runs.simulate({}, *shorter, "delays.mean=3")
    again = runs.simulate({}, *shorter, "delays.name=trace", f"delays.file={str(tmp_path / 'r' / 'trace.jsonl')!r}")
    assert again.model_sha256 == first.model_sha256
    assert again.virtual_time == pytest.approx(first.virtual_time)


def test_a_full_disk_leaves_whole_lines_and_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace cannot grow beyond 20 kB: a file-size limit stands in for the end of the disk."""
    chosen = experiment("checkpoint.every=10", "strategy.name=asgd", "budget.uploads=600")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(recorder.Unwritable, match="File too large; make room and go on with --resume"):
            runs.run(chosen, tmp_path / "r")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "r").glob(".*"))
    for line in (tmp_path / "r" / "trace.jsonl").read_text().splitlines():
        json.loads(line)
    assert runs.resume(chosen, tmp_path / "r").model_sha256 == runs.simulate(chosen.resolved()).model_sha256


def test_measurements_for_tensorboard(tmp_path: Path) -> None:
    from tensorboardX.event_file_writer import EventFileWriter  # noqa: F401  # it is installed
    from tensorboardX.proto.event_pb2 import Event as Logged

    result = runs.run(experiment(), tmp_path / "r", tensorboard=True)
    (file,) = (tmp_path / "r" / "tensorboard").iterdir()
    raw, found = file.read_bytes(), []
    while raw:
        size = int.from_bytes(raw[:8], "little")
        event = Logged.FromString(raw[12 : 12 + size])
        found += [(event.step, value.simple_value) for value in event.summary.value if value.tag == "accuracy"]
        raw = raw[16 + size :]
    assert [step for step, _ in found] == [0, 30, 60, 90, 120, 120]
    assert found[-1][1] == pytest.approx(result.accuracy)


def test_local_buffers_stay_with_their_client_and_are_averaged_for_the_test_set() -> None:
    chosen = experiment(
        "data.features=256", "model.name=resnet18", "model.norm=batch", "model.buffers=local", "model.width=4",
        "strategy.name=fedbuff", "budget.uploads=12",
    )  # fmt: skip
    s = Simulation(chosen)
    s.run()
    kept = [record.memory["buffers"] for record in s.engine.records.values() if "buffers" in record.memory]
    assert len(kept) > 1
    assert not np.array_equal(kept[0], kept[1])
    np.testing.assert_allclose(s.model.get_buffers()[:4], np.mean(kept, axis=0)[:4], rtol=1e-6)
    again = Simulation(chosen)
    again.run()
    assert again.result().loss == s.result().loss
