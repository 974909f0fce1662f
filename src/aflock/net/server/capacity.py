"""Whether there is memory for the rows of the clients.

A rule that keeps one vector per client (a row) needs memory for each. The server checks that before it writes to the
journal that a client takes part: a record that could not be applied would stop every later start.
"""

from __future__ import annotations

from ...errors import DoesNotFit
from ...rows import Rows
from ...strategies.base import Strategy
from ...system import disk_rows
from ..protocol.refusals import busy
from .settings import Settings


def check_initial_clients(settings: Settings, length: int) -> None:
    """Raises `DoesNotFit` if there is no memory for one row of each client that the federation begins with."""
    cache = settings.section("strategy").params.get("cache")
    if cache is not None:
        disk_rows.create(cache, (), length).require(settings.section("federation").clients)


def check_one_more_client(strategy: Strategy) -> None:
    """Refuses a client that joins later, for now, if there is no memory for its rows."""
    for rows in rows_of(strategy):
        try:
            rows.require(1)
        except DoesNotFit:
            raise busy("busy", "the server has no memory for one more client; try again later", 60.0) from None


def rows_of(strategy: Strategy) -> list[Rows]:
    """The rows that a rule keeps once the federation has begun."""
    kept = (getattr(strategy, name, None) for name in strategy.keeps)
    return [part for part in kept if isinstance(part, Rows)]
