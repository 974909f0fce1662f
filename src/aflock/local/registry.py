"""Client rules by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..params import Params
from ..registry import Registry
from .base import LocalRule

L = TypeVar("L", bound=type[LocalRule])


@dataclass(frozen=True)
class LocalRuleEntry:
    """What is known about a registered client rule."""

    name: str
    cls: type[LocalRule]
    params: type[Params]
    paper: str
    rule: str

    def describe(self) -> dict[str, Any]:
        """JSON values for `aflock list local --json`."""
        return {
            "name": self.name,
            "paper": self.paper,
            "rule": self.rule,
            "remembers": list(self.cls.remembers),
            "extras": list(self.cls.extras),
            "module": self.cls.__module__,
            "parameters": self.params.describe(),
        }


_ENTRIES: Registry[LocalRuleEntry] = Registry("local rule")
get, names, entries = _ENTRIES.get, _ENTRIES.names, _ENTRIES.entries


def register(name: str, *, paper: str, rule: str, params: type[Params]) -> Callable[[L], L]:
    """Class decorator that makes a client rule known by name."""

    def add(cls: L) -> L:
        _ENTRIES.add(name, LocalRuleEntry(name, cls, params, paper, rule))
        cls.name = name
        return cls

    return add


def create(name: str, **params: Any) -> LocalRule:
    """The client rule of that name, with keyword hyper-parameters; unknown ones are an error."""
    entry = get(name)
    return entry.cls(entry.params.build(name, params))
