"""A dataset: examples to train on, examples to test on, and, if the data has one, the key of each example."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from .checks import integer

Features = npt.NDArray[np.float32]
"""Examples along the first axis."""

Integers = npt.NDArray[np.int64]
"""One integer per example: its class, its key or its client."""

Stored = npt.NDArray[Any]
"""Examples as they are stored: float32, or integers that take less memory."""

Labels = npt.NDArray[Any]
"""One label per example: its class as int64, or a float32 number to be predicted."""


@dataclass(frozen=True, eq=False)
class FeatureScale:
    """What a model sees of stored integers: (x - shift) * factor, the same for all or one pair per channel."""

    shift: npt.NDArray[np.float32]
    factor: npt.NDArray[np.float32]

    def __call__(self, x: Stored) -> Features:
        """The examples in float32."""
        scaled: Features = np.subtract(x, self.shift, dtype=np.float32)
        scaled *= self.factor
        return scaled


@dataclass(frozen=True, eq=False)
class Dataset:
    """A problem to learn from examples, checked once and read-only from then on.

    Any real or integer dtype is taken and turned into float32 (examples) or int64 (labels and keys). An array that has
    its dtype already is not copied: the dataset holds a read-only view of it. Two kinds of examples stay
    integers, which take a quarter of the memory or less: those with a `scale` (pixels) and those with a `vocabulary`
    (tokens). So `train_x` and `test_x` are what is stored; `take` and `test_inputs` are what a model is given.
    """

    name: str
    train_x: Stored = field(repr=False)
    train_y: Labels = field(repr=False)
    test_x: Stored = field(repr=False)
    test_y: Labels = field(repr=False)
    classes: int
    keys: Integers | None = field(default=None, repr=False)
    """The key of each training example (its writer, role or turbine), if the data has keys."""
    key_names: tuple[str, ...] | None = field(default=None, repr=False)
    """The names of the keys 0, 1, ..."""
    vocabulary: int | None = field(default=None, repr=False)
    """How many kinds of tokens there are, where the examples are rows of tokens 0, 1, ..."""
    scale: FeatureScale | None = field(default=None, repr=False)
    """How stored integers become the numbers a model sees."""
    regression: bool = field(default=False, repr=False)
    """Whether the labels are numbers to be predicted instead of classes; `classes` is 1 then."""

    def __post_init__(self) -> None:
        self._set("classes", integer(self.classes, f"{self.name}: classes", 1, InputError))
        self._check_kind()
        for part in ("train", "test"):
            self._set(f"{part}_x", self._examples(getattr(self, f"{part}_x"), f"{self.name}: {part}_x"))
            self._set(f"{part}_y", self._labels(getattr(self, f"{part}_y"), f"{self.name}: {part}_y"))
            self._check_part(part)
        if self.train_x.shape[1:] != self.test_x.shape[1:]:
            raise InputError(
                f"{self.name}: training examples have shape {self.train_x.shape[1:]} and test examples "
                f"{self.test_x.shape[1:]}; expected the same"
            )
        if self.keys is not None:
            self._set("keys", _integers(self.keys, f"{self.name}: keys"))
            _same_length(self.keys, self.train_x, f"{self.name}: keys", "train_x")
        self._check_key_names()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return self.train_x.shape[1:]

    def take(self, rows: Integers | slice) -> Stored:
        """The training examples of those rows as a model is given them: float32, or integers if they are tokens."""
        examples = self.train_x[rows]
        return examples if self.scale is None else self.scale(examples)

    @cached_property
    def test_inputs(self) -> Stored:
        """All test examples as a model is given them; scaled when first asked for, and kept."""
        return self.test_x if self.scale is None else frozen(self.scale(self.test_x))

    def _examples(self, value: Any, what: str) -> Stored:
        if self.scale is None and self.vocabulary is None:
            return _features(value, what)
        array = _array(value, what, "iu", "integers")
        _check_shape(array, what)
        if self.vocabulary is not None and array.size and np.iinfo(array.dtype).max >= self.vocabulary:
            low, high = int(array.min()), int(array.max())
            if low < 0 or high >= self.vocabulary:
                wrong = low if low < 0 else high
                raise InputError(f"{what} has the token {wrong}; expected 0 to {self.vocabulary - 1}")
        return frozen(np.ascontiguousarray(array))

    def _labels(self, value: Any, what: str) -> Labels:
        if not self.regression:
            return _integers(value, what)
        array = _array(value, what, "fiu", "numbers")
        if array.ndim != 1:
            raise InputError(f"{what} has shape {array.shape}; expected one number per example")
        return frozen(_finite(array, what))

    def _check_kind(self) -> None:
        if self.vocabulary is not None:
            self._set("vocabulary", integer(self.vocabulary, f"{self.name}: vocabulary", 1, InputError))
        if self.vocabulary is not None and self.scale is not None:
            raise InputError(f"{self.name}: has both a vocabulary and a scale; expected tokens or pixels, not both")
        if self.regression and self.classes != 1:
            raise InputError(f"{self.name}: classes={self.classes} of a regression is not valid; expected 1")

    def _check_part(self, part: str) -> None:
        x, y = getattr(self, f"{part}_x"), getattr(self, f"{part}_y")
        _same_length(y, x, f"{self.name}: {part}_y", f"{part}_x")
        if not len(y):
            raise InputError(f"{self.name}: {part}_x has no examples; expected at least one")
        if not self.regression:
            check_labels(y, self.classes, f"{self.name}: {part}_y")

    def _check_key_names(self) -> None:
        if self.key_names is None:
            return
        self._set("key_names", tuple(self.key_names))
        if self.keys is None or self.keys.min() < 0 or self.keys.max() >= len(self.key_names):
            raise InputError(f"{self.name}: key_names has {len(self.key_names)} names; expected one for every key")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen; only its own checks replace a field


def check_labels(labels: Integers, classes: int, what: str) -> None:
    """Labels must be 0 .. classes-1."""
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        raise InputError(f"{what} has the label {labels[wrong][0]}; expected 0 to {classes - 1}")


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A read-only view; the array itself stays writable if it was."""
    view = array.view()
    view.flags.writeable = False
    return view


def _features(value: Any, what: str) -> Features:
    array = _array(value, what, "fiub", "numbers")
    _check_shape(array, what)
    return frozen(_finite(array, what))


def _check_shape(array: npt.NDArray[Any], what: str) -> None:
    if array.ndim < 2 or not all(array.shape[1:]):
        raise InputError(
            f"{what} has shape {array.shape}; expected (examples, features, ...) with at least one feature"
        )


def _finite(array: npt.NDArray[Any], what: str) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what overflows float32 becomes infinite and is refused on the next line
        numbers = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(numbers).all():
        raise InputError(f"{what} has values that are not finite in float32; expected finite numbers only")
    return numbers


def _integers(value: Any, what: str) -> Integers:
    array = _array(value, what, "iu", "integers")
    if array.ndim != 1:
        raise InputError(f"{what} has shape {array.shape}; expected one integer per example")
    return frozen(np.ascontiguousarray(array, np.int64))


def _array(value: Any, what: str, kinds: str, expected: str) -> npt.NDArray[Any]:
    if not isinstance(value, np.ndarray):
        raise InputError(f"{what} is a {type(value).__name__}; expected a NumPy array of {expected}")
    if value.dtype.kind not in kinds:
        raise InputError(f"{what} has dtype {value.dtype}; expected {expected}")
    return value


def _same_length(array: npt.NDArray[Any], other: npt.NDArray[Any], what: str, whose: str) -> None:
    if len(array) != len(other):
        raise InputError(f"{what} has {len(array)} entries and {whose} has {len(other)}; expected as many")
