"""What a paper says about its numbers, checked on ours.

    {says, kind = "better", row = "ACE", than = ["FedBuff", ...], columns = [...]}      in every column
    {says, kind = "near", column = "asynchrony", to = "synchrony", within = 0.02}       in every row
    {says, kind = "falling", columns = ["p=10", "p=5", ...]} or rows = [...]             from first to last
    {says, kind = "steadier", row = "ACE", than = [...], columns = ["easy", "hard"]}     it loses less on the way

A difference counts as such when the 95 % interval of its mean over the seeds (paired: same seed, same data, same
schedule) leaves zero out. A claim holds if it is so everywhere it is made, fails if the contrary is so anywhere, and is
open else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..reports.tables import half_interval

Grid = Mapping[tuple[str, str], Sequence[float]]
"""Per (row, column), one number per seed."""


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds, and where it was decided."""

    says: str
    outcome: str  # "holds", "fails" or "open"
    detail: str


def judge(claim: Mapping[str, Any], grid: Grid) -> Verdict:
    """Checks one claim."""
    pairs = list(_pairs(claim, grid))
    signs = [(_sign(differences), where) for differences, where in pairs]
    against = [where for sign, where in signs if sign < 0]
    undecided = [where for sign, where in signs if sign == 0]
    held = len(signs) - len(against) - len(undecided)
    outcome = "fails" if against else "open" if undecided or not signs else "holds"
    detail = f"{held} of {len(signs)} comparisons"
    if against:
        detail += f"; the contrary in {_some(against)}"
    if undecided:
        detail += f"; undecided in {_some(undecided)}"
    return Verdict(str(claim["says"]), outcome, detail)


def _some(places: list[str]) -> str:
    return "; ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")


def _pairs(claim: Mapping[str, Any], grid: Grid) -> Iterator[tuple[list[float], str]]:
    """Differences that should be positive, with where they come from."""
    rows = claim.get("rows") or list(dict.fromkeys(row for row, _ in grid))
    columns = claim.get("columns") or list(dict.fromkeys(column for _, column in grid))
    match claim["kind"]:
        case "better":
            for column in columns:
                for other in claim["than"]:
                    if (claim["row"], column) in grid and (other, column) in grid:
                        yield _minus(grid[claim["row"], column], grid[other, column]), f"{other}, {column}"
        case "near":
            for row in rows:
                if (row, claim["column"]) in grid and (row, claim["to"]) in grid:
                    gap = _minus(grid[row, claim["column"]], grid[row, claim["to"]])
                    yield [x + claim["within"] for x in gap], row
        case "steadier":
            easy, hard = columns
            for other in claim["than"]:
                if all((row, column) in grid for row in (claim["row"], other) for column in columns):
                    loses = [_minus(grid[row, easy], grid[row, hard]) for row in (other, claim["row"])]
                    yield _minus(*loses), f"{other}, {easy} to {hard}"
        case "falling" if "columns" in claim:
            for row in rows:
                for first, second in pairwise(columns):
                    if (row, first) in grid and (row, second) in grid:
                        yield _minus(grid[row, first], grid[row, second]), f"{row}, {first} to {second}"
        case "falling":
            for column in columns:
                for first, second in pairwise(rows):
                    if (first, column) in grid and (second, column) in grid:
                        yield _minus(grid[first, column], grid[second, column]), f"{column}, {first} to {second}"


def _minus(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=False)]


def _sign(differences: Sequence[float]) -> int:
    """1 or -1 if the mean is surely on that side of zero, else 0."""
    mean = sum(differences) / len(differences)
    half = half_interval(differences) if len(differences) > 1 else 0.0
    return (mean > half) - (mean < -half)
