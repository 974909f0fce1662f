"""Hyper-parameters: a frozen dataclass per rule whose fields carry their meaning and their range.

    @dataclass(frozen=True)
    class AsgdParams(Params):
        lr: float = positive(0.1, "server step size eta")

`Params.build` turns keywords into a checked object; a wrong name is answered with the nearest right one.

`only={"staleness": ("hinge",)}` says that a parameter has an effect with that option alone, and `unless=("beta",
"gamma")` that it has none if all of those are given. Where it has none, any value but the default is refused, because
it would silently do nothing; a resolved file leaves it out.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Self

from .errors import ParameterError, UnknownParameter, did_you_mean

Check = Callable[[Any], bool]
Only = Mapping[str, tuple[Any, ...]]
"""Names of other parameters -> the values with which a parameter has an effect."""

GIVEN = object()
"""In `only`: any value but None."""


@dataclass(frozen=True)
class Params:
    """Base of every rule's hyper-parameters."""

    @classmethod
    def build(cls, owner: str, given: Mapping[str, Any]) -> Self:
        """The checked parameters of the rule called `owner`."""
        known = {item.name: item for item in fields(cls)}
        for name in given:
            if name not in known:
                raise UnknownParameter(_unknown(owner, name, list(known)))
        plain = {name: _plain(value) for name, value in given.items()}
        for name, value in plain.items():
            meta = known[name].metadata
            if not meta["check"](value):
                raise ParameterError(f"{owner}: {name}={value!r} is not valid; expected {meta['expected']}")
        made = cls(**plain)
        for name in plain:
            unused = made._unused(known[name])
            if unused is not None and getattr(made, name) != known[name].default:
                raise ParameterError(f"{owner}: {name}={plain[name]!r} has no effect with {unused}; leave it out")
        return made

    def used(self) -> dict[str, Any]:
        """The parameters that have an effect, with their values."""
        return {item.name: getattr(self, item.name) for item in fields(self) if self._unused(item) is None}

    def _unused(self, item: Field[Any]) -> str | None:
        """The option without which the parameter has no effect, if that is not chosen: "staleness='constant'"."""
        for option, values in item.metadata.get("only", {}).items():
            chosen = getattr(self, option)
            if not any(chosen == value or (value is GIVEN and chosen is not None) for value in values):
                return f"{option}={chosen!r}"
        given = {name: getattr(self, name) for name in item.metadata.get("unless", ())}
        if given and None not in given.values():
            return " and ".join(f"{name}={value!r}" for name, value in given.items())
        return None

    @classmethod
    def describe(cls) -> list[dict[str, Any]]:
        """Name, default, range and meaning of each parameter, the rule's own before those it shares."""
        known = {item.name: item for item in fields(cls)}
        names = dict.fromkeys(name for part in cls.__mro__ for name in getattr(part, "__annotations__", {}))
        return [_description(known[name]) for name in names if name in known]


def _description(item: Field[Any]) -> dict[str, Any]:
    default = None if item.default is MISSING else item.default
    meta = item.metadata
    return {"name": item.name, "default": default, "expected": meta["expected"], "help": meta["help"]}


def positive(default: float | None, text: str, *, least: float | None = None, only: Only | None = None) -> Any:
    """A finite number above zero, or of at least `least`."""
    expected = "a positive number" if least is None else f"a number of at least {least:g}"
    return _field(default, text, lambda x: _real(x) and 0 < x < math.inf and x >= (least or 0), expected, only)


def non_negative(default: float | None, text: str, *, only: Only | None = None) -> Any:
    """A finite number, zero included."""
    return _field(default, text, lambda x: _real(x) and 0 <= x < math.inf, "a number of at least 0", only)


def threshold(default: float | None, text: str) -> Any:
    """A number of versions, infinity included."""
    return _field(default, text, lambda x: _real(x) and x >= 0, "a number of at least 0, or infinity")


def unit(default: float | None, text: str, *, zero: bool = False, one: bool = False) -> Any:
    """A number between 0 and 1; `zero` and `one` say which ends belong to it."""
    expected = f"a number in {'[' if zero else '('}0, 1{']' if one else ')'}"
    return _field(default, text, lambda x: _real(x) and (0 < x < 1 or (zero and x == 0) or (one and x == 1)), expected)


def whole(
    default: int | None, text: str, *, least: int = 1, most: int | None = None, unless: tuple[str, ...] = ()
) -> Any:
    """An integer of at least `least`, and of `most` at most."""
    expected = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"

    def check(x: Any) -> bool:
        return _integer(x) and least <= x and (most is None or x <= most)

    return _field(default, text, check, expected, unless=unless)


def choice(default: str, options: tuple[str, ...], text: str, *, only: Only | None = None) -> Any:
    """One of a few words."""
    return _field(default, text, lambda x: x in options, "one of " + ", ".join(map(repr, options)), only)


def switch(default: bool, text: str) -> Any:
    """Yes or no."""
    return _field(default, text, lambda x: isinstance(x, bool), "True or False")


def path(default: str, text: str) -> Any:
    """The path of a file."""
    return _field(default, text, lambda x: isinstance(x, str) and x != "", "the path of a file")


def words(default: str | None, text: str, expected: str) -> Any:
    """Text that is not empty; `expected` says what it must be."""
    return _field(default, text, lambda x: isinstance(x, str) and x.strip() != "", expected)


def weights(text: str, *, by: str | None = None) -> Any:
    """A list of numbers that are not negative and not all zero, or nothing; `by`: a table, and what its keys are."""
    if by is None:
        return _field(None, text, _are_weights, "a list of numbers of at least 0, not all 0")
    expected = f"a table of numbers of at least 0 by {by}, not all 0"
    return _field(None, text, lambda x: isinstance(x, dict) and _are_weights(list(x.values())), expected)


def folder(text: str, *, only: Only | None = None) -> Any:
    """The path of a folder, or nothing."""
    return _field(None, text, lambda x: isinstance(x, str), "the path of a folder", only)


def _field(
    default: Any, text: str, check: Check, expected: str, only: Only | None = None, unless: tuple[str, ...] = ()
) -> Any:
    optional = default is None
    meta = {
        "help": text,
        "check": (lambda x: x is None or check(x)) if optional else check,
        "expected": expected + (", or None" if optional else ""),
        "only": only or {},
        "unless": unless,
    }
    return field(default=default, metadata=meta)


def _plain(value: Any) -> Any:
    """Python's own number for NumPy's: what is saved with a state must be JSON."""
    if isinstance(value, numbers.Number) and not isinstance(value, bool | int | float) and hasattr(value, "item"):
        return value.item()
    return value


def _real(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and not math.isnan(x)


def _are_weights(x: Any) -> bool:
    return isinstance(x, list | tuple) and all(_real(w) and 0 <= w < math.inf for w in x) and sum(x) > 0


def _integer(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _unknown(owner: str, name: str, known: list[str]) -> str:
    return f"{owner} has no parameter {name!r}; {did_you_mean(name, known)}it takes {', '.join(known) or 'none'}"
