"""Rules by name.

    @register("asgd", paper=..., rule="w <- w - lr*G", optimum="biased", params=AsgdParams)
    class Asgd(Strategy): ...

Registering a rule is all it takes to be listed, created by name and run through the contract suite.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from ..errors import ParameterError, UnknownName
from ..params import Params
from ..registry import Registry
from .base import Strategy

S = TypeVar("S", bound=type[Strategy])

Optimum = Literal["true", "step", "biased"]
"""Where a rule ends on a federation whose fast clients hold other data than its slow ones: at the true optimum, within
the order of its step of it, or at a point pulled towards the fast clients."""


@dataclass(frozen=True)
class StrategyEntry:
    """What is known about a registered rule."""

    name: str
    cls: type[Strategy]
    params: type[Params]
    paper: str
    rule: str
    optimum: Optimum

    def describe(self) -> dict[str, Any]:
        """JSON values for `aflock list strategies --json`."""
        return {
            "name": self.name,
            "paper": self.paper,
            "rule": self.rule,
            "optimum": self.optimum,
            "needs": list(self.cls.needs),
            "first": self.cls.first,
            "module": self.cls.__module__,
            "parameters": self.params.describe(),
        }


_ENTRIES: Registry[StrategyEntry] = Registry("strategy")
get, names, entries = _ENTRIES.get, _ENTRIES.names, _ENTRIES.entries
_ADDITIONS: Registry[type[Strategy]] = Registry("addition to a strategy")


def register(name: str, *, paper: str, rule: str, optimum: Optimum, params: type[Params]) -> Callable[[S], S]:
    """Class decorator that makes a rule known by name."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise ParameterError(f"a strategy cannot be called {name!r}; expected small letters, digits, - and _")
    if optimum not in get_args(Optimum):
        raise ParameterError(f"optimum={optimum!r} is not valid; expected one of {', '.join(get_args(Optimum))}")

    def add(cls: S) -> S:
        _ENTRIES.add(name, StrategyEntry(name, cls, params, paper, rule, optimum))
        cls.name = name
        return cls

    return add


def create(name: str, clients: int, *, seed: int = 0, **params: Any) -> Strategy:
    """The rule of that name for clients 0 .. clients-1, with keyword hyper-parameters; unknown ones are an error.

    `seed` feeds the rules that draw (int8 rounding, random selection, random cohort sizes). A name ending in
    "+scaffold" wraps the rule in SCAFFOLD's server half.
    """
    if not isinstance(name, str):
        raise UnknownName(f"{name!r} is no name of a strategy; known are {', '.join(names())}")
    base, *additions = name.split("+")
    if len(additions) != len(set(additions)):
        raise UnknownName(f"{name!r} adds something twice; expected each addition once")
    entry = get(base)
    cls = entry.cls
    for extra in additions:
        cls = _combined(extra, cls)
    # Imported here: whoever only uses rules that others have made (`net.federation`) must not load what touches files.
    from ..system import disk_rows

    made = cls(clients, entry.params.build(name, params), seed)
    made.make_rows = disk_rows.create
    return made


@functools.cache
def _combined(extra: str, cls: type[Strategy]) -> type[Strategy]:
    mixin = _ADDITIONS.get(extra)
    return type(f"{mixin.__name__}{cls.__name__}", (mixin, cls), {"name": f"{cls.name}+{extra}"})


def addition(name: str) -> Callable[[S], S]:
    """Class decorator for a mixin that `create` puts before the rule in names ending in "+name"."""

    def add(cls: S) -> S:
        _ADDITIONS.add(name, cls)
        return cls

    return add
