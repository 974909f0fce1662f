"""Running a recipe: cell by cell, in parallel, each stored as soon as it is there; a killed one goes on where it was.

1. Every row that is tuned tries the grid on a seed that is not reported. A grid whose best value is at its end is
   extended by the same ratio until it is not, or until EXTENSIONS values were added on that side.
2. Every cell is run with the value its row has chosen, on the scale's seeds.
3. Seeds are added to the cells of a claim until its half intervals are below a third of the difference that the paper
   claims, or until the scale's `most_seeds`.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import AflockError
from ..system import ray_tasks, threads
from ..system.ray_cluster import Cluster
from . import cells
from .claims import comparisons
from .numbers import grouped, judged_grid
from .recipe import Line, Recipe
from .store import Store, Work
from .verdicts import needs_seeds

Report = Callable[[str], None]

RunAll = Callable[[Sequence[Work]], Iterator[tuple[Work, dict[str, Any]]]]
"""Makes runs, and yields each when it has ended."""

EXTENSIONS = 6
"""Values that are added to a grid on one side, at most."""


def reproduce(
    recipe: Recipe,
    scale: str,
    folder: Path,
    *,
    seeds: int | None = None,
    jobs: int = 1,
    executor: str = "auto",
    address: str | None = None,
    report: Report,
) -> dict[str, Any]:
    """Runs what is missing; returns the stored document. With `seeds`, exactly that many per cell.

    `jobs` runs go side by side, in processes or, with the executor ray, as tasks of a cluster.
    """
    jobs = 1 if executor == "inline" else jobs
    run_all: RunAll = partial(_results, jobs=jobs)
    if executor == "ray":
        report("every run is one task of the Ray cluster: whole runs need no exchange with this process")
        run_all = partial(_results_of_cluster, address=address, jobs=jobs)
    store = Store(folder, recipe, scale)
    count = seeds or recipe.scale(scale).seeds
    tuning = _tune(recipe, scale, store, run_all, report)
    works = {work.key: work for work in _wanted(recipe, scale, range(count), store, tuning)}
    _run_missing(store, works.values(), run_all, report, "runs")
    most = count if seeds else max(count, recipe.scale(scale).most_seeds or 0)
    while more := list(_more_seeds(recipe, scale, store, tuning, list(works.values()), most)):
        works |= {work.key: work for work in more}
        _run_missing(store, more, run_all, report, "more seeds")
    kept = {work.key for work in tuning} | set(works)
    kept |= {name for name, run in store.runs.items() if _is_further_seed(recipe, scale, run, works.values())}
    store.keep(kept)
    return store.document()


def _is_further_seed(recipe: Recipe, scale: str, run: dict[str, Any], works: Iterable[Work]) -> bool:
    """Whether a stored run is one more seed of a wanted cell, from a call that asked for more."""
    cell = (run["row"], run["column"])
    same = next((each for each in works if (each.row.label, each.column.label) == cell), None)
    if same is None or run["seed"] >= cells.TUNING_SEED:
        return False
    return bool(run["key"] == key(recipe, scale, same.row, same.column, run["seed"], *same.changes))


def work(recipe: Recipe, scale: str, row: Line, column: Line, seed: int, *changes: str) -> Work:
    """One run of a cell."""
    document, limits = recipe.cell(scale, row, column, seed, *changes).resolved(), recipe.limits_at(scale)
    made_of = key(recipe, scale, row, column, seed, *changes)
    return Work(row, column, seed, changes, document, limits, recipe.rounds, made_of)


def key(recipe: Recipe, scale: str, row: Line, column: Line, seed: int, *changes: str) -> str:
    """What makes a run what it is: all that the recipe says of it, and no labels."""
    said = [row.set, column.set, recipe.scale(scale).changes(row), changes]
    parts = [recipe.experiment, said, seed, recipe.limits_at(scale), *(["rounds"] if recipe.rounds else [])]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- tuning ----------------------------------------------------------------------------------------------------------


def _tune(recipe: Recipe, scale: str, store: Store, run_all: RunAll, report: Report) -> list[Work]:
    """Runs the grids of all tuned cells until no best value is at an end; returns all tuning runs."""
    if recipe.tune is None:
        return []
    begin = sorted(recipe.scale(scale).grid or recipe.tune.grid)
    grids = {cell: list(begin) for cell in _tuned_cells(recipe, scale)}
    while True:
        works = [
            work(recipe, scale, *cell, cells.TUNING_SEED, f"{recipe.tune.key}={value!r}")
            for cell, grid in grids.items()
            for value in grid
        ]
        _run_missing(store, works, run_all, report, "tuning")
        longer = {cell: _extended(recipe, store, works, cell, grid, begin) for cell, grid in grids.items()}
        if longer == grids:
            return works
        grids = longer


def _extended(
    recipe: Recipe, store: Store, works: Sequence[Work], cell: tuple[Line, Line], grid: list[float], begin: list[float]
) -> list[float]:
    """The grid with one value more beyond the end where its best value is, by the ratio of the last two."""
    if len(begin) < 2:
        return grid
    tried = [each for each in works if (each.row, each.column) == cell]
    best = grid[max(range(len(grid)), key=lambda k: _score(recipe, store, tried[k]))]
    below = sum(value < begin[0] for value in grid)
    above = sum(value > begin[-1] for value in grid)
    if best == grid[0] and below < EXTENSIONS:
        return [_rounded(grid[0] * grid[0] / grid[1]), *grid]
    if best == grid[-1] and above < EXTENSIONS:
        return [*grid, _rounded(grid[-1] * grid[-1] / grid[-2])]
    return grid


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _tuned_cells(recipe: Recipe, scale: str) -> Iterator[tuple[Line, Line]]:
    rows, columns = recipe.lines(scale)
    assert recipe.tune is not None
    for row in rows:
        for column in columns:
            if row.tune and recipe.tune.where(column.label) == column.label:
                yield row, column


def _score(recipe: Recipe, store: Store, tried: Work) -> float:
    """How well a tuning run did, by what the paper counts."""
    run = store.runs[tried.key]
    if "diverged" in run:
        return -math.inf
    found = run["at"].get(recipe.counts) or run["result"]
    score = -float(found["loss"]) if recipe.metric == "loss" else float(found["accuracy"])
    return -math.inf if math.isnan(score) else score


def _best(recipe: Recipe, store: Store, tuning: Sequence[Work], row: Line, column: Line) -> tuple[str, ...]:
    """The change that did best on the tuning seed."""
    if recipe.tune is None or not row.tune:
        return ()
    where = recipe.tune.where(column.label)
    tried = [each for each in tuning if each.row == row and each.column.label == where]
    return max(tried, key=lambda each: _score(recipe, store, each)).changes


# --- runs and their seeds --------------------------------------------------------------------------------------------


def _wanted(recipe: Recipe, scale: str, seeds: Iterable[int], store: Store, tuning: Sequence[Work]) -> Iterator[Work]:
    rows, columns = recipe.lines(scale)
    chosen = {(row, column): _best(recipe, store, tuning, row, column) for row in rows for column in columns}
    for seed in seeds:  # seed by seed, so that a recipe that is stopped has something of every cell
        for (row, column), changes in chosen.items():
            yield work(recipe, scale, row, column, seed, *changes)


def _more_seeds(
    recipe: Recipe, scale: str, store: Store, tuning: Sequence[Work], works: Sequence[Work], most: int
) -> Iterator[Work]:
    """One more seed for each cell of a comparison that cannot be judged yet."""
    document = {"runs": [store.runs[each.key] for each in works]}
    grid = judged_grid(recipe, grouped(recipe, scale, document))
    made = (each for claim in recipe.claims for each in comparisons(claim, grid, recipe.paper_value))
    wanting = {cell for each in made if needs_seeds(each) for cell in each.cells}
    rows, columns = recipe.lines(scale)
    for row in rows:
        for column in columns:
            seed = 1 + max(each.seed for each in works if (each.row, each.column) == (row, column))
            if (row.label, column.label) in wanting and seed < most:
                yield work(recipe, scale, row, column, seed, *_best(recipe, store, tuning, row, column))


def _run_missing(store: Store, works: Iterable[Work], run_all: RunAll, report: Report, what: str) -> None:
    wanted = list(works)
    missing = [each for each in wanted if not store.has(each.key)]
    done = len(wanted) - len(missing)
    if not missing:
        return
    report(f"{what}: {done} of {len(wanted)} there, {len(missing)} to do")
    begun = time.monotonic()
    for count, (each, found) in enumerate(run_all(missing), 1):
        store.add(each, found)
        left = (time.monotonic() - begun) / count * (len(missing) - count)
        report(f"{what} {done + count}/{len(wanted)}, {_minutes(left)} left  {_told(each, found)}")


def _told(each: Work, found: dict[str, Any]) -> str:
    result, changes = found["result"], " ".join(each.changes)
    where = f"{each.row.label} | {each.column.label} | seed {each.seed} {changes}".strip()
    came = "diverged" if "diverged" in found else f"accuracy {result['accuracy']:.4f}, loss {result['loss']:.4f}"
    return f"{where}: {came}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _results(works: Sequence[Work], jobs: int) -> Iterator[tuple[Work, dict[str, Any]]]:
    """The runs as they end: one after the other in this process, or side by side in several."""
    if jobs == 1:
        yield from ((each, cells.run(each.document, each.limits, each.by_round)) for each in works)
        return
    context, count = multiprocessing.get_context("spawn"), min(jobs, len(works))
    workers = ProcessPoolExecutor(count, context, cells.end_with_parent)
    with threads.one_thread_for_children(), workers as pool:
        waiting = {pool.submit(cells.run, each.document, each.limits, each.by_round): each for each in works}
        try:
            while waiting:
                finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in finished:
                    yield waiting.pop(future), future.result()
        except BrokenProcessPool:
            raise AflockError(
                "a worker process was killed, maybe for want of memory; what has ended is stored: run the same command "
                "again, with fewer --jobs"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _results_of_cluster(works: Sequence[Work], address: str | None, jobs: int) -> Iterator[tuple[Work, dict[str, Any]]]:
    """The runs as they end, each a task of a Ray cluster."""
    calls = [(each.document, each.limits, each.by_round) for each in works]
    with Cluster(address, cpus=jobs):
        for number, found in ray_tasks.results(cells.run, calls):
            yield works[number], found
