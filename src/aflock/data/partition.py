"""Partitions: which client holds which training example.

    shares = create("dirichlet", dataset, clients=40, seed=1, alpha=0.1, min_size=10)
    shares.indices[3]                                  # the examples of client 3, sorted

Every example has exactly one client, and every client has at least one example. A split is a function registered by
name that returns the client of each example; it gets its own random stream, so one seed gives one partition:

    @register("halves", source="me", description="the first half and the rest", params=Params)
    def halves(dataset: Dataset, clients: int, params: Params, draws: np.random.Generator) -> Integers: ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .. import rng
from ..errors import InputError, ParameterError
from ..params import Params
from ..registry import Registry
from .base import Dataset, Integers
from .checks import integer
from .shares import Partition

__all__ = ["Partition", "PartitionEntry", "Split", "create", "entries", "get", "names", "register"]

P = TypeVar("P", bound=Params)

Split = Callable[[Dataset, int, P, np.random.Generator], Integers]
"""From a dataset, a number of clients, checked parameters and a stream to the client of each training example."""


@dataclass(frozen=True)
class PartitionEntry:
    """What is known about a registered split."""

    name: str
    split: Split[Any]
    params: type[Params]
    source: str
    description: str
    keyed: bool
    by_class: bool

    def describe(self) -> dict[str, Any]:
        """JSON values for `aflock list partitions --json`."""
        return {
            "name": self.name,
            "source": self.source,
            "description": self.description,
            "keyed": self.keyed,
            "module": self.split.__module__,
            "parameters": self.params.describe(),
        }


_ENTRIES: Registry[PartitionEntry] = Registry("partition")
get, names, entries = _ENTRIES.get, _ENTRIES.names, _ENTRIES.entries


def register(
    name: str, *, source: str, description: str, params: type[P], keyed: bool = False, by_class: bool = False
) -> Callable[[Split[P]], Split[P]]:
    """Decorator that makes a split known by name; a `keyed` one needs data with keys, a `by_class` one classes."""

    def add(split: Split[P]) -> Split[P]:
        _ENTRIES.add(name, PartitionEntry(name, split, params, source, description, keyed, by_class))
        return split

    return add


def create(kind: str, dataset: Dataset, clients: int | None, *, seed: int = 0, **params: Any) -> Partition:
    """The training examples of `dataset` split over clients 0 .. clients-1; None means one per key of the data."""
    entry = get(kind)
    checked = entry.params.build(kind, params)
    number = _clients(entry, dataset, clients)
    owners = entry.split(dataset, number, checked, rng.stream(integer(seed, "seed"), "partition", kind))
    return _grouped(kind, np.asarray(owners), number, len(dataset.train_y))


def _clients(entry: PartitionEntry, dataset: Dataset, clients: int | None) -> int:
    examples = len(dataset.train_y)
    if entry.keyed and dataset.keys is None:
        raise ParameterError(f"{entry.name}: the dataset {dataset.name!r} has no keys; choose another partition for it")
    if entry.by_class and dataset.regression:
        raise ParameterError(f"{entry.name}: the labels of {dataset.name!r} are numbers, not classes; use iid or key")
    if clients is None:
        if dataset.keys is None or not entry.keyed:
            raise ParameterError(f"{entry.name}: clients=None is not valid; expected a number of clients")
        return len(np.unique(dataset.keys))
    number = integer(clients, "clients", 1)
    if number > examples:
        raise ParameterError(
            f"clients={number} is more than the {examples} training examples of {dataset.name!r}; "
            f"use at most {examples} clients"
        )
    return number


def _grouped(kind: str, owners: Integers, clients: int, examples: int) -> Partition:
    # The built-in splits cannot fail here; a user's own can.
    if owners.shape != (examples,) or owners.dtype.kind not in "iu":
        raise InputError(f"partition {kind!r} did not name one client for each of the {examples} examples")
    if owners.min() < 0 or owners.max() >= clients:
        raise InputError(f"partition {kind!r} named a client outside 0 to {clients - 1}")
    sizes = np.bincount(owners, minlength=clients)
    if not sizes.all():
        raise InputError(f"partition {kind!r} left client {sizes.argmin()} without examples; use fewer clients")
    order = np.argsort(owners, kind="stable")
    return Partition(tuple(np.split(order, np.cumsum(sizes)[:-1])))
