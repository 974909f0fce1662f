"""What `aflock data list|get|info` does and prints: JSON values for programs, text for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .. import state
from .base import Dataset
from .fetching import cache
from .fetching.download_progress import DownloadProgress
from .fetching.fetch import Supply
from .registry import DatasetEntry, entries, get, load


def listing() -> list[dict[str, Any]]:
    """Every dataset: its description, and whether it is on this machine."""
    return [_summary(entry) for entry in entries()]


def listing_text() -> str:
    """`listing` as a table."""
    rows = [(one["name"], one["status"], one["description"]) for one in listing()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{name:<{widths[0]}}  {status:<{widths[1]}}  {description}" for name, status, description in rows]
    return "\n".join([*lines, f"\nkept in {cache.folder()} (AFLOCK_DATA)"])


def fetch(name: str, *, mine: str | None = None, quiet: bool = False) -> dict[str, Any]:
    """Fetches what the dataset of that name needs, or one of its texts ("shakespeare-plays"); returns where it is."""
    meter = DownloadProgress(quiet=quiet)
    path = None if mine is None else Path(mine).expanduser()
    return {"name": name, "files": [_fetched(supply, path, meter) for supply in _supplies(name)]}


def fetch_text(found: dict[str, Any]) -> str:
    """The result of `fetch` as text."""
    if not found["files"]:
        return f"{found['name']} is made here; there is nothing to get"
    return "\n".join(f"{file['path']}  {_size(file['bytes'])}  from {file['source']}" for file in found["files"])


def info(name: str) -> dict[str, Any]:
    """Describes a dataset; its examples, too, if it is on this machine."""
    entry = get(name)
    described = _summary(entry) | {"source": entry.source, "parameters": entry.params.describe()}
    described["supplies"] = [_supply(supply) for supply in entry.supplies]
    if described["status"] != _MISSING:
        described["examples"] = _examples(load(name))
    return described


def info_text(described: dict[str, Any]) -> str:
    """`info` for people."""
    lines = [described["name"], f"    {described['description']}", f"    {described['source']}"]
    lines += [f"    {name:<14}{value}" for name, value in {"status": described["status"], **_shown(described)}.items()]
    for supply in described["supplies"]:
        lines.append(f"    {supply['name']}: {supply['licence']}; from, in this order:")
        lines += [f"      {source}" for source in supply["sources"]]
        lines.append(f"    kept as {supply['path']}" if supply["bytes"] else "    not here yet")
        if supply["bytes"]:
            checked = "checked" if supply["checked"] else "not checked: no checksum is known"
            lines.append(
                f"      {_size(supply['bytes'])} from {supply['source']}, sha256 {supply['sha256']}, {checked}"
            )
    return "\n".join(lines)


_MISSING, _MADE = "not here", "built in"


def _supplies(name: str) -> list[Supply]:
    """Of a dataset the supply for its default parameters; a supply may also be named itself."""
    by_name = {supply.name: supply for entry in entries() for supply in entry.supplies}
    return [by_name[name]] if name in by_name else list(get(name).supplies[:1])


def _fetched(supply: Supply, mine: Path | None, meter: DownloadProgress) -> dict[str, Any]:
    if mine is not None and supply.file.exists():
        meter.say(f"{supply.name} is here already; delete {supply.file} to get it anew")
    supply.arrays(mine=mine, meter=meter)
    return _kept(supply)


def _summary(entry: DatasetEntry) -> dict[str, Any]:
    here = [supply.file for supply in entry.supplies if supply.file.exists()]
    first = entry.supplies[0].file if entry.supplies else None
    status = _MADE if first is None else _size(sum(file.stat().st_size for file in here)) if first in here else _MISSING
    return {"name": entry.name, "description": entry.description, "status": status}


def _supply(supply: Supply) -> dict[str, Any]:
    known = {"name": supply.name, "licence": supply.licence, "sources": [str(source) for source in supply.sources]}
    return known | (_kept(supply) if supply.file.exists() else {"path": str(supply.file), "bytes": 0})


def _kept(supply: Supply) -> dict[str, Any]:
    origin = state.load(supply.file)["origin"]
    return {"path": str(supply.file), "bytes": supply.file.stat().st_size, **origin}


def _examples(dataset: Dataset) -> dict[str, Any]:
    keys = None if dataset.keys is None else len(np.unique(dataset.keys))
    return {
        "training": len(dataset.train_y),
        "test": len(dataset.test_y),
        "shape": list(dataset.shape),
        "kept_as": str(dataset.train_x.dtype),
        "classes": dataset.classes,
        "regression": dataset.regression,
        "vocabulary": dataset.vocabulary,
        "keys": keys,
    }


def _shown(described: dict[str, Any]) -> dict[str, str]:
    """The examples described for people."""
    known = described.get("examples")
    if known is None:
        return {"get it": f"aflock data get {described['name']}"}
    shape = "x".join(map(str, known["shape"]))
    lines = {
        "examples": f"{known['training']} for training, {known['test']} for testing, {shape}, {known['kept_as']}",
        "labels": "numbers" if known["regression"] else f"{known['classes']} classes",
    }
    return lines | ({} if known["keys"] is None else {"keys": f"{known['keys']}, one client each with partition 'key'"})


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
