"""Save at a random arrival, load in a new process, go on: the same bits as never having stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from aflock import state, strategies
from aflock.errors import StateError
from aflock.rows import DenseRows
from tests.contract.cases import Arrivals, Case, all_cases, start
from tests.contract.continuation import digest


class Process:
    """The other process: it has never seen the runs it continues."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("continuation.py")
        self._child = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: object) -> str:
        _pipe(self._child.stdin).write(json.dumps(request) + "\n")
        _pipe(self._child.stdin).flush()
        answer = _pipe(self._child.stdout).readline().strip()
        assert answer, "the other process died"
        return answer

    def close(self) -> None:
        _pipe(self._child.stdin).close()
        assert self._child.wait(timeout=30) == 0
        _pipe(self._child.stdout).close()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    child = Process()
    yield child
    child.close()


@pytest.mark.parametrize("case", all_cases(), ids=str)
@given(seed=some.integers(0, 2**20), cut=some.integers(0, 60), rest=some.integers(1, 60))
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_going_on_in_a_new_process(
    case: Case, process: Process, tmp_path: Path, seed: int, cut: int, rest: int
) -> None:
    s = case.create()
    start(s, seed)
    arrivals = Arrivals(seed)
    arrivals.feed(s, 0, cut)
    file = tmp_path / "state.safetensors"
    state.save(file, s.state_dict())
    arrivals.feed(s, cut, cut + rest)
    there = process.ask(file=str(file), name=case.name, params=case.params, seed=seed, begin=cut, end=cut + rest)
    assert there == digest(s.state_dict())


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_a_state_is_detached_from_the_run(case: Case) -> None:
    """What happens after `state_dict` does not reach it; loading it back undoes what happened."""
    s = case.create()
    start(s)
    arrivals = Arrivals(1)
    arrivals.feed(s, 0, 20)
    saved = s.state_dict()
    before = digest(saved)
    arrivals.feed(s, 20, 60)
    assert digest(saved) == before
    after = digest(s.state_dict())
    assert after != before
    s.load_state_dict(saved)
    assert digest(s.state_dict()) == before
    arrivals.feed(s, 20, 60)
    assert digest(s.state_dict()) == after


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_a_state_that_is_not_detached_says_the_same_without_a_copy(case: Case) -> None:
    s = case.create()
    start(s)
    Arrivals(1).feed(s, 0, 20)
    attached = s.state_dict(detached=False)
    assert digest(attached) == digest(s.state_dict())
    assert np.shares_memory(attached["w"], s.w.high)
    assert np.shares_memory(attached["low"], s.w.low)
    for name in s.keeps:
        own = getattr(s, name)
        if isinstance(own, np.ndarray):
            assert np.shares_memory(attached["keeps"][name], own)
        elif isinstance(own, DenseRows) and len(own):
            client = next(iter(own))
            assert np.shares_memory(attached["keeps"][name]["rows"][str(client)], own.row(client))


@pytest.mark.parametrize("case", [c for c in all_cases() if c.create().first], ids=str)
def test_the_opening_is_part_of_the_state(case: Case) -> None:
    draws = np.random.default_rng(0)
    w0 = draws.standard_normal(11).astype(np.float32)
    first = {c: draws.standard_normal(11).astype(np.float32) for c in range(7)}
    whole, halved = case.create(), case.create()
    whole.open(w0)
    halved.open(w0)
    for c in range(4):
        whole.offer(c, first[c])
        halved.offer(c, first[c])
    other = case.create()
    other.load_state_dict(halved.state_dict())
    assert not other.started
    for c in range(4, 7):
        whole.offer(c, first[c])
        other.offer(c, first[c])
    assert other.started
    assert digest(other.state_dict()) == digest(whole.state_dict())


def test_a_state_of_another_rule_is_refused_and_nothing_changes() -> None:
    a, b = strategies.create("ace", clients=7), strategies.create("asgd", clients=7)
    start(a)
    start(b)
    before = digest(b.state_dict())
    with pytest.raises(StateError, match="saved by ace; expected asgd"):
        b.load_state_dict(a.state_dict())
    assert digest(b.state_dict()) == before


def test_a_state_with_other_parameters_is_refused() -> None:
    a, b = strategies.create("asgd", clients=7, lr=0.1), strategies.create("asgd", clients=7, lr=0.2)
    start(a)
    with pytest.raises(StateError, match=r"lr=0\.1"):
        b.load_state_dict(a.state_dict())


def test_a_damaged_state_is_refused_and_nothing_changes() -> None:
    s = strategies.create("fedbuff", clients=7)
    start(s)
    before = digest(s.state_dict())
    broken = s.state_dict()
    broken["keeps"]["acc"] = np.zeros(3)
    with pytest.raises(StateError, match="acc"):
        s.load_state_dict(broken)
    assert digest(s.state_dict()) == before
