"""A small dataset of which only labels and keys matter, and what every split of a dataset must hold."""

from __future__ import annotations

import numpy as np

from aflock.data import Dataset, Partition
from aflock.data.base import Integers


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
