"""`auto`: the client's half of whatever the server's rule is, as the section [local] of a file names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..params import Params, positive
from .base import LocalRule
from .registry import create


@dataclass(frozen=True)
class AutoParams(Params):
    """The client's half of whatever the server's rule is."""

    eta_l: float | None = positive(None, "local step size; None: the local rule's own default")


@dataclass(frozen=True)
class Auto:
    """The entry `auto`: sgd, or what the rule asks for."""

    name: str = "auto"
    params: type[Params] = AutoParams

    def describe(self) -> dict[str, Any]:
        """JSON values."""
        return {"name": "auto", "rule": "the client's half of the server's rule", "parameters": AutoParams.describe()}


AUTO = Auto()


def choose(name: str, params: Mapping[str, Any], half: tuple[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The local rule of that name; for `auto` the half the server's rule asks for, with the parameters they share."""
    if name != AUTO.name:
        return name, dict(params)
    fitting, shared = half
    return fitting, {key: value for key, value in params.items() if value is not None} | dict(shared)


def made(name: str, params: Mapping[str, Any], half: tuple[str, Mapping[str, Any]]) -> LocalRule:
    """That rule itself."""
    chosen, full = choose(name, params, half)
    return create(chosen, **full)
