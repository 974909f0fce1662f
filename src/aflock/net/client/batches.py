"""A client's own batches: gone through again and again, and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ParameterError

Batch = tuple[Any, Any]
Batches = Iterable[Batch] | Callable[[], Iterator[Batch]]
Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]

MOST_COUNTED = 100_000
"""Batches of a function that are counted before it counts as endless."""
EMPTY = "batches is empty; expected at least one pair (x, y)"
"""What is wrong with batches that give none."""


class Feed:
    """Batches without end, as arrays, from something that can be iterated over again and again."""

    def __init__(self, batches: Batches) -> None:
        if callable(batches):
            self._begin: Callable[[], Iterator[Batch]] = batches
        elif isinstance(batches, Iterable) and iter(batches) is not batches:
            self._begin = batches.__iter__
        else:
            raise ParameterError(
                f"batches is a {type(batches).__name__}; expected a list or loader of pairs (x, y) that can be gone "
                "through again and again, or a function that returns an iterator"
            )
        self._batches: Any = batches
        self._counted: tuple[int, int] | None = None

    @property
    def examples(self) -> int:
        """How many examples there are."""
        with suppress(AttributeError, TypeError):  # no loader, or one of a stream
            return len(self._batches.dataset)
        return self._count()[1]

    @property
    def count(self) -> int:
        """How many batches make an epoch; 1 where only counting them could tell."""
        with suppress(TypeError):  # it has no length, or (a loader of a stream) cannot tell
            return max(1, len(self._batches))
        return 1 if self._counted is None else self._counted[0]

    def endless(self) -> Iterator[Arrays]:
        """One epoch after the other."""
        while True:
            empty = True
            for batch in self._begin():
                empty = False
                yield _arrays(batch)
            if empty:
                raise ParameterError(EMPTY)

    def _count(self) -> tuple[int, int]:
        if self._counted is None:
            batches = examples = 0
            for x, _ in map(_pair, self._begin()):
                batches, examples = batches + 1, examples + len(x)
                if batches > MOST_COUNTED:
                    raise ParameterError("batches does not end; say how many examples there are with examples=")
            if not batches:
                raise ParameterError(EMPTY)
            self._counted = batches, examples
        return self._counted


def _pair(batch: Any) -> Batch:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ParameterError(f"a batch is a {type(batch).__name__}; expected a pair (x, y)")
    return batch[0], batch[1]


def _arrays(batch: Any) -> Arrays:
    x, y = _pair(batch)
    return _array(x), _array(y)


def _array(values: Any) -> npt.NDArray[Any]:
    """A torch tensor's own memory, if it lies where NumPy can see it."""
    return np.asarray(values.detach().cpu().numpy() if hasattr(values, "detach") else values)
