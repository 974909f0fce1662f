"""The batches that a user gives to `Client.run`: iterated over epoch after epoch, and counted.

`training.py` takes one batch per local step from them; an update carries the number of examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ParameterError

BatchPair = tuple[Any, Any]
Batches = Iterable[BatchPair] | Callable[[], Iterator[BatchPair]]
ArrayPair = tuple[npt.NDArray[Any], npt.NDArray[Any]]

MOST_COUNTED = 100_000
"""A function whose iterator gives more batches than this is taken for endless."""
EMPTY = "batches is empty; expected at least one pair (x, y)"
"""The error for an iterator that gives no batch."""


class EndlessBatches:
    """Epoch after epoch of batches, as arrays, from a list, a loader or a function that returns an iterator."""

    def __init__(self, batches: Batches) -> None:
        if callable(batches):
            self._begin: Callable[[], Iterator[BatchPair]] = batches
        elif isinstance(batches, Iterable) and iter(batches) is not batches:
            self._begin = batches.__iter__
        else:
            raise ParameterError(
                f"batches is a {type(batches).__name__}; expected a list or loader of pairs (x, y) that can be "
                "iterated over repeatedly, or a function that returns an iterator"
            )
        self._batches: Any = batches
        self._counted: tuple[int, int] | None = None

    @property
    def examples(self) -> int:
        """How many examples an epoch has; iterates over an epoch if only counting them can tell."""
        with suppress(AttributeError, TypeError):  # not a loader, or the loader of an iterable dataset without a length
            return len(self._batches.dataset)
        return self._count()[1]

    @property
    def count(self) -> int:
        """How many batches an epoch has; 1 if they have no length and were not counted."""
        with suppress(TypeError):  # no length, or the loader of an iterable dataset without one
            return max(1, len(self._batches))
        return 1 if self._counted is None else self._counted[0]

    def endless(self) -> Iterator[ArrayPair]:
        """The batches of one epoch after the other, without end."""
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
                    raise ParameterError(
                        f"batches gives more than {MOST_COUNTED} pairs; say how many examples there are: examples="
                    )
            if not batches:
                raise ParameterError(EMPTY)
            self._counted = batches, examples
        return self._counted


def _pair(batch: Any) -> BatchPair:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ParameterError(f"a batch is a {type(batch).__name__}; expected a pair (x, y)")
    return batch[0], batch[1]


def _arrays(batch: Any) -> ArrayPair:
    x, y = _pair(batch)
    return _array(x), _array(y)


def _array(values: Any) -> npt.NDArray[Any]:
    """As a NumPy array; a torch tensor on the CPU is not copied."""
    return np.asarray(values.detach().cpu().numpy() if hasattr(values, "detach") else values)
