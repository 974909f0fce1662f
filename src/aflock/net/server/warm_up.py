"""Loads the compiled kernels of a federation's rule before the server listens.

numba loads a kernel from its cache on disk when the kernel is first called, and that takes long enough for a client to
notice. So a small federation with the same rule takes a few updates, and is thrown away.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np

from ...errors import AflockError
from ..federation.federation import Federation, Given
from ..federation.params import FederationParams
from ..protocol.wire import UpdateHead
from .settings import Settings

_LENGTH = 8
"""Weights of the small model."""
_ROUNDS = 64
"""Most updates of each client: a rule that has not made two steps by then has called all its kernels, or never will."""


def load_kernels(settings: Settings) -> None:
    """Lets the rule of a federation make two steps with a few clients and a small model; nothing of it is kept."""
    if settings.section("strategy").params.get("cache") == "disk":  # the rule would make a folder of rows on disk
        return
    with suppress(AflockError):  # an error here will be raised again, and reported, by the real federation
        federation = _small_federation(settings)
        for _ in range(_ROUNDS):
            for name in list(federation.clients):
                _pull_and_update(federation, name)
            if federation.version >= 2:
                return


def _small_federation(settings: Settings) -> Federation:
    p, cohort = settings.section("federation"), settings.strategy().largest_cohort
    # With a bound on the norm, so that the kernel that measures norms is loaded, too.
    few: FederationParams = replace(p, clients=max(2, cohort or 0), encoding="float32", max_norm=1.0)
    sections = {**settings.sections, "federation": few}
    federation = Settings(sections).federation(np.zeros(_LENGTH, np.float32))
    for k in range(few.clients):
        federation.apply({"k": "hello", "t": 0.0, "name": str(k), "gen": 1}, b"")
    return federation


def _pull_and_update(federation: Federation, name: str) -> None:
    """Lets a client pull a job and answer it, by the same calls as the server makes."""
    given: Given | None = federation.apply({"k": "pull", "t": 0.0, "name": name}, b"")
    if given is None:
        return
    names, _ = federation.expected[federation.coordinator.ticket(federation.clients[name].number).first]
    head = UpdateHead(given.job.version, 1, 1, names, "float32")
    body = bytearray(np.full(_LENGTH * len(names), 1e-3, np.float32).tobytes())
    federation.check_vectors(federation.clients[name], head, body)
    record = {"k": "update", "t": 0.0, "name": name, "j": given.id, "v": head.version, "s": 1, "e": 1}
    federation.apply(record | {"n": names, "enc": head.encoding}, body)
