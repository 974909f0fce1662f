"""Datasets: what they are, what they refuse, and how they are found by name."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aflock import data, rng
from aflock.data import Dataset, FeatureScale
from aflock.data.splits.holdout import stratified
from aflock.errors import AflockError, InputError, ParameterError, UnknownName, UnknownParameter
from aflock.params import Params, whole


def tiny(**changes: Any) -> Dataset:
    """Four examples to train on, two to test on, two features, three classes."""
    parts: dict[str, Any] = {
        "name": "tiny",
        "train_x": np.arange(8, dtype=np.float32).reshape(4, 2),
        "train_y": np.array([0, 1, 2, 1]),
        "test_x": np.zeros((2, 2), np.float32),
        "test_y": np.array([2, 0]),
        "classes": 3,
    }
    return Dataset(**(parts | changes))


# -- what a dataset is ------------------------------------------------------------------------------------------------


def test_a_dataset_holds_what_it_was_given() -> None:
    made = tiny(keys=np.array([7, 7, 9, 9]))
    assert made.train_x.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert made.train_y.tolist() == [0, 1, 2, 1]
    assert made.keys is not None
    assert made.keys.tolist() == [7, 7, 9, 9]
    assert made.shape == (2,)
    assert repr(made) == "Dataset(name='tiny', classes=3)"


def test_dtypes_are_float32_and_int64_whatever_came() -> None:
    made = tiny(
        train_x=np.ones((4, 2), np.uint8), test_x=np.ones((2, 2)), train_y=np.array([0, 1, 2, 1], np.int8),
        keys=np.zeros(4, np.uint16), classes=np.int64(3),
    )  # fmt: skip
    assert [made.train_x.dtype, made.test_x.dtype] == [np.float32] * 2
    assert made.keys is not None
    assert [made.train_y.dtype, made.test_y.dtype, made.keys.dtype] == [np.int64] * 3
    assert type(made.classes) is int


def test_a_dataset_is_read_only_and_the_givers_array_is_not() -> None:
    mine = np.zeros((4, 2), np.float32)
    made = tiny(train_x=mine, keys=np.zeros(4, np.int64))
    for array in (made.train_x, made.train_y, made.test_x, made.test_y, made.keys):
        assert array is not None
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(FrozenInstanceError):
        made.classes = 4  # type: ignore[misc]
    assert np.shares_memory(made.train_x, mine)
    mine[0] = 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_x": [[0.0, 1.0]] * 4}, "tiny: train_x is a list; expected a NumPy array of numbers"),
        ({"train_x": np.array([["a", "b"]] * 4)}, "tiny: train_x has dtype <U1; expected numbers"),
        ({"train_x": np.ones((4, 2), complex)}, "tiny: train_x has dtype complex128; expected numbers"),
        ({"train_x": np.ones(4)}, "tiny: train_x has shape (4,); expected (examples, features, ...)"),
        ({"train_x": np.ones((4, 0))}, "tiny: train_x has shape (4, 0); expected (examples, features, ...)"),
        ({"train_x": np.full((4, 2), np.nan)}, "tiny: train_x has values that are not finite in float32"),
        ({"test_x": np.full((2, 2), 1e39)}, "tiny: test_x has values that are not finite in float32"),
        (
            {"test_x": np.ones((2, 3))},
            "tiny: training examples have shape (2,) and test examples (3,); expected the same",
        ),
        ({"train_y": np.array([0, 1, 2])}, "tiny: train_y has 3 entries and train_x has 4; expected as many"),
        ({"train_y": np.array([0.0, 1, 2, 1])}, "tiny: train_y has dtype float64; expected integers"),
        ({"train_y": np.zeros((4, 1), int)}, "tiny: train_y has shape (4, 1); expected one integer per example"),
        ({"train_y": np.array([0, 1, 3, 1])}, "tiny: train_y has the label 3; expected 0 to 2"),
        ({"test_y": np.array([0, -1])}, "tiny: test_y has the label -1; expected 0 to 2"),
        (
            {"test_x": np.ones((0, 2)), "test_y": np.zeros(0, int)},
            "tiny: test_x has no examples; expected at least one",
        ),
        ({"keys": np.array([1, 2])}, "tiny: keys has 2 entries and train_x has 4; expected as many"),
        ({"keys": np.array(["a", "b", "c", "d"])}, "tiny: keys has dtype <U1; expected integers"),
        ({"classes": 0}, "tiny: classes=0 is not valid; expected an integer of at least 1"),
        ({"classes": 3.0}, "tiny: classes=3.0 is not valid; expected an integer of at least 1"),
        ({"classes": True}, "tiny: classes=True is not valid; expected an integer of at least 1"),
    ],
)
def test_what_a_dataset_refuses(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        tiny(**changes)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


# -- examples that stay integers, and labels that are numbers ---------------------------------------------------------


def test_pixels_stay_bytes_and_are_scaled_when_taken() -> None:
    pixels = np.array([[0, 255], [51, 102], [255, 0], [10, 20]], np.uint8)
    scale = FeatureScale(np.array([0, 102], np.float32), np.array([1 / 255, 0.5], np.float32))
    made = tiny(train_x=pixels, test_x=pixels[:2], scale=scale)
    assert made.train_x.dtype == made.test_x.dtype == np.uint8
    assert np.shares_memory(made.train_x, pixels)
    taken = made.take(np.array([2, 0]))
    assert taken.dtype == np.float32
    assert taken.tolist() == [[1.0, -51.0], [0.0, 76.5]]
    assert made.take(slice(1, 2)) == pytest.approx(np.array([[0.2, 0.0]]), abs=1e-7)
    assert made.test_inputs.tolist() == made.take(slice(0, 2)).tolist()
    assert made.test_inputs is made.test_inputs
    with pytest.raises(ValueError, match="read-only"):
        made.test_inputs[0] = 0


def test_tokens_stay_the_integers_they_are() -> None:
    tokens = np.array([[0, 9]] * 4, np.int32)
    made = tiny(train_x=tokens, test_x=tokens[:2], vocabulary=np.int64(10))
    assert made.vocabulary == 10
    assert made.take(np.array([1])).dtype == np.int32
    assert made.test_inputs is made.test_x


def test_plain_examples_are_taken_as_they_are() -> None:
    made = tiny()
    assert made.take(np.array([3, 1])).tolist() == [[6, 7], [2, 3]]
    assert made.test_inputs is made.test_x


def test_numbers_to_predict() -> None:
    made = tiny(train_y=np.array([0.5, 1.5, -2.0, 1e9]), test_y=np.array([1, 2]), classes=1, regression=True)
    assert made.train_y.dtype == made.test_y.dtype == np.float32
    assert made.train_y.tolist() == [0.5, 1.5, -2.0, 1e9]


def test_keys_have_names() -> None:
    assert tiny(keys=np.array([1, 0, 1, 1]), key_names=["a", "b"]).key_names == ("a", "b")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocabulary": 3}, "tiny: train_x has dtype float32; expected integers"),
        (
            {"vocabulary": 7, "train_x": np.full((4, 2), 7)},
            "tiny: train_x has the token 7; expected 0 to 6",
        ),
        (
            {"vocabulary": 7, "train_x": np.full((4, 2), -1)},
            "tiny: train_x has the token -1; expected 0 to 6",
        ),
        (
            {"vocabulary": 7, "train_x": np.full(4, 1)},
            "tiny: train_x has shape (4,); expected (examples, features, ...",
        ),
        ({"vocabulary": 0}, "tiny: vocabulary=0 is not valid; expected an integer of at least 1"),
        (
            {"vocabulary": 7, "scale": FeatureScale(np.zeros(1, np.float32), np.ones(1, np.float32))},
            "tiny: has both a vocabulary and a scale; expected tokens or pixels, not both",
        ),
        ({"regression": True}, "tiny: classes=3 of a regression is not valid; expected 1"),
        (
            {"regression": True, "classes": 1, "train_y": np.array([0, 1, np.nan, 2])},
            "tiny: train_y has values that are not finite in float32",
        ),
        (
            {"regression": True, "classes": 1, "train_y": np.zeros((4, 1))},
            "tiny: train_y has shape (4, 1); expected one number per example",
        ),
        ({"key_names": ["a"]}, "tiny: key_names has 1 names; expected one for every key"),
        (
            {"key_names": ["a"], "keys": np.array([0, 0, 1, 0])},
            "tiny: key_names has 1 names; expected one for every key",
        ),
    ],
)
def test_what_is_refused_of_them(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        tiny(**changes)
    assert str(caught.value).startswith(said)


# -- the examples kept for testing ------------------------------------------------------------------------------------


def test_every_class_gives_its_share_of_test_examples() -> None:
    labels = np.array([0] * 8 + [1] * 4 + [2] * 1)
    train, test = stratified(labels, 0.25, rng.stream(1, "x"))
    assert np.bincount(labels[test], minlength=3).tolist() == [2, 1, 0]
    assert np.bincount(labels[train], minlength=3).tolist() == [6, 3, 1]


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.floats(0.01, 0.99), st.integers(0, 99))
def test_training_and_test_examples_are_all_examples_once(labels: list[int], fraction: float, seed: int) -> None:
    y = np.array(labels)
    train, test = stratified(y, fraction, rng.stream(seed, "x"))
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(len(y)))
    assert train.tolist() == sorted(train.tolist())
    assert test.tolist() == sorted(test.tolist())
    for label in set(labels):
        kept, total = int((y[test] == label).sum()), labels.count(label)
        assert kept == min(max(round(total * fraction), 1), total - 1)


# -- digits -----------------------------------------------------------------------------------------------------------


def test_digits_are_the_ones_scikit_learn_ships() -> None:
    made = data.load("digits")
    assert made.train_x.shape == (1438, 64)
    assert made.test_x.shape == (359, 64)
    assert made.classes == 10
    assert made.keys is None
    every = np.concatenate([made.train_x, made.test_x])
    assert every.min() == 0
    assert every.max() == 1
    assert (every * 16).sum() == 561_718  # the sum of all grey values of load_digits
    totals = np.bincount(np.concatenate([made.train_y, made.test_y]))
    assert totals.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.bincount(made.test_y).tolist() == [round(0.2 * total) for total in totals]


def test_the_share_kept_for_testing_is_a_parameter() -> None:
    assert abs(len(data.load("digits", test_fraction=0.5).test_y) - 1797 / 2) <= 5


@pytest.mark.parametrize(("name", "params"), [("digits", {}), ("synthetic", {"examples": 60, "classes": 3})])
def test_a_seed_is_a_dataset(name: str, params: dict[str, Any]) -> None:
    one, same, other = (data.load(name, seed=seed, **params) for seed in (1, 1, 2))
    for part in ("train_x", "train_y", "test_x", "test_y"):
        assert np.array_equal(getattr(one, part), getattr(same, part))
    assert not np.array_equal(one.train_x, other.train_x)


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(AflockError, match=r"the digits come with scikit-learn.*; pip install scikit-learn$") as caught:
        data.load("digits")
    assert "\n" not in str(caught.value)


def test_the_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    raw, made = load_digits(), data.load("digits")
    pixels, labels = np.concatenate([made.train_x, made.test_x]), np.concatenate([made.train_y, made.test_y])
    table = np.column_stack([16 * pixels, labels])
    assert sorted(table.tolist()) == sorted(np.column_stack([raw.data, raw.target]).tolist())


def test_nobody_waits_for_scikit_learn_who_does_not_need_it() -> None:
    code = "import sys, aflock.data as d; d.load('synthetic'); d.entries(); sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], check=False).returncode == 0


# -- synthetic --------------------------------------------------------------------------------------------------------


def test_blobs_have_the_shape_asked_for() -> None:
    made = data.load("synthetic", examples=100, features=5, classes=4, test_fraction=0.2)
    assert made.train_x.shape == (80, 5)
    assert np.bincount(made.train_y).tolist() == [20] * 4
    assert np.bincount(made.test_y).tolist() == [5] * 4


def test_blobs_are_unit_gaussians_at_the_distance_asked_for() -> None:
    made = data.load("synthetic", seed=3, examples=40_000, features=3, classes=2, separation=4.0)
    for label in range(2):
        blob = made.train_x[made.train_y == label].astype(np.float64)  # 16,000 of them: a mean is off by 0.008 or so
        assert np.linalg.norm(blob.mean(0)) == pytest.approx(4.0, abs=0.04)
        assert np.cov(blob.T) == pytest.approx(np.eye(3), abs=0.05)


def test_separation_makes_blobs_easier() -> None:
    def accuracy(separation: float) -> float:
        made = data.load("synthetic", seed=1, examples=2000, features=10, classes=4, separation=separation)
        centres = np.stack([made.train_x[made.train_y == label].mean(0) for label in range(4)])
        nearest = ((made.test_x[:, None] - centres) ** 2).sum(2).argmin(1)
        return float((nearest == made.test_y).mean())

    assert accuracy(0.0) < 0.35
    assert accuracy(5.0) > 0.95


def test_as_many_blobs_as_two_examples_each_allow() -> None:
    made = data.load("synthetic", examples=6, classes=3, features=1)
    assert sorted(made.train_y.tolist()) == sorted(made.test_y.tolist()) == [0, 1, 2]
    with pytest.raises(ParameterError, match="examples=5 is too few to train and test 3 classes; expected at least 6"):
        data.load("synthetic", examples=5, classes=3)


# -- by name ----------------------------------------------------------------------------------------------------------


def test_names_and_descriptions() -> None:
    assert {"digits", "synthetic"} <= set(data.names())
    described = [entry.describe() for entry in data.entries()]
    assert json.loads(json.dumps(described)) == described
    assert [one["name"] for one in described] == data.names()
    digits = data.get("digits").describe()
    assert digits["module"] == "aflock.data.datasets.digits"
    assert [one["name"] for one in digits["parameters"]] == ["test_fraction"]
    assert all(one["source"] and one["description"] for one in described)


@pytest.mark.parametrize(
    ("name", "params", "error", "said"),
    [
        ("digit", {}, UnknownName, "there is no dataset called 'digit'; did you mean 'digits'?"),
        ("digits", {"test_fractoin": 0.1}, UnknownParameter, "did you mean 'test_fraction'?"),
        (
            "digits",
            {"test_fraction": 0.0},
            ParameterError,
            "test_fraction=0.0 is not valid; expected a number in (0, 1)",
        ),
        ("digits", {"test_fraction": 1}, ParameterError, "test_fraction=1 is not valid"),
        ("digits", {"seed": "one"}, ParameterError, "seed='one' is not valid; expected an integer"),
        ("digits", {"seed": 1.5}, ParameterError, "seed=1.5 is not valid; expected an integer"),
        ("synthetic", {"examples": 1}, ParameterError, "examples=1 is not valid; expected an integer of at least 2"),
        ("synthetic", {"features": 0}, ParameterError, "features=0 is not valid"),
        ("synthetic", {"classes": 0}, ParameterError, "classes=0 is not valid"),
        ("synthetic", {"separation": -1.0}, ParameterError, "separation=-1.0 is not valid"),
    ],
)
def test_what_load_refuses(name: str, params: dict[str, Any], error: type[InputError], said: str) -> None:
    with pytest.raises(error) as caught:
        data.load(name, **params)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@dataclass(frozen=True)
class CoinParams(Params):
    tosses: int = whole(4, "how many")


def test_ones_own_dataset_is_a_function_registered_by_name() -> None:
    @data.register("coins", source="my desk", description="heads or tails", params=CoinParams)
    def coins(params: CoinParams, seed: int) -> Dataset:
        y = np.arange(params.tosses) % 2
        x = np.full((len(y), 1), seed, np.float32)
        return Dataset("coins", x, y, x[:1], y[:1], 2)

    assert "coins" in data.names()
    assert data.load("coins", seed=5, tosses=3).train_x.tolist() == [[5], [5], [5]]
    with pytest.raises(ParameterError, match="a dataset called 'coins' is registered already"):
        data.register("coins", source="", description="", params=CoinParams)(coins)


def test_a_loader_must_return_a_dataset() -> None:
    wrong: Any = lambda params, seed: [1, 2]  # noqa: E731
    data.register("wrong", source="", description="", params=Params)(wrong)
    with pytest.raises(InputError, match="the loader of 'wrong' returned a list; expected a Dataset"):
        data.load("wrong")
