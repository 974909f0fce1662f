"""How long a job takes: distributions as quantile functions.

    delay.quantile(u),   u uniform on (0, 1)

One number per job decides its duration, and that number depends on the schedule's seed, the client and the number of
the job alone (`rng.fraction`): every rule meets the same durations, and adding a client changes nobody else's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ...params import Params
from ...registry import Registry

D = TypeVar("D", bound="type[Delay]")


class Delay(ABC):
    """A distribution of durations."""

    def __init__(self, params: Params) -> None:
        self.p = params

    @abstractmethod
    def quantile(self, u: float) -> float:
        """The duration that a share u of all jobs does not exceed."""

    def draw(self, client: int, job: int, u: float) -> float:
        """The duration of a client's job, u uniform on (0, 1); a delay may depend on the client and the job, too."""
        return self.quantile(u)


@dataclass(frozen=True)
class DelayEntry:
    """What is known about a registered delay."""

    name: str
    cls: type[Delay]
    params: type[Params]
    description: str

    def describe(self) -> dict[str, Any]:
        """JSON values for `aflock list delays --json`."""
        return {"name": self.name, "description": self.description, "parameters": self.params.describe()}


_ENTRIES: Registry[DelayEntry] = Registry("delay")
get, names, entries = _ENTRIES.get, _ENTRIES.names, _ENTRIES.entries


def register(name: str, *, description: str, params: type[Params]) -> Callable[[D], D]:
    """Class decorator that makes a delay known by name."""

    def add(cls: D) -> D:
        _ENTRIES.add(name, DelayEntry(name, cls, params, description))
        return cls

    return add


def create(name: str, **params: Any) -> Delay:
    """The delay of that name."""
    entry = get(name)
    return entry.cls(entry.params.build(f"delay {name}", params))
