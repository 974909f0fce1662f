"""`aflock reproduce --check`: runs some stored cells again. What does not agree is marked as stale.

On the same kind of machine (`origin.KIND`) a run must end with the same model, bit for bit. Elsewhere the last bits of
the first products differ and training amplifies that: the accuracy must then lie within the spread of the cell's seeds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import cells
from .origin import origin, same_kind
from .recipe import Recipe
from .reproduce import work
from .store import Store

LEAST_SPREAD = 0.02
"""Two points: how far a cell may be off elsewhere whose few seeds happen to agree."""


def check(recipe: Recipe, scale: str, folder: Path, *, count: int, report: Callable[[str], None]) -> tuple[int, int]:
    """Runs `count` of the stored runs again; returns how many agree and how many do not."""
    store, agree = Store(folder, recipe, scale), 0
    chosen = _chosen(store, count)
    for run in chosen:
        why = _disagreement(recipe, scale, store, run)
        where = f"{recipe.name} ({scale}) {run['row']} | {run['column']} | seed {run['seed']}"
        agree += not why
        if why:
            run["stale"] = why
        else:
            run.pop("stale", None)
        report(f"{where}: {why or 'agrees'}")
    store.write()
    return agree, len(chosen) - agree


def _chosen(store: Store, count: int) -> list[dict[str, Any]]:
    """Some runs, the same every time, spread over the cells."""
    return sorted(store.runs.values(), key=lambda run: hashlib.sha256(run["key"].encode()).digest())[:count]


def _disagreement(recipe: Recipe, scale: str, store: Store, run: Mapping[str, Any]) -> str:
    """Why a stored run does not agree with the same run now; "" if it does."""
    rows, columns = recipe.lines(scale)
    row = next((line for line in rows if line.label == run["row"]), None)
    column = next((line for line in columns if line.label == run["column"]), None)
    if row is None or column is None:
        return "the recipe has no such cell any more"
    again = work(recipe, scale, row, column, run["seed"], *run["changes"])
    if again.key != run["key"]:
        return "the recipe has changed since"
    found = cells.run(again.document, again.limits, again.by_round)["result"]
    stored = run["result"]
    if same_kind(store.origins.get(str(run.get("origin")), {}), origin()):
        same = found["model_sha256"] == stored["model_sha256"]
        return "" if same else f"another model: accuracy {found['accuracy']:.4f}, stored {stored['accuracy']:.4f}"
    off, spread = abs(found["accuracy"] - stored["accuracy"]), _spread(store, run)
    told = f"accuracy {found['accuracy']:.4f}, stored {stored['accuracy']:.4f}"
    return "" if off <= spread else f"{told}: further apart than the seeds ({spread:.4f})"


def _spread(store: Store, run: Mapping[str, Any]) -> float:
    """From the worst to the best seed of the run's cell."""
    values = [
        float(other["result"]["accuracy"])
        for other in store.runs.values()
        if all(other[name] == run[name] for name in ("row", "column", "changes"))
    ]
    return max(LEAST_SPREAD, max(values) - min(values))
