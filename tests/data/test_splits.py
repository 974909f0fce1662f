"""The splits: numbers to check by hand, and what holds for every dataset."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aflock import rng
from aflock.data import partition
from aflock.data.base import Integers
from aflock.data.splits.dirichlet import DirichletParams, best_draw, draw, fill
from aflock.data.splits.level import level
from aflock.errors import ParameterError
from tests.data.labelled import TWELVE, assert_sound, counts, labelled, same, squares

# -- by hand ----------------------------------------------------------------------------------------------------------


def test_iid_sizes_by_hand() -> None:
    assert sorted(partition.create("iid", TWELVE, 5).sizes.tolist()) == [2, 2, 2, 3, 3]
    assert partition.create("iid", TWELVE, 12).sizes.tolist() == [1] * 12
    assert [part.tolist() for part in partition.create("iid", TWELVE, 1).indices] == [list(range(12))]


def test_dirichlet_with_huge_alpha_is_even() -> None:
    for alpha in (1e12, 1.7e308):
        made = partition.create("dirichlet", TWELVE, 4, alpha=alpha)
        assert counts(made, TWELVE).tolist() == [[1, 1, 1]] * 4


@pytest.mark.parametrize("alpha", [1e-3, 5e-324])
def test_dirichlet_with_tiny_alpha_gives_each_class_to_one_client_any_client(alpha: float) -> None:
    drawn = draw(np.full(4000, 7), 8, alpha, rng.stream(1, "x"))
    assert ((drawn > 0).sum(0) == 1).mean() > 0.95
    owners = np.bincount(drawn.argmax(0), minlength=8)
    assert ((owners - 500) ** 2 / 500).sum() < 24.3  # 0.999 quantile of chi-square with 7 degrees


def test_dirichlet_columns_sum_to_the_classes() -> None:
    for seed in range(50):
        drawn = draw(np.array([5, 0, 7]), 6, 0.3, rng.stream(seed, "x"))
        assert drawn.sum(0).tolist() == [5, 0, 7]
        assert drawn.min() >= 0


def test_filling_up_by_hand() -> None:
    held = np.array([[6, 1], [0, 0], [1, 4], [0, 1]])  # sizes 7, 0, 5, 1
    fill(held, 3)
    # client 1 lacks 3: client 0 (7) gives 3 of class 0; client 3 lacks 2: client 2 (5) gives 2 of class 1
    assert held.tolist() == [[3, 1], [3, 0], [1, 2], [0, 3]]


def test_filling_up_to_the_last_example_by_hand() -> None:
    held = np.array([[2, 3, 1], [0, 0, 0], [0, 0, 0]])
    fill(held, 2)
    # 2 of class 1 to client 1; then class 0 is largest (2 against 1 and 1)
    assert held.tolist() == [[0, 1, 1], [0, 2, 0], [2, 0, 0]]


def test_nobody_becomes_short_by_giving() -> None:
    held = np.array([[4], [4], [1], [3]])
    fill(held, 3)
    assert held.tolist() == [[3]] * 4


def test_the_draws_are_few_and_the_best_is_kept() -> None:
    totals, params = np.array([30, 30, 30]), DirichletParams(alpha=0.05, min_size=9)
    best = best_draw(totals, 10, params, rng.stream(3, "x"))
    again = rng.stream(3, "x")
    tries = [draw(totals, 10, 0.05, again) for _ in range(10)]
    lacks = [int(np.maximum(9 - one.sum(1), 0).sum()) for one in tries]
    assert min(lacks) > 0
    assert best.tolist() == tries[lacks.index(min(lacks))].tolist()


def test_two_of_three_classes_by_hand() -> None:
    """6 places over 3 equal classes: 2 holders each, so 2 examples of each, and no two clients alike."""
    made = partition.create("classes", TWELVE, 3, seed=4, p=2)
    assert sorted(counts(made, TWELVE).tolist()) == [[0, 2, 2], [2, 0, 2], [2, 2, 0]]


def test_all_classes_or_one_class_each_by_hand() -> None:
    assert counts(partition.create("classes", TWELVE, 4, p=3), TWELVE).tolist() == [[1, 1, 1]] * 4
    alone = counts(partition.create("classes", TWELVE, 6, p=1), TWELVE)
    assert sorted(alone.tolist()) == sorted([[2, 0, 0], [0, 2, 0], [0, 0, 2]] * 2)


def test_a_large_class_has_more_holders() -> None:
    """8 + 2 + 2 examples over 6 clients of one class each: 4 holders for the first, one for each of the others."""
    toy = labelled([0] * 8 + [1] * 2 + [2] * 2, 3)
    held = counts(partition.create("classes", toy, 6, p=1), toy)
    assert sorted(held.tolist()) == [[0, 0, 2], [0, 2, 0], *[[2, 0, 0]] * 4]


def test_a_class_without_examples_is_nobodys() -> None:
    gap = labelled([0, 0, 3, 3], 5)
    assert counts(partition.create("classes", gap, 2, p=2), gap).tolist() == [[1, 0, 0, 1, 0]] * 2


def test_levelling_by_hand() -> None:
    """Clients 0 and 2 share no class, but client 1 passes on as much as it gets."""
    held = np.array([[5, 0], [1, 4], [0, 1]])  # sizes 5, 5, 1
    level(held)
    # 0 gives 2 of class 0 to 1, which gives 2 of class 1 to 2 (3, 5, 3); then 1 gives one back (4, 4, 3)
    assert held.tolist() == [[4, 0], [2, 2], [0, 3]]


def test_levelling_leaves_what_cannot_be_shared() -> None:
    held = np.array([[9, 0], [1, 0], [0, 1]])
    level(held)
    assert held.tolist() == [[5, 0], [5, 0], [0, 1]]


def test_keys_by_hand() -> None:
    """Keys in order: 2 (3 examples), 4 (1), 5 (6), 9 (2)."""
    made = partition.create("key", TWELVE, None)
    assert [part.tolist() for part in made.indices] == [[6, 7, 8], [11], [0, 1, 2, 3, 4, 5], [9, 10]]
    assert same(made, partition.create("key", TWELVE, 4, seed=9))


def test_fewer_clients_than_keys_by_hand() -> None:
    """6 | 3+2+1 for two clients, 6 | 3 | 2+1 for three: largest first, to whom has least."""
    assert partition.create("key", TWELVE, 2).sizes.tolist() == [6, 6]
    assert sorted(partition.create("key", TWELVE, 3).sizes.tolist()) == [3, 3, 6]
    assert partition.create("key", TWELVE, 1).sizes.tolist() == [12]


def test_which_keys_of_equal_size_go_together_is_random() -> None:
    four = labelled([0] * 4, 1, keys=[1, 2, 3, 4])
    made = [partition.create("key", four, 2, seed=seed).indices for seed in range(40)]
    assert len({frozenset(tuple(part.tolist()) for part in parts) for parts in made}) == 3  # 12|34, 13|24, 14|23


@pytest.mark.parametrize(("kind", "params"), [("dirichlet", {"alpha": 1e12}), ("classes", {"p": 3})])
def test_which_examples_of_a_class_one_gets_is_random(kind: str, params: dict[str, Any]) -> None:
    """One example of each class for each of four clients: client 0 gets each of the 4 examples of class 0 at times."""
    held = [partition.create(kind, TWELVE, 4, seed=seed, **params).indices[0] for seed in range(60)]
    assert {int(part[part % 3 == 0][0]) for part in held} == {0, 3, 6, 9}


# -- what always holds ------------------------------------------------------------------------------------------------


labels = st.lists(st.integers(0, 4), min_size=1, max_size=60)


seeds = st.integers(0, 2**32)


always = settings(deadline=None)  # no test asserts a time


@always
@given(st.data(), labels, seeds)
def test_iid_always(drawn: st.DataObject, y: list[int], seed: int) -> None:
    clients = drawn.draw(st.integers(1, len(y)))
    made = partition.create("iid", labelled(y, 5), clients, seed=seed)
    assert_sound(made, labelled(y, 5), clients)
    assert np.ptp(made.sizes) <= 1


@always
@given(st.data(), labels, st.sampled_from([1e-300, 0.01, 0.1, 1.0, 100.0, 1e308]), seeds)
def test_dirichlet_always(drawn: st.DataObject, y: list[int], alpha: float, seed: int) -> None:
    clients = drawn.draw(st.integers(1, len(y)))
    least = drawn.draw(st.integers(1, len(y) // clients))
    made = partition.create("dirichlet", labelled(y, 5), clients, seed=seed, alpha=alpha, min_size=least)
    assert_sound(made, labelled(y, 5), clients)
    assert made.sizes.min() >= least


@always
@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=8))
def test_filling_up_always(start: list[list[int]]) -> None:
    held = np.array(start)
    least = int(held.sum()) // len(held)  # as much as there can be
    fill(held, least)
    assert held.sum(1).min() >= least
    assert held.min() >= 0
    assert held.sum(0).tolist() == np.array(start).sum(0).tolist()


def possible(y: list[int]) -> list[tuple[int, int]]:
    """All (clients, p) that can be had."""
    totals = np.bincount(y)
    present, pairs = (totals > 0).sum(), itertools.product(range(1, len(y) + 1), range(1, 6))
    return [(n, p) for n, p in pairs if p <= present <= p * n <= np.minimum(totals, n).sum()]


@always
@given(st.data(), labels, seeds)
def test_classes_always(drawn: st.DataObject, y: list[int], seed: int) -> None:
    clients, p = drawn.draw(st.sampled_from(possible(y)))
    toy = labelled(y, 5)
    made = partition.create("classes", toy, clients, seed=seed, p=p)
    assert_sound(made, toy, clients)
    assert ((counts(made, toy) > 0).sum(1) == p).all()


@always
@given(labels)
def test_classes_refuses_all_else(y: list[int]) -> None:
    for clients, p in {*itertools.product(range(1, len(y) + 1), range(1, 6))} - {*possible(y)}:
        with pytest.raises(ParameterError, match=r"^classes: "):
            partition.create("classes", labelled(y, 5), clients, p=p)


@always
@given(st.data(), st.lists(st.integers(-3, 9), min_size=1, max_size=50), seeds)
def test_keys_always(drawn: st.DataObject, keys: list[int], seed: int) -> None:
    clients = drawn.draw(st.integers(1, len(set(keys))))
    toy = labelled([0] * len(keys), 1, keys)
    made = partition.create("key", toy, clients, seed=seed)
    assert_sound(made, toy, clients)
    held = [{keys[example] for example in part} for part in made.indices]
    assert sum(map(len, held)) == len(set(keys))  # no key has two clients


def divisions(total: int, holds: list[bool]) -> list[tuple[int, ...]]:
    """All ways to divide `total` among those who hold, at least one for each."""
    ways = itertools.product(*(range(1, total + 1) if one else (0,) for one in holds))
    return [way for way in ways if sum(way) == total]


def all_sizes(held: Integers) -> set[tuple[int, ...]]:
    """The sizes of clients under every way to divide every class among its holders."""
    found = {(0,) * len(held)}
    for column in held.T:
        ways = divisions(int(column.sum()), (column > 0).tolist())
        found = {tuple(map(sum, zip(sizes, way, strict=True))) for sizes in found for way in ways}
    return found


@always
@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=2, max_size=4))
def test_levelling_is_as_level_as_can_be(start: list[list[int]]) -> None:
    held = np.array(start)
    level(held)
    assert ((held > 0) == (np.array(start) > 0)).all()
    assert held.sum(0).tolist() == np.array(start).sum(0).tolist()
    assert squares(held.sum(1)) == min(squares(np.array(sizes)) for sizes in all_sizes(np.array(start)))
