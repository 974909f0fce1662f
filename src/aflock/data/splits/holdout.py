"""Chooses the examples for testing: the same share of every class."""

from __future__ import annotations

import numpy as np

from ..base import Integers


def stratified(labels: Integers, fraction: float, draws: np.random.Generator) -> tuple[Integers, Integers]:
    """The indices to train on and to test on, each sorted.

    Every class gives its share of test examples, rounded, but keeps at least one example on either side; a class of a
    single example is for training.
    """
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = draws.permutation(np.flatnonzero(labels == label))
        test[members[: _share(len(members), fraction)]] = True
    return np.flatnonzero(~test), np.flatnonzero(test)


def _share(members: int, fraction: float) -> int:
    return min(max(round(members * fraction), 1), members - 1)
