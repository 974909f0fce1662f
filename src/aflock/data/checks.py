"""The check at the door of this room."""

from __future__ import annotations

import operator
from typing import Any

from ..errors import InputError, ParameterError


def integer(value: Any, what: str, least: int | None = None, error: type[InputError] = ParameterError) -> int:
    """An integer of at least `least`, whatever its type calls itself; `error` in one sentence otherwise."""
    bound = "" if least is None else f" of at least {least}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        raise error(f"{what}={value!r} is not valid; expected an integer{bound}")
    return number
