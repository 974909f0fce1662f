"""One server step per tick, places that are given again at server steps, ticks as a budget, and silent resets."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aflock import strategies
from aflock.errors import InputError, ParameterError
from aflock.events import Event
from aflock.runs import running
from aflock.sim import replay
from aflock.sim.experiment import Experiment
from aflock.sim.simulation import Simulation

TICKS = (
    "clock.protocol=ticks",
    "clock.step=tick",
    "delays.mean=3.0",
    "partition.clients=12",
    "budget.ticks=40",
    "evaluation.every=10",
    "evaluation.unit=ticks",
)
SILENT = (
    "strategy.name=mr-asyncfl",
    "strategy.max_staleness=8",
    "strategy.reset=silent",
    "fleet.slow_share=0.5",
    "fleet.slowdown=6.0",
    "partition.clients=10",
    "budget.uploads=300",
)
RULES = [name for name in strategies.names() if name != "mr-asyncfl"] + ["ace+scaffold", "fedbuff+scaffold"]


def experiment(*changes: str) -> Experiment:
    return Experiment.build({}, changes)


def finished(*changes: str, workers: int = 0) -> tuple[Simulation, list[Event]]:
    events: list[Event] = []
    with Simulation(experiment(*changes), on_event=events.append, workers=workers) as simulation:
        assert simulation.run()
    return simulation, events


def arrivals(events: list[Event]) -> list[Event]:
    return [event for event in events if event.kind == "arrival" and not event.first]


# --- one step per tick ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_a_tick_makes_one_step_at_most_and_replays_to_the_same_bits(rule: str, tmp_path: Path) -> None:
    changes = (*TICKS, f"strategy.name={rule}")
    running.run(experiment(*changes), tmp_path / "run")
    lines = list(replay.read(tmp_path / "run" / "trace.jsonl"))
    steps = [line["time"] for line in lines if line["kind"] == "step"]
    assert len(steps) == len(set(steps)) > 0
    with Simulation(experiment(*changes)) as again:
        assert replay.replay(again, lines) == 0
    original, _ = finished(*changes)
    assert np.array_equal(again.strategy.model, original.strategy.model)
    assert again.strategy.version == original.strategy.version


def test_staleness_counts_from_the_start_of_the_tick() -> None:
    _, events = finished(*TICKS, "strategy.name=asgd")
    version = 0
    for event in events:
        if event.kind == "arrival":
            assert event.server == version
            assert event.staleness == version - (event.version or 0)
            assert event.outcome == "buffered"
        if event.kind == "step":
            version += 1
            assert event.server == version


def test_jobs_of_a_tick_are_given_after_its_step() -> None:
    _, events = finished(*TICKS, "strategy.name=ace")
    for before, event in pairwise(events):
        if event.kind == "pull" and not event.first:
            assert before.kind in ("pull", "step", "arrival")
            assert event.version == event.server


def test_workers_and_a_resumed_run_end_with_the_same_bits(tmp_path: Path) -> None:
    changes = (*TICKS, "strategy.name=aced", "strategy.tau_algo=4", "checkpoint.every=5")
    whole, _ = finished(*changes)
    beside, _ = finished(*changes, workers=2)
    assert np.array_equal(whole.strategy.model, beside.strategy.model)
    with Simulation(experiment(*changes)) as first:
        assert not first.run(lambda: first.strategy.version >= 17)
        saved = first.state_dict()
    with Simulation(experiment(*changes)) as second:
        second.load_state_dict(saved)
        assert second.run()
    assert np.array_equal(whole.strategy.model, second.strategy.model)
    assert second.measurements == whole.measurements


def test_ticks_are_counted_from_the_rules_start() -> None:
    plain, _ = finished(*TICKS, "strategy.name=asgd")
    assert plain.engine.clock.now == plain.engine.ticks_done == 40
    opened, events = finished(*TICKS, "strategy.name=ace")
    last_first = max(event.time for event in events if event.kind == "arrival" and event.first)
    assert opened.engine.opened_at == last_first > 0
    assert opened.engine.clock.now == last_first + 40
    assert opened.strategy.version <= 41
    assert [m.time - last_first for m in opened.measurements[1:]] == [10, 20, 30, 40, 40]


def test_a_run_whose_last_ticks_are_empty_ends_at_its_budget() -> None:
    changes = (*TICKS, "strategy.name=asgd", "partition.clients=2", "delays.name=constant", "delays.value=7.0")
    simulation, _ = finished(*changes)
    assert simulation.engine.clock.now == 40
    assert simulation.strategy.version == 5  # at 7, 14, 21, 28 and 35


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (("clock.step=tick",), 'step = "tick" needs [clock] protocol = "ticks"; it is "events"'),
        (("budget.ticks=5",), 'ticks = 5 needs [clock] protocol = "ticks"'),
        (("evaluation.unit=ticks",), 'unit = "ticks" needs [clock] protocol = "ticks"'),
        (("clock.protocol=sampled", "clock.refill=step"), 'refill = "step" needs a clock'),
        (("clock.protocol=ticks", "clock.step=tick", "strategy.name=mr-asyncfl"), "one arrival at a time"),
        ((*SILENT, "clock.protocol=sampled"), "needs jobs that are under way"),
        (("clock.refill=step", "clock.concurrency=5", "strategy.name=fedbuff"), "could never fill a buffer of 10"),
        (("clock.refill=step", "clock.concurrency=5", "strategy.name=fedavg"), "raise concurrency to at least 40"),
        (("clock.refill=step", "partition.clients=5", "strategy.name=fedbuff"), "with 5 places"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: tuple[str, ...], says: str) -> None:
    with pytest.raises(ParameterError) as refused:
        Simulation(experiment(*changes))
    assert says in str(refused.value)


def test_a_trace_without_steps_is_refused_where_steps_are_wanted(tmp_path: Path) -> None:
    per_arrival = ("clock.protocol=ticks", "budget.uploads=50", "strategy.name=asgd", "partition.clients=5")
    running.run(experiment(*per_arrival), tmp_path / "run")
    lines = list(replay.read(tmp_path / "run" / "trace.jsonl"))
    wanting = Simulation(experiment(*per_arrival, "clock.step=tick"))
    with wanting, pytest.raises(InputError, match="no lines of server steps"):
        replay.replay(wanting, lines)


# --- places that are given again at server steps --------------------------------------------------------------------

PAPER_002 = (
    "partition.clients=100",
    "clock.concurrency=20",
    "delays.name=uniform",
    "delays.low=0.0",
    "delays.high=20.0",
    "strategy.name=fedbuff",
    "strategy.buffer=10",
    "budget.versions=300",
)


def test_refill_at_steps_has_the_staleness_of_the_paper() -> None:
    """Paper 002: mean 0.92, most 4."""
    refilled, _ = finished(*PAPER_002, "clock.refill=step")
    at_once, _ = finished(*PAPER_002)
    assert 0.85 < refilled.engine.tally.staleness_mean < 1.1
    assert refilled.engine.tally.staleness_max <= 4
    assert 1.7 < at_once.engine.tally.staleness_mean < 2.1


def test_refill_at_steps_hands_out_jobs_only_when_the_model_has_moved() -> None:
    _, events = finished(*PAPER_002, "clock.refill=step")
    moved = {event.time for event in events if event.kind == "arrival" and event.outcome == "applied"}
    pulls = [event.time for event in events if event.kind == "pull"]
    assert pulls[:20] == [0.0] * 20
    assert len(pulls) > 2500
    assert set(pulls[20:]) <= moved
    _, at_once = finished(*PAPER_002)
    assert not {event.time for event in at_once if event.kind == "pull"} <= moved | {0.0}


def test_lost_jobs_free_their_place_at_once_and_first_jobs_are_exempt() -> None:
    lossy = ("fleet.loss=0.3", "fleet.lease=25.0", "strategy.name=masfl", "strategy.buffer=10", "budget.versions=40")
    simulation, events = finished(*PAPER_002, "clock.refill=step", *lossy)
    assert simulation.strategy.version == 40
    drops = [k for k, event in enumerate(events) if event.kind == "drop"]
    assert drops
    firsts = [event for event in events if event.kind == "pull" and event.first]
    assert len({event.client for event in firsts}) == 100  # 20 places, and nobody waits for a step before the first one


def test_refill_at_steps_is_resumed_and_replayed(tmp_path: Path) -> None:
    changes = (*PAPER_002, "clock.refill=step", "budget.versions=20")
    whole, _ = finished(*changes)
    with Simulation(experiment(*changes)) as first:
        assert not first.run(lambda: first.engine.tally.updates >= 77)
        saved = first.state_dict()
    with Simulation(experiment(*changes)) as second:
        second.load_state_dict(saved)
        assert second.run()
    assert np.array_equal(whole.strategy.model, second.strategy.model)
    running.run(experiment(*changes), tmp_path / "run")
    with Simulation(experiment(*changes)) as again:
        assert replay.replay(again, replay.read(tmp_path / "run" / "trace.jsonl")) == 0
    assert np.array_equal(whole.strategy.model, again.strategy.model)


# --- mr-asyncfl: exchange and reset ---------------------------------------------------------------------------------


def test_every_client_of_a_tick_gets_the_model_before_its_own_aggregation() -> None:
    _, events = finished("strategy.name=mr-asyncfl", "clock.protocol=ticks", "delays.mean=3.0", "budget.uploads=200")
    made: dict[Any, int] = {}
    seen = 0
    for event in events:
        if event.kind == "arrival":
            made[event.client] = event.server
        if event.kind == "pull" and event.client in made:
            assert event.version == made[event.client] - 1
            seen += event.server > made[event.client]
    assert seen > 20  # others were aggregated in the same tick, after it


def test_silent_clients_are_reset_before_they_are_too_old(tmp_path: Path) -> None:
    simulation, events = finished(*SILENT)
    assert any(event.kind == "reset" for event in events)
    assert max(event.staleness or 0 for event in arrivals(events)) <= 8
    assert simulation.engine.tally.rejected == 0
    late, _ = finished(*SILENT, "strategy.reset=arrival")
    assert late.engine.tally.rejected > 0
    running.run(experiment(*SILENT), tmp_path / "run")
    with Simulation(experiment(*SILENT)) as again:
        replay.replay(again, replay.read(tmp_path / "run" / "trace.jsonl"))
    assert np.array_equal(again.strategy.model, simulation.strategy.model)


# --- what is sent ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sends"),
    [
        ((), "gradient"),
        (("local.name=sgd",), "gradient"),
        (("local.name=sgd", "local.momentum=0.9"), "direction"),
        (("local.name=sgd", "local.weight_decay=0.01"), "direction"),
        (("local.name=fedprox",), "direction"),
        (("local.name=adamw",), "direction"),
        (("local.name=adamw", "strategy.sends=gradient"), "gradient"),
        (("strategy.name=asgd+scaffold",), "direction"),
        (("strategy.name=asgd+scaffold", "strategy.sends=auto"), "direction"),
    ],
)
def test_auto_follows_the_local_rule(changes: tuple[str, ...], sends: str) -> None:
    made = experiment("strategy.name=asgd", *changes)
    assert made.resolved()["strategy"]["sends"] == sends
    assert experiment().resolved()["strategy"]["sends"] == "gradient"
    assert Experiment.build(made.resolved()).resolved() == made.resolved()


@pytest.mark.parametrize("local", ["local.name=fedprox", "local.momentum=0.9"])
def test_directions_times_their_rates_are_deltas(local: str) -> None:
    """afa-cd with directions and lr = eta_l*K is fedbuff with lr = 1, whatever the local rule."""
    common = ("training.steps=4", "local.name=sgd", "local.eta_l=0.05", local, "budget.uploads=300")
    gradients, _ = finished(*common, "strategy.name=afa-cd", "strategy.buffer=5", "strategy.lr=0.2")
    deltas, _ = finished(*common, "strategy.name=fedbuff", "strategy.buffer=5")
    assert np.allclose(gradients.strategy.model, deltas.strategy.model, atol=1e-5)


def test_a_first_job_with_directions_makes_k_steps() -> None:
    """With one client and K steps, ace's first row is the direction of K steps of local training."""
    common = ("partition.name=iid", "partition.clients=1", "training.steps=3", "local.name=sgd", "local.eta_l=0.1")
    with Simulation(experiment(*common, "local.momentum=0.5", "strategy.name=ace", "strategy.lr=0.3")) as ace:
        ace.start()
        while not ace.strategy.version:
            ace.engine.step()
        first = ace.strategy.model.copy()
    with Simulation(experiment(*common, "local.momentum=0.5", "strategy.name=fedavg")) as alone:
        alone.start()
        while not alone.strategy.version:
            alone.engine.step()
        assert np.allclose(first, alone.strategy.model, atol=1e-6)  # lr = eta_l*K: one step of ace is the whole job


# --- the delay of a delay-aware rate ---------------------------------------------------------------------------------

ADAM = (
    "strategy.name=fedasync",
    "local.name=adam",
    "local.alpha=0.5",
    "partition.clients=4",
    "delays.name=constant",
    "delays.value=3.0",
    "budget.uploads=40",
)


def test_the_delay_may_count_time_and_a_resumed_run_knows_it() -> None:
    """All four clients take 3 units: the delay in time is 3; in versions it is 0 at first, and 3 once all report."""
    by_time, _ = finished(*ADAM, "local.delay=time")
    assert {record.delay for record in by_time.engine.records.values()} == {3.0}
    by_versions, _ = finished(*ADAM)
    assert {record.delay for record in by_versions.engine.records.values()} == {3}
    assert not np.array_equal(by_time.strategy.model, by_versions.strategy.model)  # the first jobs differ
    with Simulation(experiment(*ADAM, "local.delay=time")) as first:
        assert not first.run(lambda: first.engine.tally.updates >= 13)
        saved = first.state_dict()
    with Simulation(experiment(*ADAM, "local.delay=time")) as second:
        second.load_state_dict(saved)
        assert second.run()
    assert np.array_equal(second.strategy.model, by_time.strategy.model)


def test_a_delay_in_time_needs_a_clock() -> None:
    with pytest.raises(ParameterError, match='delay = "time" needs a clock'):
        Simulation(experiment(*ADAM, "local.delay=time", "clock.protocol=sampled"))


def test_the_model_at_the_last_tick_is_measured_before_the_last_partial_buffer() -> None:
    simulation, events = finished(*TICKS, "strategy.name=fedbuff", "strategy.buffer=9", "delays.mean=9.0")
    assert any(event.kind == "flush" for event in events)
    before, after = simulation.measurements[-2:]
    assert before.time == after.time == 40
    assert after.versions == before.versions + 1
