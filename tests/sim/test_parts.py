"""The clock, the delays and the fleet."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from aflock.errors import ParameterError, UnknownName
from aflock.sim import delays
from aflock.sim.clock import Clock
from aflock.sim.fleet import Fleet, FleetParams


class Incomparable:
    """Raises when compared: equal times must never look at their items."""

    def __lt__(self, other: object) -> bool:
        raise AssertionError


@given(some.lists(some.integers(0, 5), max_size=60))
@settings(deadline=None)
def test_equal_times_are_first_in_first_out(times: list[int]) -> None:
    clock: Clock[Any] = Clock()
    for number, time in enumerate(times):
        clock.at(float(time), (number, Incomparable()))
    seen = []
    while len(clock):
        number, _ = clock.next()
        seen.append((clock.now, number))
    assert seen == sorted((float(time), number) for number, time in enumerate(times))


def test_a_clock_goes_on_where_it_was_saved() -> None:
    a: Clock[str] = Clock()
    for time, item in ((3.0, "c"), (1.0, "a"), (1.0, "b")):
        a.at(time, item)
    a.next()
    b: Clock[str] = Clock()
    b.restore(a.now, a.sequence, a.entries())
    for clock in (a, b):
        clock.at(3.0, "d")
    assert [a.next(), a.next(), a.next()] == [b.next(), b.next(), b.next()] == ["b", "c", "d"]


MEANS = [
    ("constant", {"value": 3.0}, 3.0),
    ("uniform", {"low": 1.0, "high": 5.0}, 3.0),
    ("exponential", {"mean": 3.0}, 3.0),
    ("lognormal", {"mean": 3.0, "sigma": 0.8}, 3.0),
    ("pareto", {"scale": 1.0, "shape": 3.0}, 1.5),
    ("mixture", {"fast": 1.0, "slow": 5.0, "slow_share": 0.25}, 2.0),
]


@pytest.mark.parametrize(("name", "params", "mean"), MEANS)
def test_delays_have_their_means(name: str, params: dict[str, float], mean: float) -> None:
    """The mean of a distribution is the integral of its quantile function."""
    delay = delays.create(name, **params)
    grid = (np.arange(200_000) + 0.5) / 200_000
    values = np.array([delay.quantile(float(u)) for u in grid])
    assert values.mean() == pytest.approx(mean, rel=0.01)
    assert np.all(np.diff(values[:150_000]) >= 0) or name == "mixture"
    assert values.min() >= 0


def test_every_delay_is_tested() -> None:
    assert {name for name, _, _ in MEANS} == set(delays.names()) - {"trace"}


def test_recorded_delays_client_by_client_and_job_by_job(tmp_path: Path) -> None:
    (tmp_path / "fleet.csv").write_text("client,duration\n0,1.5\n2,4\n0,2.5\n")
    delay = delays.create("trace", file=str(tmp_path / "fleet.csv"))
    assert [delay.draw(0, job, 0.5) for job in range(3)] == [1.5, 2.5, 1.5]
    assert delay.draw(2, 7, 0.5) == 4.0
    assert delay.draw(1, 0, 0.5) == 4.0  # not recorded: stands in for the second of those that are
    assert [delay.quantile(u) for u in (0.1, 0.5, 0.9)] == [1.5, 2.5, 4.0]


def test_recorded_delays_of_nobody_in_particular(tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_text("3\n1\n\n2\n")
    delay = delays.create("trace", file=str(tmp_path / "numbers.txt"))
    assert [delay.draw(0, 0, u) for u in (0.1, 0.5, 0.9)] == [1.0, 2.0, 3.0]


def test_recorded_delays_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="cannot be read: No such file"):
        delays.create("trace", file=str(tmp_path / "none.csv"))
    (tmp_path / "bad.csv").write_text("who,how long\n1,2\n")
    with pytest.raises(ParameterError, match=r"is not a recording .* expected trace.jsonl of a run, a CSV"):
        delays.create("trace", file=str(tmp_path / "bad.csv"))
    (tmp_path / "below.txt").write_text("-1\n")
    with pytest.raises(ParameterError, match="at least one duration, and none below 0"):
        delays.create("trace", file=str(tmp_path / "below.txt"))


def test_a_regular_rhythm_has_any_phase_and_the_given_lengths() -> None:
    made = fleet(50, on=4.0, off=2.0, rhythm="regular")
    for client in range(50):
        first, second, *rest = [made.stretch(client, count) for count in range(6)]
        assert rest == [4.0, 2.0, 4.0, 2.0]
        assert (0 < first <= 4 and second == 2) or (first == 0 and 0 < second <= 2)
    assert 5 < sum(made.stretch(client, 0) == 0 for client in range(50)) < 30


def test_bad_delays() -> None:
    with pytest.raises(UnknownName, match="did you mean 'exponential'"):
        delays.create("exponental")
    with pytest.raises(ParameterError, match="mean=-1 is not valid; expected a positive number"):
        delays.create("exponential", mean=-1)
    with pytest.raises(ParameterError, match="low=3 exceeds high=1; swap them"):
        delays.create("uniform", low=3.0, high=1.0)


def fleet(clients: int = 10, ranking: list[float] | None = None, seed: int = 0, **params: Any) -> Fleet:
    return Fleet(clients, delays.create("exponential"), FleetParams.build("fleet", params), seed=seed, ranking=ranking)


def test_adding_a_client_changes_nobody_elses_draws() -> None:
    few, many = fleet(10, spread=0.5), fleet(11, spread=0.5)
    for client in range(10):
        assert few.speeds[client] == many.speeds[client]
        for job in range(5):
            assert few.duration(client, job) == many.duration(client, job)


def test_seeds_make_other_fleets() -> None:
    assert fleet(seed=1).duration(0, 0) != fleet(seed=2).duration(0, 0)


def test_slow_clients_are_slow() -> None:
    made = fleet(10, slow_share=0.3, slowdown=8.0)
    assert sorted(made.speeds) == [1.0] * 7 + [8.0] * 3


def test_speeds_can_go_with_the_data() -> None:
    made = fleet(4, ranking=[0.1, 9.0, 0.2, 5.0], slow_share=0.5, slowdown=2.0, correlate="class")
    assert made.speeds.tolist() == [1.0, 2.0, 1.0, 2.0]
    with pytest.raises(ParameterError, match="needs data to correlate with"):
        fleet(4, slow_share=0.5, correlate="size")


def test_a_duration_is_compute_plus_network() -> None:
    made = Fleet(1, delays.create("constant", value=2.0), FleetParams.build("f", {"latency": 0.5, "bandwidth": 100.0}))
    assert made.duration(0, 0, steps=7, size=300) == 2.0 + 0.5 + 3.0
    per_step = Fleet(1, delays.create("constant", value=2.0), FleetParams.build("f", {"per_step": True}))
    assert per_step.duration(0, 0, steps=7) == 14.0


def test_roles() -> None:
    made = fleet(20, dropout_share=0.25, dropout_at=7.0, late_share=0.2, late_at=3.0, silent_share=0.1)
    assert [sum(made.roles == role) for role in ("leaver", "late", "silent", "member")] == [5, 4, 2, 9]
    assert made.initial() == list(range(16))
    changes = {(c.kind, c.time): 0 for c in made.planned()}
    assert set(changes) == {("leave", 7.0), ("join", 3.0)}
    silent = next(c for c in range(20) if made.roles[c] == "silent")
    assert not made.returns(silent, 0)
    assert made.returns(next(c for c in range(20) if made.roles[c] == "member"), 0)


def test_lost_jobs() -> None:
    made = fleet(5, loss=0.2)
    lost = np.mean([not made.returns(c, j) for c in range(5) for j in range(2000)])
    assert lost == pytest.approx(0.2, abs=0.02)


def test_presence_and_absence_have_their_means() -> None:
    made = fleet(1, on=4.0, off=2.0)
    stretches = [made.stretch(0, count) for count in range(20_000)]
    assert np.mean(stretches[::2]) == pytest.approx(4.0, rel=0.05)
    assert np.mean(stretches[1::2]) == pytest.approx(2.0, rel=0.05)
    assert fleet(1).stretch(0, 0) == math.inf


def test_nobody_left_is_refused() -> None:
    with pytest.raises(ParameterError, match="leave none of 10 clients; lower them"):
        fleet(10, dropout_share=1.0)
    with pytest.raises(ParameterError, match="add up to more than 1"):
        fleet(10, dropout_share=0.7, silent_share=0.5)
