"""The checks at a rule's door: each returns what it was given, or says in one sentence what was wrong with it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import kernels
from ..errors import CountError, InputError, VectorError
from ..types import Vector

_FLOAT32 = np.dtype(np.float32)

MOST = 2**63 - 1
"""Steps or examples: a state keeps them as 64-bit integers."""


class Sound(dict[str, Vector]):
    """Vectors that were looked at where they came in: a rule takes them without looking again."""


def index(value: Any, what: str, error: type[InputError]) -> int:
    """An integer, whatever its type calls itself."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise error(f"{what} is {value!r} ({type(value).__name__}); expected an integer")
    return operator.index(value)


def positive(value: Any, what: str) -> int:
    """An integer of at least one that fits into 64 bits."""
    number = index(value, what, CountError)
    if number < 1:
        raise CountError(f"{what} is {value}; expected at least 1")
    if number > MOST:
        raise CountError(f"{what} is larger than {MOST}, the largest number a state can keep")
    return number


def mapping(value: Any, what: str) -> Mapping[Any, Any]:
    """A dictionary, or something like it."""
    if type(value) is not dict and not isinstance(value, Mapping):
        raise InputError(f"{what} is a {type(value).__name__}; expected a dictionary")
    return value


def _shaped(vector: Any, name: str, length: int | None) -> Vector:
    """The same numbers in a plain contiguous float32 vector of that length (None: of any), or an error."""
    if not isinstance(vector, np.ndarray):
        raise VectorError(f"{name} is a {type(vector).__name__}; expected a flat NumPy float32 vector")
    if vector.dtype != _FLOAT32:
        raise VectorError(f"{name} has dtype {vector.dtype}; expected float32")
    if vector.ndim != 1 or (length is None and vector.size == 0):
        raise VectorError(f"{name} has shape {vector.shape}; expected a flat vector of at least one weight")
    if length is not None and vector.size != length:
        raise VectorError(f"{name} has {vector.size} weights; expected {length}")
    plain = vector if type(vector) is np.ndarray else vector.view(np.ndarray)
    layout = plain.flags
    return plain if layout.c_contiguous and layout.aligned else np.array(plain)


def checked(vector: Any, name: str, length: int | None) -> Vector:
    """The vector itself if it is sound, a copy if only its layout in memory is not, an error otherwise."""
    usual = type(vector) is np.ndarray and vector.dtype is _FLOAT32 and vector.shape == (length,)
    sound: Vector = vector if usual and vector.flags.carray else _shaped(vector, name, length)
    if not kernels.all_finite(sound):
        bad = int(np.flatnonzero(~np.isfinite(sound))[0])
        raise VectorError(f"{name} holds {sound[bad]} at position {bad}; expected finite numbers only")
    return sound
