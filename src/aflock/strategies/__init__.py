"""The server rules, by name.

    s = create("ace", clients=5, lr=0.1)

`names()` lists them, `entries()` says what each is; `register` adds one's own.
"""

from __future__ import annotations

from ..params import Params
from . import rules  # noqa: F401  (importing the rules registers them)
from .base import Strategy
from .registry import StrategyEntry, create, entries, get, names, register

__all__ = ["Params", "Strategy", "StrategyEntry", "create", "entries", "get", "names", "register"]
