"""What a dataset is: examples to train on, examples to test on, and perhaps to whom each belongs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from .checks import integer

Features = npt.NDArray[np.float32]
"""Examples along the first axis."""

Integers = npt.NDArray[np.int64]
"""One integer per example: its class, its key or its client."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """A classification problem, checked once and read-only from then on.

    Any real or integer dtype is taken and turned into float32 (examples) or int64 (labels and keys). An array that has
    its dtype already is not copied: the dataset looks at it through a read-only view.
    """

    name: str
    train_x: Features = field(repr=False)
    train_y: Integers = field(repr=False)
    test_x: Features = field(repr=False)
    test_y: Integers = field(repr=False)
    classes: int
    keys: Integers | None = field(default=None, repr=False)
    """To whom each training example belongs by nature (a writer, a role, a turbine), where the data says so."""

    def __post_init__(self) -> None:
        self._set("classes", integer(self.classes, f"{self.name}: classes", 1, InputError))
        for part in ("train", "test"):
            self._set(f"{part}_x", _features(getattr(self, f"{part}_x"), f"{self.name}: {part}_x"))
            self._set(f"{part}_y", _integers(getattr(self, f"{part}_y"), f"{self.name}: {part}_y"))
            self._check_part(part)
        if self.train_x.shape[1:] != self.test_x.shape[1:]:
            raise InputError(
                f"{self.name}: training examples have shape {self.train_x.shape[1:]} and test examples "
                f"{self.test_x.shape[1:]}; expected the same"
            )
        if self.keys is not None:
            self._set("keys", _integers(self.keys, f"{self.name}: keys"))
            _same_length(self.keys, self.train_x, f"{self.name}: keys", "train_x")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return self.train_x.shape[1:]

    def _check_part(self, part: str) -> None:
        x, y = getattr(self, f"{part}_x"), getattr(self, f"{part}_y")
        _same_length(y, x, f"{self.name}: {part}_y", f"{part}_x")
        if not len(y):
            raise InputError(f"{self.name}: {part}_x has no examples; expected at least one")
        check_labels(y, self.classes, f"{self.name}: {part}_y")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen for everybody else


def check_labels(labels: Integers, classes: int, what: str) -> None:
    """Labels must be 0 .. classes-1."""
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        raise InputError(f"{what} has the label {labels[wrong][0]}; expected 0 to {classes - 1}")


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A read-only view; the array itself stays as writable as its owner made it."""
    view = array.view()
    view.flags.writeable = False
    return view


def _features(value: Any, what: str) -> Features:
    array = _array(value, what, "fiub", "numbers")
    if array.ndim < 2 or not all(array.shape[1:]):
        raise InputError(
            f"{what} has shape {array.shape}; expected (examples, features, ...) with at least one feature"
        )
    with np.errstate(over="ignore"):  # what overflows float32 becomes infinite and is refused on the next line
        array = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(array).all():
        raise InputError(f"{what} has values that are not finite in float32; expected finite numbers only")
    return frozen(array)


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
