"""What a paper says about its numbers, as comparisons of cells.

    {says, kind = "better", row = "ACE", than = ["FedBuff", ...], columns = [...]}      in every column
    {says, kind = "near", column = "asynchrony", to = "synchrony", within = 0.02}       in every row
    {says, kind = "falling", columns = ["p=10", "p=5", ...]} or rows = [...]             from first to last
    {says, kind = "steadier", row = "ACE", than = [...], columns = ["easy", "hard"]}     it loses less on the way
    {says, kind = "below", value = 0.835, rows = [...]}                                  in every column

A comparison is a difference that the claim says is positive, taken seed by seed: the same seed is the same data, split
and schedule in both cells. `verdicts.py` judges the comparisons of a claim together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Cell = tuple[str, str]
"""A row and a column."""

Grid = Mapping[Cell, Mapping[int, float]]
"""Of every cell that was run: seed -> number."""

Terms = tuple[tuple[int, Cell], ...]
"""A difference as a sum of cells, each with its sign."""

TWO_POINTS = 0.02
"""The difference that is looked for where the paper gives no numbers."""


@dataclass(frozen=True)
class Comparison:
    """One difference that should be positive."""

    where: str
    cells: tuple[Cell, ...]
    differences: tuple[float, ...]
    """One per seed that all the cells have."""
    claimed: float
    """The difference in the paper's own numbers; TWO_POINTS where it has none."""
    printed: bool = False
    """Whether the paper prints these numbers."""
    margin: float = 0.0
    """What a claim of nearness has added to the differences."""


def comparisons(
    claim: Mapping[str, Any], grid: Grid, paper: Callable[[Cell], float | None] = lambda cell: None
) -> list[Comparison]:
    """All comparisons of a claim between cells that were run; `paper` knows the paper's numbers."""
    found = []
    for where, terms in _terms(claim, grid):
        cells = tuple(cell for _, cell in terms)
        if all(cell in grid for cell in cells):
            margin = float(claim["within"]) if claim["kind"] == "near" else 0.0
            seeds = sorted(set.intersection(*(set(grid[cell]) for cell in cells)))
            constant = margin + (float(claim["value"]) if claim["kind"] == "below" else 0.0)
            differences = tuple(constant + sum(sign * grid[cell][seed] for sign, cell in terms) for seed in seeds)
            printed = claim["kind"] not in ("near", "below") and all(paper(cell) is not None for cell in cells)
            found.append(Comparison(where, cells, differences, _claimed(claim, terms, paper), printed, margin))
    return found


def _claimed(claim: Mapping[str, Any], terms: Terms, paper: Callable[[Cell], float | None]) -> float:
    if claim["kind"] == "near":
        return float(claim["within"])
    values = [(sign, paper(cell)) for sign, cell in terms]
    if "difference" in claim or claim["kind"] == "below" or any(value is None for _, value in values):
        return float(claim.get("difference", TWO_POINTS))
    return sum(sign * value for sign, value in values if value is not None) or TWO_POINTS


def _terms(claim: Mapping[str, Any], grid: Grid) -> Iterator[tuple[str, Terms]]:
    """The differences of a claim: where, and the cells with their signs."""
    rows = claim.get("rows") or list(dict.fromkeys(row for row, _ in grid))
    columns = claim.get("columns") or list(dict.fromkeys(column for _, column in grid))
    match claim["kind"]:
        case "better":
            for column in columns:
                for other in claim["than"]:
                    where = f"{claim['row']} minus {other}, {column}"
                    yield where, ((1, (claim["row"], column)), (-1, (other, column)))
        case "near":
            for row in rows:
                where = f"{claim['column']} minus {claim['to']}, {row}"
                yield where, ((1, (row, claim["column"])), (-1, (row, claim["to"])))
        case "below":
            for row in rows:
                for column in columns:
                    yield f"{claim['value']:g} minus {row}, {column}", ((-1, (row, column)),)
        case "steadier":
            easy, hard = columns
            for other in claim["than"]:
                loses = ((1, (other, easy)), (-1, (other, hard)), (-1, (claim["row"], easy)), (1, (claim["row"], hard)))
                yield f"what {other} loses minus what {claim['row']} loses, {easy} to {hard}", loses
        case "falling" if "columns" in claim:
            for row in rows:
                for first, second in pairwise(columns):
                    yield f"{row}: {first} minus {second}", ((1, (row, first)), (-1, (row, second)))
        case "falling":
            for column in columns:
                for first, second in pairwise(rows):
                    yield f"{column}: {first} minus {second}", ((1, (first, column)), (-1, (second, column)))
