"""Who holds which example: numbers to check by hand, and what holds for every split."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aflock import data, rng
from aflock.data import Dataset, Partition, partition
from aflock.data.base import Integers
from aflock.data.splits.dirichlet import DirichletParams, _best_draw, _draw, fill
from aflock.data.splits.level import level
from aflock.errors import InputError, ParameterError, UnknownName, UnknownParameter
from aflock.params import Params


def labelled(labels: list[int] | Integers, classes: int, keys: list[int] | None = None) -> Dataset:
    """A dataset of which only labels and keys matter."""
    y = np.asarray(labels, np.int64)
    x, owners = np.zeros((len(y), 1), np.float32), None if keys is None else np.array(keys)
    return Dataset("toy", x, y, x[:1], y[:1], classes, owners)


TWELVE = labelled([0, 1, 2] * 4, 3, keys=[5] * 6 + [2] * 3 + [9] * 2 + [4])
"""12 examples, 4 of each of 3 classes, of 4 people with 6, 3, 2 and 1 examples."""


def counts(made: Partition, dataset: Dataset) -> Integers:
    return made.counts(dataset.train_y, dataset.classes)


def same(one: Partition, other: Partition) -> bool:
    return [part.tolist() for part in one.indices] == [part.tolist() for part in other.indices]


def squares(sizes: Integers) -> int:
    return int((sizes**2).sum())


def assert_sound(made: Partition, dataset: Dataset, clients: int) -> None:
    """Every example once, every client's sorted, nobody without any."""
    assert len(made.indices) == clients
    assert sorted(np.concatenate(made.indices).tolist()) == list(range(len(dataset.train_y)))
    assert all(len(part) and part.dtype == np.int64 and (np.diff(part) > 0).all() for part in made.indices)


# -- what a partition is ----------------------------------------------------------------------------------------------

BY_HAND = Partition((np.array([4, 0, 2]), np.array([1]), np.array([3, 5])))
LABELS = np.array([0, 1, 0, 2, 2, 2])


def test_indices_are_sorted_and_read_only() -> None:
    assert [part.tolist() for part in BY_HAND.indices] == [[0, 2, 4], [1], [3, 5]]
    assert BY_HAND.sizes.tolist() == [3, 1, 2]
    for part in BY_HAND.indices:
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 7


def test_counts_by_hand() -> None:
    assert BY_HAND.counts(LABELS, 4).tolist() == [[2, 0, 1, 0], [0, 1, 0, 0], [0, 0, 2, 0]]


def test_table_by_hand() -> None:
    assert BY_HAND.table(LABELS, 4).splitlines() == [
        "client  examples  class:examples",
        "     0         3  0:2 2:1",
        "     1         1  1:1",
        "     2         2  2:2",
        "3 clients hold 6 examples: 1 to 3 (mean 2.0) each, of 1 to 2 (mean 1.3) of the 4 classes",
    ]


@pytest.mark.parametrize(("clients", "lines"), [(40, 40), (41, 41), (100, 41)])
def test_a_long_table_shows_both_ends(clients: int, lines: int) -> None:
    made = Partition(tuple(np.array([client]) for client in range(clients)))
    head, *rows, summary = made.table(np.zeros(clients, np.int64), 1).splitlines()
    assert head.startswith("client")
    assert summary.startswith(f"{clients} clients hold {clients} examples")
    assert len(rows) == lines
    shown = [int(row.split()[0]) for row in rows if "..." not in row]
    assert shown == ([*range(40)] if clients == 40 else [*range(20), *range(clients - 20, clients)])
    if clients == 100:
        assert rows[20] == "   ...  (60 more clients)"


def test_a_wide_row_shows_the_largest_classes() -> None:
    labels = np.repeat(np.arange(12), np.arange(1, 13))
    row = Partition((np.arange(len(labels)),)).table(labels, 12).splitlines()[1]
    assert row == "     0        78  11:12 10:11 9:10 8:9 7:8 6:7 5:6 4:5 3:4 2:3 and 2 more"


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        ([], "a partition has no clients; expected at least one"),
        ([[0], []], "client 1 has no examples; every client needs at least one"),
        ([[0, 1], [1]], "a partition must hold each of the examples 0 to 2 exactly once"),
        ([[0], [2]], "a partition must hold each of the examples 0 to 1 exactly once"),
        ([[-1], [0]], "a partition must hold each of the examples 0 to 1 exactly once"),
        ([[0.0], [1.0]], "a partition must hold each of the examples 0 to 1 exactly once"),
    ],
)
def test_what_a_partition_refuses(indices: list[list[Any]], said: str) -> None:
    with pytest.raises(InputError, match=f"^{said}$"):
        Partition(tuple(np.array(part) for part in indices))


def test_counts_refuse_labels_of_another_dataset() -> None:
    with pytest.raises(InputError, match="labels has shape \\(5,\\); expected one for each of the 6 examples"):
        BY_HAND.counts(LABELS[:5], 3)
    with pytest.raises(InputError, match="labels has the label 2; expected 0 to 1"):
        BY_HAND.table(LABELS, 2)


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
    drawn = _draw(np.full(4000, 7), 8, alpha, rng.stream(1, "x"))
    assert ((drawn > 0).sum(0) == 1).mean() > 0.95
    owners = np.bincount(drawn.argmax(0), minlength=8)
    assert ((owners - 500) ** 2 / 500).sum() < 24.3  # 0.999 quantile of chi-square with 7 degrees


def test_dirichlet_columns_sum_to_the_classes() -> None:
    for seed in range(50):
        drawn = _draw(np.array([5, 0, 7]), 6, 0.3, rng.stream(seed, "x"))
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
    best = _best_draw(totals, 10, params, rng.stream(3, "x"))
    again = rng.stream(3, "x")
    tries = [_draw(totals, 10, 0.05, again) for _ in range(10)]
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


# -- seeds ------------------------------------------------------------------------------------------------------------

KINDS: list[tuple[str, int, dict[str, Any]]] = [
    ("iid", 4, {}),
    ("dirichlet", 4, {"alpha": 0.5}),
    ("classes", 4, {"p": 2}),
    ("key", 3, {}),
]


@pytest.mark.parametrize(("kind", "clients", "params"), KINDS)
def test_seeds_reproduce_and_differ(kind: str, clients: int, params: dict[str, Any]) -> None:
    made = [partition.create(kind, TWELVE, clients, seed=seed, **params) for seed in (1, 1, 2, 3, 4, 5)]
    assert same(made[0], made[1])
    assert not all(same(made[0], other) for other in made[2:])


def test_nothing_depends_on_or_disturbs_global_randomness() -> None:
    np.random.seed(1)  # noqa: NPY002
    before = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    one = partition.create("dirichlet", TWELVE, 4, seed=7)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]  # noqa: NPY002
    np.random.seed(2)  # noqa: NPY002
    assert same(one, partition.create("dirichlet", TWELVE, 4, seed=7))


# -- real data --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_split_of_the_demo(seed: int) -> None:
    """Digits over 40 clients with alpha 0.1, at least 10 each: one-sided, and still everybody has enough."""
    digits = data.load("digits", seed=seed)
    made = partition.create("dirichlet", digits, 40, seed=seed, alpha=0.1, min_size=10)
    assert_sound(made, digits, 40)
    assert made.sizes.min() >= 10
    held = counts(made, digits)
    assert np.median(held.max(1) / held.sum(1)) > 0.5  # half of the clients hold mostly one class


def test_smaller_alpha_is_more_one_sided() -> None:
    digits = data.load("digits")

    def sidedness(alpha: float) -> float:
        held = counts(partition.create("dirichlet", digits, 20, seed=1, alpha=alpha), digits)
        return float((held.max(1) / held.sum(1)).mean())

    found = [sidedness(alpha) for alpha in (0.05, 0.3, 2.0, 100.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.6
    assert found[-1] < 0.2


def test_dirichlet_proportions_have_the_variance_of_the_distribution() -> None:
    """q_i of Dir(a*1_n) has mean 1/n and variance (n-1) / (n^2 (n*a + 1)): 4/25/2 = 0.08 for n=5, a=0.2."""
    drawn = np.stack([_draw(np.array([10_000]), 5, 0.2, rng.stream(seed, "x"))[:, 0] for seed in range(2000)]) / 10_000
    assert drawn.mean(0) == pytest.approx(np.full(5, 0.2), abs=0.03)  # the standard error is 0.006
    assert drawn.var(0) == pytest.approx(np.full(5, 0.08), abs=0.012)


def test_digits_by_classes_are_of_equal_size() -> None:
    digits = data.load("digits")
    made = partition.create("classes", digits, 40, seed=1, p=2)
    assert ((counts(made, digits) > 0).sum(1) == 2).all()
    assert np.ptp(made.sizes) <= 1


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "clients", "params", "said"),
    [
        ("iid", 0, {}, "clients=0 is not valid; expected an integer of at least 1"),
        ("iid", -3, {}, "clients=-3 is not valid; expected an integer of at least 1"),
        ("iid", 2.0, {}, "clients=2.0 is not valid; expected an integer of at least 1"),
        ("iid", True, {}, "clients=True is not valid; expected an integer of at least 1"),
        ("iid", None, {}, "iid: clients=None is not valid; expected a number of clients"),
        ("iid", 13, {}, "clients=13 is more than the 12 training examples of 'toy'; use at most 12 clients"),
        ("iid", 3, {"seed": None}, "seed=None is not valid; expected an integer"),
        ("dirichlet", 3, {"alpha": 0}, "dirichlet: alpha=0 is not valid; expected a positive number"),
        ("dirichlet", 3, {"alpha": -0.1}, "dirichlet: alpha=-0.1 is not valid; expected a positive number"),
        ("dirichlet", 3, {"alpha": float("nan")}, "dirichlet: alpha=nan is not valid; expected a positive number"),
        ("dirichlet", 3, {"alpha": float("inf")}, "dirichlet: alpha=inf is not valid; expected a positive number"),
        ("dirichlet", 3, {"min_size": 0}, "dirichlet: min_size=0 is not valid; expected an integer of at least 1"),
        (
            "dirichlet", 3, {"min_size": 5},
            "dirichlet: 3 clients with min_size=5 need 15 examples and 'toy' has 12; lower min_size or clients",
        ),
        ("classes", 3, {"p": 0}, "classes: p=0 is not valid; expected an integer of at least 1"),
        ("classes", 3, {"p": 4}, "classes: p=4 is more than the 3 classes in the data; lower p to 3"),
        (
            "classes", 2, {"p": 1},
            "classes: 2 clients of p=1 classes leave some of the 3 classes without a client; "
            "use at least 3 clients or raise p to 2",
        ),
        (
            "classes", 7, {"p": 2},
            "classes: the classes have too few examples for 7 clients of exactly p=2 classes each; "
            "use fewer clients or a smaller p",
        ),
        ("key", 5, {}, "key: clients=5 is more than the 4 keys of 'toy'; use at most 4 clients"),
    ],
)  # fmt: skip
def test_impossible_values(kind: str, clients: Any, params: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError) as caught:
        partition.create(kind, TWELVE, clients, **params)
    assert str(caught.value) == said


@pytest.mark.parametrize("clients", [None, 2])
def test_no_keys_in_the_data(clients: int | None) -> None:
    with pytest.raises(ParameterError, match=r"^key: the dataset 'toy' has no keys; choose another partition for it$"):
        partition.create("key", labelled([0, 1], 2), clients)


@pytest.mark.parametrize("kind", ["classes", "dirichlet"])
def test_numbers_are_no_classes(kind: str) -> None:
    x, y = np.zeros((4, 1), np.float32), np.array([0.5, 1.0, 1.5, 2.0])
    numbers = Dataset("toy", x, y, x, y, 1, keys=np.array([0, 0, 1, 1]), regression=True)
    with pytest.raises(ParameterError, match=f"^{kind}: the labels of 'toy' are numbers, not classes; use iid or key$"):
        partition.create(kind, numbers, 2)
    assert partition.create("iid", numbers, 2).sizes.tolist() == [2, 2]
    by_key = partition.create("key", numbers, None)
    assert [part.tolist() for part in by_key.indices] == [[0, 1], [2, 3]]
    with pytest.raises(InputError, match="labels has dtype float32; only classes can be counted"):
        by_key.counts(numbers.train_y, 1)


def test_wrong_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="no partition called 'dirichlt'; did you mean 'dirichlet'"):
        partition.create("dirichlt", TWELVE, 3)
    with pytest.raises(UnknownParameter, match="dirichlet has no parameter 'alhpa'; did you mean 'alpha'"):
        partition.create("dirichlet", TWELVE, 3, alhpa=1.0)
    with pytest.raises(UnknownParameter, match="iid has no parameter 'alpha'; it takes none"):
        partition.create("iid", TWELVE, 3, alpha=1.0)


# -- by name ----------------------------------------------------------------------------------------------------------


def test_names_and_descriptions() -> None:
    assert {"classes", "dirichlet", "iid", "key"} <= set(partition.names())
    described = [entry.describe() for entry in partition.entries()]
    assert json.loads(json.dumps(described)) == described
    assert all(one["source"] and one["description"] for one in described)
    assert [one["name"] for one in described if one["keyed"]] == ["key"]
    dirichlet = partition.get("dirichlet").describe()
    assert [one["name"] for one in dirichlet["parameters"]] == ["alpha", "min_size"]
    assert dirichlet["module"] == "aflock.data.splits.dirichlet"


@pytest.mark.parametrize(
    ("owners", "said"),
    [
        ([0] * 11, "partition 'mine' did not name one client for each of the 12 examples"),
        ([0.5] * 12, "partition 'mine' did not name one client for each of the 12 examples"),
        ([0] * 11 + [2], "partition 'mine' named a client outside 0 to 1"),
        ([0] * 11 + [-1], "partition 'mine' named a client outside 0 to 1"),
        ([0] * 12, "partition 'mine' left client 1 without examples; use fewer clients"),
    ],
)
def test_ones_own_split_is_checked(monkeypatch: pytest.MonkeyPatch, owners: list[float], said: str) -> None:
    monkeypatch.setattr(partition._ENTRIES, "_items", {})
    answer: Any = owners

    @partition.register("mine", source="me", description="as given", params=Params)
    def mine(dataset: Dataset, clients: int, params: Params, draws: np.random.Generator) -> Integers:
        return np.array(answer)

    with pytest.raises(InputError, match=f"^{said}$"):
        partition.create("mine", TWELVE, 2)
    answer = [0, 1] * 6
    assert [part.tolist() for part in partition.create("mine", TWELVE, 2).indices] == [
        [*range(0, 12, 2)],
        [*range(1, 12, 2)],
    ]
