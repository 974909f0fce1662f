"""Checks that the datasets share."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from dataclasses import field
from typing import Any

from ..errors import AflockError, InputError, ParameterError


def integer(value: Any, what: str, least: int | None = None, error: type[InputError] = ParameterError) -> int:
    """The value as an int, of any integer type (NumPy's, too) and at least `least`; raises `error` otherwise."""
    bound = "" if least is None else f" of at least {least}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        raise error(f"{what}={value!r} is not valid; expected an integer{bound}")
    return number


def imported(module: str, why: str, install: str) -> Any:
    """A module that is imported only now, because it is optional or takes a while."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise AflockError(f"{why}, which cannot be imported ({error}); pip install {install}") from error


def optional(meaning: str, check: Callable[[Any], bool], expected: str) -> Any:
    """A parameter that is None unless it is given."""
    meta = {"help": meaning, "check": lambda x: x is None or check(x), "expected": f"{expected}, or None"}
    return field(default=None, metadata=meta)


def text(default: str | None, meaning: str) -> Any:
    """A parameter that is a string; None may only be its default."""
    if default is None:
        return optional(meaning, _is_text, "a string")
    return field(default=default, metadata={"help": meaning, "check": _is_text, "expected": "a string"})


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
