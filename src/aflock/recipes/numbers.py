"""The numbers of stored runs: per cell and seed, read off at each budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .cells import TUNING_SEED
from .claims import Grid
from .recipe import Recipe

Runs = dict[tuple[str, str], list[dict[str, Any]]]
"""The runs of every cell, in the order of their seeds."""


def grouped(recipe: Recipe, scale: str, document: Mapping[str, Any]) -> Runs:
    """The runs of every cell in the order of their seeds; the tuning runs aside."""
    rows, columns = recipe.lines(scale)
    runs: Runs = {(row.label, column.label): [] for row in rows for column in columns}
    for run in sorted(document["runs"], key=lambda run: run["seed"]):
        if run["seed"] != TUNING_SEED and (run["row"], run["column"]) in runs:
            runs[run["row"], run["column"]].append(run)
    return {cell: found for cell, found in runs.items() if found}


def budgets(recipe: Recipe, runs: Runs) -> dict[str, Grid]:
    """The metric per cell and seed at each budget: the stored ones, and the earliest end in each column for time."""
    grids: dict[str, Grid] = {}
    stored = dict.fromkeys(axis for found in runs.values() for run in found for axis in run["at"])
    for axis in stored:
        values = {cell: {run["seed"]: run["at"][axis] for run in found} for cell, found in runs.items()}
        grids[axis] = {
            cell: {seed: float(at[recipe.metric]) for seed, at in found.items()}
            for cell, found in values.items()
            if all(found.values())
        }
    if not stored:
        grids["end"] = {
            cell: {run["seed"]: float(run["result"][recipe.metric]) for run in found}
            for cell, found in runs.items()
            if not has_diverged(found)
        }
    elif "accuracy" not in stored and _has_clock(runs):
        grids["time"] = _equal_time(recipe, runs)
    return grids


def judged_grid(recipe: Recipe, runs: Runs) -> Grid:
    """The numbers at the budget that the paper counts."""
    grids = budgets(recipe, runs)
    return grids.get(recipe.counts) or grids.get("end") or next(iter(grids.values()), {})


def has_diverged(found: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run of a cell has diverged."""
    return any("diverged" in run for run in found)


def _has_clock(runs: Runs) -> bool:
    """Whether time is more than the number of server steps, as it is in the protocol `sampled`."""
    results = [run["result"] for found in runs.values() for run in found]
    return any(abs(result["virtual_time"] - result["versions"]) > 1.5 for result in results)


def _equal_time(recipe: Recipe, runs: Runs) -> Grid:
    column_of_metric = {"accuracy": 3, "loss": 4}[recipe.metric]
    ends: dict[str, float] = {}
    runs = {cell: found for cell, found in runs.items() if not has_diverged(found)}
    for (_, column), found in runs.items():
        ends[column] = min([ends.get(column, float("inf")), *(run["curve"][-1][2] for run in found)])
    grid = {}
    for cell, found in runs.items():
        inside = {run["seed"]: [point for point in run["curve"] if point[2] <= ends[cell[1]]] for run in found}
        grid[cell] = {seed: float(points[-1][column_of_metric]) for seed, points in inside.items()}
    return grid
