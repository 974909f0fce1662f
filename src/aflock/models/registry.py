"""Models by name.

    @register("tiny", description="...", params=TinyParams)
    def build(dataset: DatasetLike, p: TinyParams) -> Model: ...

What is registered is a function that builds the model for a dataset; it may import what it needs when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..params import Params
from ..registry import Registry
from .base import DatasetLike, Model

Builder = Callable[[DatasetLike, Any], Model]
"""(dataset, checked parameters) -> model."""

B = TypeVar("B", bound=Builder)


@dataclass(frozen=True)
class ModelEntry:
    """What is known about a registered model."""

    name: str
    build: Builder
    params: type[Params]
    description: str

    def describe(self) -> dict[str, Any]:
        """JSON values for `aflock list models --json`."""
        return {
            "name": self.name,
            "description": self.description,
            "module": self.build.__module__,
            "parameters": self.params.describe(),
        }


_ENTRIES: Registry[ModelEntry] = Registry("model")
get, names, entries = _ENTRIES.get, _ENTRIES.names, _ENTRIES.entries


def register(name: str, *, description: str, params: type[Params] = Params) -> Callable[[B], B]:
    """Decorator that makes a model known by name; it decorates the function (or class) that builds it."""

    def add(build: B) -> B:
        _ENTRIES.add(name, ModelEntry(name, build, params, description))
        return build

    return add


def create(name: str, dataset: DatasetLike, **params: Any) -> Model:
    """The model of that name for a dataset, with keyword hyper-parameters; unknown ones are an error."""
    entry = get(name)
    return entry.build(dataset, entry.params.build(name, params))
