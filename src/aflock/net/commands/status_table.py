"""The table of `aflock status`: drops columns and shortens names until it fits the width of the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...system.words import counted, human

ClientStatus = Mapping[str, Any]

COLUMNS: dict[str, Callable[[ClientStatus], str]] = {
    "client": lambda client: str(client["name"]),
    "no.": lambda client: str(client["number"]),
    "state": lambda client: _state(client),
    "version": lambda client: "" if client["version"] is None else str(client["version"]),
    "jobs": lambda client: str(client["jobs"]),
    "updates": lambda client: str(client["updates"]),
    "share": lambda client: f"{client['share']:.1%}",
    "stale": lambda client: _mean(client["staleness_mean"]),
    "seen": lambda client: "" if client["seen"] is None else f"{duration(client['seen'])} ago",
}
"""Each column's head, and the function that makes a client's cell."""
_DISPENSABLE = ("no.", "jobs", "version", "stale", "share", "seen", "state")
"""The columns that are dropped if the table is too wide, in this order."""
_SHORTEST_NAME = 16
"""Names are not shortened below this many characters while there is a column to drop."""


def table(found: Mapping[str, Any], width: int) -> Any:
    """A summary, and below it one row per client; `found` is the JSON of GET /v1/status."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    clients = sorted(found.get("clients", []), key=lambda client: -client["updates"])
    columns = _fitting({head: [head, *map(cell, clients)] for head, cell in COLUMNS.items()}, width)
    shown = Table()
    for head in columns:
        shown.add_column(head, no_wrap=True)
    for row in list(zip(*columns.values(), strict=True))[1:]:
        shown.add_row(*map(Text, row))
    return Group(Text("\n".join(_summary(found))), shown)


def duration(seconds: float) -> str:
    """A duration in the largest unit of which it has at least two: 90 s, 45 min, 36 h, 12 d."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _fitting(columns: dict[str, list[str]], width: int) -> dict[str, list[str]]:
    """Drops columns that do not fit, and shortens the names to the width that is left."""
    names = columns["client"]
    for head in _DISPENSABLE:
        if _width_for_names(columns, width) >= min(_SHORTEST_NAME, _widest(names)):
            break
        del columns[head]
    width = max(3, _width_for_names(columns, width))
    return columns | {"client": [_shortened(name, width) for name in names]}


def _width_for_names(columns: dict[str, list[str]], width: int) -> int:
    frame = 3 * len(columns) + 1
    return width - frame - sum(_widest(cells) for head, cells in columns.items() if head != "client")


def _widest(cells: Sequence[str]) -> int:
    return max(map(len, cells))


def _shortened(name: str, width: int) -> str:
    """The beginning and the end of a name that is longer than `width`."""
    if len(name) <= width:
        return name
    end = (width - 1) // 2
    return f"{name[: width - 1 - end]}…{name[-end:]}"


def _state(client: ClientStatus) -> str:
    waits = client.get("waiting")  # older servers do not send it
    return str(client["state"]) if waits is None else f"{client['state']} {duration(waits)}"


def _mean(staleness: float) -> str:
    return f"{staleness:.2f}" if staleness < 100 else f"{staleness:.0f}"


def _summary(found: Mapping[str, Any]) -> list[str]:
    state = f"ended: {found['ended']}" if found["ended"] else found["state"]
    if found["waiting_for"]:
        state += f", waits for {counted(found['waiting_for'], 'more client')}"
    refused = ", ".join(f"{count} {code}" for code, count in found["refused"].items()) or "none"
    lines = [
        f"{found['strategy']}, {found['weights']:,} weights, {state}",
        f"version {found['version']}, {counted(found['updates'], 'update')} ({found['updates_per_s']:g}/s over the "
        f"last minute), {found['pending']} buffered, {counted(found['open_jobs'], 'open job')}, "
        f"{found['dropped']} dropped",
        f"staleness {_mean(found['staleness_mean'])} on average, {found['staleness_max']} at most; refused: {refused}",
        f"memory {human(found['memory'])}, up {duration(found['up'])}",
    ]
    if found.get("clients_waiting"):
        waiting = counted(found["clients_waiting"], "client")
        lines.append(f"without a job: {waiting}, the longest for {duration(found['longest_wait'])}")
    measured = found.get("evaluation")
    if measured:
        lines.append(f"version {measured['version']:.0f}: accuracy {measured['accuracy']:.4f}, "
                     f"loss {measured['loss']:.4f}")  # fmt: skip
    return lines
