"""True optimum or biased point: both sides, for every registered rule, on quadratics with uneven client speeds."""

from __future__ import annotations

import pytest

from aflock import strategies
from aflock.showcase import optimum

EXACT, STEP, BIASED = 1e-5, 0.01, 0.1


@pytest.mark.parametrize("name", strategies.names())
def test_where_the_rule_ends(name: str) -> None:
    final = optimum.run(name).final
    claim = strategies.get(name).optimum
    if claim == "true":
        assert final < EXACT
    elif claim == "step":
        assert final < STEP
    else:
        assert final > BIASED


def test_the_table_of_the_specification() -> None:
    """Which rules must be on which side is fixed, not only that each is where it says."""
    entries = {entry.name: entry.optimum for entry in strategies.entries()}
    reach = {"ace", "ca2fl", "afa-cs", "masfl", "adamasfl", "rolling-fedavg"}
    miss = {"asgd", "delay-adaptive", "fedbuff", "afa-cd", "fedasync", "aced"}
    assert {name for name in reach if entries[name] == "biased"} == set()
    assert {name for name in miss if entries[name] != "biased"} == set()


def test_aced_with_an_infinite_threshold_is_not_biased() -> None:
    assert optimum.run("aced", tau_algo=float("inf")).final < EXACT


def test_int8_rows_stay_near_the_optimum() -> None:
    """Unbiased rounding adds noise that shrinks with the gradients, not bias."""
    assert optimum.run("ace", cache="int8").final < STEP
