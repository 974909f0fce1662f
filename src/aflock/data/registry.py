"""Datasets by name.

    @register("coins", source="my desk", description="heads or tails", params=CoinParams)
    def coins(params: CoinParams, seed: int) -> Dataset: ...

A loader without parameters is registered with `params=Params`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import InputError
from ..params import Params
from ..registry import Registry
from .base import Dataset
from .checks import integer
from .fetching.fetch import Supply

P = TypeVar("P", bound=Params)

Loader = Callable[[P, int], Dataset]
"""From checked parameters and a seed to a dataset; the same parameters and seed give the same data."""


@dataclass(frozen=True)
class DatasetEntry:
    """What is known about a registered dataset."""

    name: str
    loader: Loader[Any]
    params: type[Params]
    source: str
    description: str
    supplies: tuple[Supply, ...] = ()
    """What must be fetched for it: the first for its default parameters; none if aflock generates it."""

    def describe(self) -> dict[str, Any]:
        """JSON values for `aflock list datasets --json`."""
        return {
            "name": self.name,
            "source": self.source,
            "description": self.description,
            "module": self.loader.__module__,
            "parameters": self.params.describe(),
        }


_ENTRIES: Registry[DatasetEntry] = Registry("dataset")
get, names, entries = _ENTRIES.get, _ENTRIES.names, _ENTRIES.entries


def register(
    name: str, *, source: str, description: str, params: type[P], supplies: tuple[Supply, ...] = ()
) -> Callable[[Loader[P]], Loader[P]]:
    """Decorator that makes a loader known by name."""

    def add(loader: Loader[P]) -> Loader[P]:
        _ENTRIES.add(name, DatasetEntry(name, loader, params, source, description, supplies))
        return loader

    return add


def load(name: str, *, seed: int = 0, **params: Any) -> Dataset:
    """The dataset of that name, with keyword parameters; unknown ones are an error."""
    entry = get(name)
    dataset = entry.loader(entry.params.build(name, params), integer(seed, "seed"))
    if not isinstance(dataset, Dataset):
        raise InputError(f"the loader of {name!r} returned a {type(dataset).__name__}; expected a Dataset")
    return dataset
