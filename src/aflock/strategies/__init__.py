"""The server rules, by name.

    s = create("ace", clients=5, lr=0.1)

`names()` lists them, `entries()` says what each is; `register` adds one's own.
"""

from __future__ import annotations

from ..params import Params
from . import (  # noqa: F401  (importing a rule registers it)
    ace,
    aced,
    adamasfl,
    afa_cd,
    afa_cs,
    afl,
    asgd,
    ca2fl,
    delay_adaptive,
    fadas,
    fedasync,
    fedavg,
    fedbuff,
    masfl,
    mr_asyncfl,
    rolling_fedavg,
    scaffold,
    twafl,
)
from .base import Strategy
from .registry import Entry, create, entries, get, names, register

__all__ = ["Entry", "Params", "Strategy", "create", "entries", "get", "names", "register"]
