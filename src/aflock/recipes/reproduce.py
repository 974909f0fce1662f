"""Running a recipe: cell by cell, in parallel, each stored as soon as it is there; a killed one goes on where it was.

results/NAME.SCALE.json holds one record per finished run. A record is found again by a hash of what the recipe says of
it, so that a changed recipe runs anew what changed and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..system import threads
from ..system.files import to_json, write_whole
from . import cells
from .recipe import Line, Recipe

Report = Callable[[str], None]


@dataclass(frozen=True)
class Work:
    """One run that is wanted."""

    row: Line
    column: Line
    seed: int
    changes: tuple[str, ...]
    document: dict[str, Any]
    limits: dict[str, float]
    by_round: bool
    key: str


class Store:
    """The finished runs of a recipe at a scale, in one file."""

    def __init__(self, folder: Path, recipe: Recipe, scale: str) -> None:
        self.file = folder / f"{recipe.name}.{scale}.json"
        self._head = {"recipe": recipe.name, "scale": scale, "says": recipe.scale(scale).says}
        self.runs: dict[str, dict[str, Any]] = {}
        if self.file.is_file():
            self.runs = {run["key"]: run for run in json.loads(self.file.read_text(encoding="utf-8"))["runs"]}

    def add(self, work: Work, found: dict[str, Any]) -> None:
        """Stores one run; the file is replaced whole."""
        head = {"key": work.key, "row": work.row.label, "column": work.column.label, "seed": work.seed}
        self.runs[work.key] = head | {"changes": list(work.changes)} | found
        self._write()

    def keep(self, keys: set[str]) -> None:
        """Drops runs of an earlier form of the recipe."""
        if not set(self.runs) <= keys:
            self.runs = {key: run for key, run in self.runs.items() if key in keys}
            self._write()

    def _write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        ordered = sorted(self.runs.values(), key=lambda run: (run["row"], run["column"], run["seed"], run["key"]))
        lines = ",\n".join(to_json(run) for run in ordered)
        text = json.dumps(self._head)[:-1] + ', "runs": [\n' + lines + "\n]}\n"
        write_whole(self.file, text)


def reproduce(
    recipe: Recipe, scale: str, folder: Path, *, seeds: int | None = None, jobs: int = 1, report: Report
) -> dict[str, Any]:
    """Runs what is missing; returns the stored document."""
    store = Store(folder, recipe, scale)
    count = seeds or recipe.scale(scale).seeds
    tuning = list(_tuning(recipe, scale))
    _run_missing(store, tuning, jobs, report, "tuning")
    wanted = list(_wanted(recipe, scale, count, store, tuning))
    _run_missing(store, wanted, jobs, report, "runs")
    store.keep({work.key for work in [*tuning, *wanted]})
    document: dict[str, Any] = json.loads(store.file.read_text(encoding="utf-8"))
    return document


def _work(recipe: Recipe, scale: str, row: Line, column: Line, seed: int, *changes: str) -> Work:
    document, limits = recipe.cell(scale, row, column, seed, *changes).resolved(), recipe.limits_at(scale)
    made_of = key(recipe, scale, row, column, seed, *changes)
    return Work(row, column, seed, changes, document, limits, recipe.rounds, made_of)


def key(recipe: Recipe, scale: str, row: Line, column: Line, seed: int, *changes: str) -> str:
    """What makes a run what it is: all that the recipe says of it, and no labels."""
    said = [row.set, column.set, recipe.scale(scale).changes(row), changes]
    parts = [recipe.experiment, said, seed, recipe.limits_at(scale), *(["rounds"] if recipe.rounds else [])]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _tuning(recipe: Recipe, scale: str) -> Iterator[Work]:
    if recipe.tune is None:
        return
    grid = recipe.scale(scale).grid or recipe.tune.grid
    for row, column in _tuned_cells(recipe, scale):
        for value in grid:
            yield _work(recipe, scale, row, column, cells.TUNING_SEED, f"{recipe.tune.key}={value!r}")


def _tuned_cells(recipe: Recipe, scale: str) -> Iterator[tuple[Line, Line]]:
    rows, columns = recipe.lines(scale)
    assert recipe.tune is not None
    for row in rows:
        for column in columns:
            if row.tune and recipe.tune.column in (None, column.label):
                yield row, column


def _wanted(recipe: Recipe, scale: str, seeds: int, store: Store, tuning: list[Work]) -> Iterator[Work]:
    rows, columns = recipe.lines(scale)
    for row in rows:
        for column in columns:
            changes = _best(recipe, store, tuning, row, column)
            for seed in range(seeds):
                yield _work(recipe, scale, row, column, seed, *changes)


def _best(recipe: Recipe, store: Store, tuning: list[Work], row: Line, column: Line) -> tuple[str, ...]:
    """The change that did best on the tuning seed, by what the paper counts."""
    if recipe.tune is None or not row.tune:
        return ()
    where = recipe.tune.column or column.label
    tried = [work for work in tuning if work.row == row and work.column.label == where]

    def score(work: Work) -> float:
        run = store.runs[work.key]
        if "diverged" in run:
            return -math.inf
        found = run["at"].get(recipe.counts) or run["result"]
        return -float(found["loss"]) if recipe.metric == "loss" else float(found["accuracy"])

    return max(tried, key=score).changes


def _run_missing(store: Store, works: list[Work], jobs: int, report: Report, what: str) -> None:
    missing = [work for work in works if work.key not in store.runs]
    done = len(works) - len(missing)
    if not missing:
        return
    report(f"{what}: {done} of {len(works)} there, {len(missing)} to do")
    for count, (work, found) in enumerate(_results(missing, jobs), done + 1):
        store.add(work, found)
        result, changes = found["result"], " ".join(work.changes)
        where = f"{work.row.label} | {work.column.label} | seed {work.seed} {changes}".strip()
        came = "diverged" if "diverged" in found else f"accuracy {result['accuracy']:.4f}, loss {result['loss']:.4f}"
        report(f"{what} {count}/{len(works)}  {where}: {came}")


def _results(works: list[Work], jobs: int) -> Iterator[tuple[Work, dict[str, Any]]]:
    """The runs as they end: one after the other in this process, or side by side in several."""
    if jobs == 1:
        yield from ((work, cells.run(work.document, work.limits, work.by_round)) for work in works)
        return
    context, count = multiprocessing.get_context("spawn"), min(jobs, len(works))
    with threads.one_thread_for_children(), ProcessPoolExecutor(max_workers=count, mp_context=context) as pool:
        waiting = {pool.submit(cells.run, work.document, work.limits, work.by_round): work for work in works}
        try:
            while waiting:
                finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in finished:
                    yield waiting.pop(future), future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
