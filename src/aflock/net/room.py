"""Whether there is memory for clients: asked before a promise is written to the journal that nobody could keep."""

from __future__ import annotations

from .. import rows
from ..errors import DoesNotFit
from ..rows import Rows
from ..strategies.base import Strategy
from .refusals import busy
from .settings import Settings


def for_all(settings: Settings, length: int) -> None:
    """Raises `DoesNotFit` if one row for each client the federation begins with cannot be kept."""
    cache = settings.section("strategy").params.get("cache")
    if cache is not None:
        rows.create(cache, (), length).require(settings.section("federation").clients)


def for_one_more(strategy: Strategy) -> None:
    """Refuses, for now, a client that a rule has no memory for."""
    for kept in of(strategy):
        try:
            kept.require(1)
        except DoesNotFit:
            raise busy("busy", "the server has no memory for one more client", 60.0) from None


def of(strategy: Strategy) -> list[Rows]:
    """What a rule that has begun keeps of each client."""
    kept = (getattr(strategy, name, None) for name in strategy.keeps)
    return [part for part in kept if isinstance(part, Rows)]
