"""Who holds which example: the table, seeds, real data, bad input, splits by name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from aflock import data, rng
from aflock.data import Dataset, Partition, partition
from aflock.data.base import Integers
from aflock.data.splits.dirichlet import draw
from aflock.errors import InputError, ParameterError, UnknownName, UnknownParameter
from aflock.params import Params
from tests.data.labelled import TWELVE, assert_sound, counts, labelled, same

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
    drawn = np.stack([draw(np.array([10_000]), 5, 0.2, rng.stream(seed, "x"))[:, 0] for seed in range(2000)]) / 10_000
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


@pytest.fixture(scope="module")
def mine() -> list[float]:
    """The owners that the split "mine" names from now on."""
    owners: list[Any] = []

    @partition.register("mine", source="me", description="as given", params=Params)
    def mine(dataset: Dataset, clients: int, params: Params, draws: np.random.Generator) -> Integers:
        return np.array(owners)

    return owners


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
def test_ones_own_split_is_checked(mine: list[float], owners: list[float], said: str) -> None:
    mine[:] = owners
    with pytest.raises(InputError, match=f"^{said}$"):
        partition.create("mine", TWELVE, 2)
    mine[:] = [0, 1] * 6
    assert [part.tolist() for part in partition.create("mine", TWELVE, 2).indices] == [
        [*range(0, 12, 2)],
        [*range(1, 12, 2)],
    ]
