"""Kernels are loaded from disk when they are first used: a throwaway federation does so before a client has to wait."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np

from ..errors import AflockError
from . import pen
from .federation import Federation, Given
from .settings import Settings
from .wire import UpdateHead

_LENGTH = 8
_ROUNDS = 64
"""Updates of each client after which a rule has done what it ever does, or never will."""


def up(settings: Settings) -> None:
    """Lets the rule of a federation make a few steps with a few clients and a few weights, for nothing."""
    pen.warm()
    if settings.section("strategy").params.get("cache") == "disk":  # a folder of rows is not for nothing
        return
    with suppress(AflockError):  # what cannot work will be said where it matters
        federation = _small(settings)
        for _ in range(_ROUNDS):
            for name in list(federation.seats):
                _work(federation, name)
            if federation.version >= 2:
                return


def _small(settings: Settings) -> Federation:
    p, cohort = settings.section("federation"), settings.strategy().largest_cohort
    few = replace(p, clients=max(2, cohort or 0), encoding="float32", max_norm=1.0)
    sections = {**settings.sections, "federation": few}
    federation = Federation(Settings(sections), np.zeros(_LENGTH, np.float32))
    for k in range(few.clients):
        federation.apply({"k": "hello", "t": 0.0, "name": str(k), "gen": 1}, b"")
    return federation


def _work(federation: Federation, name: str) -> None:
    given: Given | None = federation.apply({"k": "pull", "t": 0.0, "name": name}, b"")
    if given is None:
        return
    names, _ = federation.expected[federation.coordinator.ticket(federation.seats[name].number).first]
    head = UpdateHead(given.job.version, 1, 1, names, "float32")
    body = bytearray(np.full(_LENGTH * len(names), 1e-3, np.float32).tobytes())
    federation.check_vectors(head, body)
    record = {"k": "update", "t": 0.0, "name": name, "j": given.id, "v": head.version, "s": 1, "e": 1}
    federation.apply(record | {"n": names, "enc": head.encoding}, body)
