"""Datasets by name, and how their examples are split over clients.

    digits = load("digits", seed=1)
    shares = partition.create("dirichlet", digits, clients=40, seed=1, alpha=0.1, min_size=10)
    print(shares.table(digits.train_y, digits.classes))

What is not built in is fetched when it is first loaded (see `fetch`), kept in the folder AFLOCK_DATA and memory-mapped
from then on.

`names()` lists the datasets, `entries()` says what each is; `register` adds one's own. `partition` has the same four.
"""

from __future__ import annotations

from . import datasets, partition, splits  # noqa: F401  (importing datasets and splits registers them)
from .base import Dataset, FeatureScale
from .registry import DatasetEntry, entries, get, load, names, register
from .shares import Partition

__all__ = [
    "Dataset",
    "DatasetEntry",
    "FeatureScale",
    "Partition",
    "entries",
    "get",
    "load",
    "names",
    "partition",
    "register",
]
