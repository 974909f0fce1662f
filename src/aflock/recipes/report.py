"""docs/reproduction.md: the paper's numbers beside ours, from stored results alone; nothing is typed in by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..reports.figures import panels_figure
from ..reports.tables import half_interval
from ..system.files import write_whole
from . import rounds
from .cells import TUNING_SEED
from .claims import Grid, judge
from .recipe import SCALES, Recipe, names, read

BUDGETS = {
    "versions": "server steps, as in the paper",
    "uploads": "equal uploads",
    "time": "equal virtual time",
    "accuracy": "when the accuracy is reached first",
}
FAR = 0.02
"""Two points: a cell of the paper's own set-up that is further from its number is marked."""

_FORMS = {"accuracy": ".3f", "loss": ".4g", "time": ".3g"}

Runs = dict[tuple[str, str], list[dict[str, Any]]]


def write(results: Path, file: Path) -> list[str]:
    """Writes the page and its figures; returns the names of what is in it."""
    parts, shown = [_HEAD], []
    for name in names():
        recipe = read(name)
        for scale in SCALES:
            stored = results / f"{name}.{scale}.json"
            if scale != "smoke" and stored.is_file():
                document = json.loads(stored.read_text(encoding="utf-8"))
                parts.append(section(recipe, scale, document, file.parent / "reproduction"))
                shown.append(f"{name} ({scale})")
    write_whole(file, "\n".join(parts) + "\n")
    return shown


_HEAD = """# Reproduction

The tables and figures of the five papers, run with `aflock reproduce NAME --scale SCALE`. This page is made from the
files in `results/` by `aflock reproduction`; nothing in it is typed in by hand.

A cell is the mean over the seeds with half its 95 % interval, and the paper's number in brackets; **bold** where, at
scale `paper`, the two are more than two points apart. At scale `laptop` model, data or horizon is smaller, and only the
order of cells can be compared. A claim *holds* if the paired differences over the seeds are on its side, beyond
their 95 % interval, everywhere it is made; it *fails* if they are on the other side anywhere; else it is *open*.
Learning rates are chosen, where there is a grid, per rule and on a seed of its own, by test accuracy. The grids of
scale `laptop` are ours; their ranges were found by looking at runs, some of them on seed 0, also a seed of the results.
"""


def section(recipe: Recipe, scale: str, document: Mapping[str, Any], figures: Path) -> str:
    """One recipe: what was run, its tables, its claims, its figure."""
    runs = grouped(recipe, scale, document)
    seeds = max((len(found) for found in runs.values()), default=0)
    lines = [f"## {recipe.name}: {recipe.title}", ""]
    lines += [f"Paper {recipe.paper}, {recipe.where}. Scale `{scale}`: {document['says']} Seeds: {seeds}.", ""]
    lines += [f"- {note}" for note in recipe.notes] + ([""] if recipe.notes else [])
    for axis, grid in budgets(recipe, runs).items():
        lines += [f"**{BUDGETS.get(axis, 'at the end')}**", "", *table(recipe, scale, grid, axis, runs), ""]
        lines += [*verdicts(recipe, grid), ""] if recipe.claims else []
    if recipe.rounds:
        lines += [*by_round(runs), ""]
    if recipe.explained:
        lines += [f"Likely reasons for what differs: {recipe.explained}", ""]
    lines += _tuned(recipe, scale, runs)
    figure = figures / f"{recipe.name}.{scale}.png"
    if recipe.metric in ("accuracy", "loss", "time"):
        draw(recipe, scale, runs, figure)
        lines += [f"![{recipe.title}]({figures.name}/{figure.name})", ""]
    return "\n".join(lines)


def grouped(recipe: Recipe, scale: str, document: Mapping[str, Any]) -> Runs:
    """The runs of every cell in the order of their seeds; the tuning runs aside."""
    rows, columns = recipe.lines(scale)
    runs: Runs = {(row.label, column.label): [] for row in rows for column in columns}
    for run in sorted(document["runs"], key=lambda run: run["seed"]):
        if run["seed"] != TUNING_SEED and (run["row"], run["column"]) in runs:
            runs[run["row"], run["column"]].append(run)
    return {cell: found for cell, found in runs.items() if found}


def budgets(recipe: Recipe, runs: Runs) -> dict[str, Grid]:
    """Accuracy per cell and seed at each budget: the stored ones, and the earliest end in each column for time."""
    grids: dict[str, Grid] = {}
    stored = dict.fromkeys(axis for found in runs.values() for run in found for axis in run["at"])
    for axis in stored:
        values = {cell: [run["at"][axis] for run in found] for cell, found in runs.items()}
        grids[axis] = {cell: [float(at[recipe.metric]) for at in found] for cell, found in values.items() if all(found)}
    if not stored:
        grids["end"] = {
            cell: [float(run["result"][recipe.metric]) for run in found]
            for cell, found in runs.items()
            if not _diverged(found)
        }
    elif "accuracy" not in stored and _has_clock(runs):
        grids["time"] = _equal_time(recipe, runs)
    return grids


def _diverged(found: Sequence[Mapping[str, Any]]) -> bool:
    return any("diverged" in run for run in found)


def _has_clock(runs: Runs) -> bool:
    """Whether time is more than the number of server steps, as it is in the protocol `sampled`."""
    results = [run["result"] for found in runs.values() for run in found]
    return any(abs(result["virtual_time"] - result["versions"]) > 1.5 for result in results)


def _equal_time(recipe: Recipe, runs: Runs) -> Grid:
    place = {"accuracy": 3, "loss": 4}[recipe.metric]
    ends: dict[str, float] = {}
    runs = {cell: found for cell, found in runs.items() if not _diverged(found)}
    for (_, column), found in runs.items():
        ends[column] = min([ends.get(column, float("inf")), *(run["curve"][-1][2] for run in found)])
    grid = {}
    for cell, found in runs.items():
        inside = [[point for point in run["curve"] if point[2] <= ends[cell[1]]] for run in found]
        grid[cell] = [float(points[-1][place]) for points in inside]
    return grid


def table(recipe: Recipe, scale: str, grid: Grid, axis: str, runs: Runs) -> list[str]:
    """Markdown: rows x columns, ours and, where it is what the paper counts, the paper's."""
    rows, columns = recipe.lines(scale)
    lines = ["| | " + " | ".join(column.label for column in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        cells = []
        for column in columns:
            at, paper = (row.label, column.label), recipe.value(row, column) if axis in (recipe.counts, "end") else None
            far = FAR if scale == "paper" else math.inf
            text = _cell(grid.get(at), paper, _FORMS.get(recipe.metric, ",.0f"), far)
            cells.append(f"diverged {text}".strip() if _diverged(runs.get(at, [])) else text)
        lines.append(f"| {row.label} | " + " | ".join(cells) + " |")
    return lines


def _cell(found: Sequence[float] | None, paper: float | None, form: str, limit: float) -> str:
    beside = "" if paper is None else f"[{paper:{form}}]"
    if not found:
        return beside
    mean = sum(found) / len(found)
    half = half_interval(found) if len(found) > 1 else 0.0
    text = f"{mean:{form}}" + (f" ± {half:{form}}" if half else "")
    far = paper is not None and abs(mean - paper) > limit
    return f"{f'**{text}**' if far else text} {beside}".strip()


def verdicts(recipe: Recipe, grid: Grid) -> list[str]:
    """Every claim and what became of it."""
    found = [judge(claim, grid) for claim in recipe.claims]
    return [f"- *{verdict.outcome}*: {verdict.says} ({verdict.detail})" for verdict in found]


def by_round(runs: Runs) -> list[str]:
    """Who took part and how long rounds waited, over all seeds."""
    lines = [
        "**round by round**",
        "",
        "| | rounds | clients per round | busiest client, rounds (per seed) | longest delay by clients in the round |",
        "|---|---|---|---|---|",
    ]
    for (row, column), found in runs.items():
        each = [rounds.loaded(run["rounds"]) for run in found]
        every = [one for run in each for one in run]
        if len(every) <= len(each):  # a single round per seed says nothing of the kind
            continue
        size = sum(len(one.clients) for one in every) / len(every)
        busiest = ", ".join(f"{rounds.busiest(run)} of {len(run)}" for run in each)
        delays = ", ".join(f"{count}: {delay:.2f}" for count, delay in rounds.delay_by_size(every).items() if delay)
        lines.append(f"| {row}, {column} | {len(every)} | {size:.1f} | {busiest} | {delays or 'no clock'} |")
    return lines


def _tuned(recipe: Recipe, scale: str, runs: Runs) -> list[str]:
    if recipe.tune is None:
        return []
    by_row: dict[str, list[str]] = {}
    for (row, _), found in runs.items():
        by_row.setdefault(row, []).append(_choice(recipe, scale, found[0]["changes"]))
    listed = "; ".join(f"{row}: {', '.join(dict.fromkeys(values))}" for row, values in by_row.items())
    return [f"Chosen `{recipe.tune.key}`: {listed}.", ""]


def _choice(recipe: Recipe, scale: str, changes: Sequence[str]) -> str:
    """The value a row chose; one at an end of the grid might have been better beyond it, and says so."""
    if not changes:
        return "none"
    assert recipe.tune is not None
    value = changes[0].partition("=")[2]
    grid = recipe.scale(scale).grid or recipe.tune.grid
    end = "lowest" if float(value) == min(grid) else "highest" if float(value) == max(grid) else ""
    return f"{value} ({end} of the grid)" if end and len(grid) > 1 else value


def draw(recipe: Recipe, scale: str, runs: Runs, file: Path) -> None:
    """Accuracy (or loss) against uploads, one panel per column, at most six of them."""
    _, columns = recipe.lines(scale)
    panels = {}
    for column in columns[:6]:
        curves = {row: [_named(run) for run in found] for (row, at), found in runs.items() if at == column.label}
        if curves:
            panels[column.label] = curves
    file.parent.mkdir(parents=True, exist_ok=True)
    axis, metric = ("time", "accuracy") if recipe.metric == "time" else ("uploads", recipe.metric)
    panels_figure(file, panels, axis, f"{recipe.name}, {scale}: {recipe.title}", metric)


def _named(run: Mapping[str, Any]) -> list[dict[str, float]]:
    keys = ("uploads", "versions", "time", "accuracy", "loss")
    return [dict(zip(keys, point, strict=True)) for point in run["curve"]]


def text(recipe: Recipe, scale: str, document: Mapping[str, Any]) -> str:
    """The tables and claims of one recipe, for a terminal."""
    lines = [f"{recipe.name} ({scale}): {recipe.title}; {document['says']}"]
    runs = grouped(recipe, scale, document)
    for axis, grid in budgets(recipe, runs).items():
        lines += ["", f"{BUDGETS.get(axis, 'at the end')}:", *table(recipe, scale, grid, axis, runs)]
        lines += verdicts(recipe, grid)
    if recipe.rounds:
        lines += ["", *by_round(runs)]
    return "\n".join(lines)
