"""A recipe: a grid of experiments (rows x columns), what the paper found in each cell, and what it claims.

[recipe]            title, paper, where in it, where results are read off, notes on how it was read
[experiment.*]      the sections all cells share, as in an experiment file
[[rows]], [[columns]]    a label and the changes (section.key=value) that make it; tune = false: a row without a choice
[paper]             values = the paper's numbers, row by row; spread = what they were given with, if anything
[tune]              key and grid: each row picks the value that does best on a seed that is not reported. A grid whose
                    best value is at its end is extended until it is not
[[claims]]          what the paper says about its numbers, in a form that can be checked
[scale.*]           smoke, laptop and paper: changes, seeds, and in words what was shrunk
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from ..errors import InputError
from ..registry import unknown
from ..sim.experiment import Experiment

SCALES = ("smoke", "laptop", "cnn", "paper")


@dataclass(frozen=True)
class Line:
    """One row or one column."""

    label: str
    set: tuple[str, ...] = ()
    tune: bool = True
    """Whether a row takes part in the choice of a rate; one that claims to need none does not."""


@dataclass(frozen=True)
class Scale:
    """How large a recipe is run."""

    says: str
    set: tuple[str, ...] = ()
    seeds: int = 3
    most_seeds: int | None = None
    """Seeds are added, up to so many, until a claim can be judged; None: none are."""
    grid: tuple[float, ...] | None = None
    """A shorter grid to tune on."""
    limits: Mapping[str, float] | None = None
    rows: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    by_row: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Further changes, to some rows only."""

    def changes(self, row: Line) -> tuple[str, ...]:
        """What the scale changes in a row."""
        return (*self.set, *self.by_row.get(row.label, ()))


@dataclass(frozen=True)
class Tune:
    """One key that every row chooses for itself, on a seed that is not used again."""

    key: str
    grid: tuple[float, ...]
    column: str | Mapping[str, str] | None = None
    """Where it is chosen; None: in every column anew; a mapping: a column that it names takes another one's choice."""

    def where(self, column: str) -> str:
        """The column whose choice that column takes."""
        if isinstance(self.column, Mapping):
            return self.column.get(column, column)
        return self.column or column


@dataclass(frozen=True)
class Recipe:
    """One table or figure of a paper."""

    name: str
    title: str
    paper: str
    where: str
    """In the paper, for people."""
    experiment: Mapping[str, Any]
    rows: tuple[Line, ...]
    columns: tuple[Line, ...]
    scales: Mapping[str, Scale]
    limits: Mapping[str, float] = field(default_factory=dict)
    """Where results are read off, such as versions = 500 and uploads = 5000; empty: at the end."""
    counts: str = "versions"
    """Which of them is the paper's."""
    reading: str = ""
    """Which reading of the paper's set-up it is, where there are several."""
    notes: tuple[str, ...] = ()
    metric: str = "accuracy"
    percent: bool = True
    values: tuple[tuple[float | None, ...], ...] = ()
    explained: str = ""
    """Why cells may differ from the paper's by more than two points, once that is known."""
    rounds: bool = False
    """Whether who took part in each round, and its delay, are part of the result."""
    weights: bool = False
    """Whether the weights c_t of MR.AsyncFL, which follow from its rounds, are drawn; needs `rounds`."""
    tune: Tune | None = None
    claims: tuple[Mapping[str, Any], ...] = field(default=())

    def scale(self, name: str) -> Scale:
        """The scale of that name."""
        if name not in self.scales:
            raise InputError(f"{self.name} has no scale {name!r}; it has {', '.join(self.scales)}")
        return self.scales[name]

    def limits_at(self, scale: str) -> dict[str, float]:
        """Where results are read off at a scale."""
        chosen = self.scale(scale).limits
        return dict(self.limits if chosen is None else chosen)

    def lines(self, scale: str) -> tuple[list[Line], list[Line]]:
        """The rows and columns that are run at a scale."""
        chosen = self.scale(scale)
        rows = [row for row in self.rows if chosen.rows is None or row.label in chosen.rows]
        columns = [column for column in self.columns if chosen.columns is None or column.label in chosen.columns]
        return rows, columns

    def cell(self, scale: str, row: Line, column: Line, seed: int, *changes: str) -> Experiment:
        """The experiment of one cell; every seed in it is moved on by `seed`."""
        made = Experiment.build(self.experiment, [*row.set, *column.set, *self.scale(scale).changes(row), *changes])
        document = made.resolved()
        document["seeds"] = {name: value + seed for name, value in document["seeds"].items()}
        return Experiment.build(document)

    def value(self, row: Line, column: Line) -> float | None:
        """What the paper found, as a fraction if it is one."""
        if not self.values:
            return None
        found = self.values[self.rows.index(row)][self.columns.index(column)]
        return found / 100 if found is not None and self.percent else found

    def paper_value(self, cell: tuple[str, str]) -> float | None:
        """What the paper found in the cell of a row and a column."""
        rows = {row.label: row for row in self.rows}
        columns = {column.label: column for column in self.columns}
        return self.value(rows[cell[0]], columns[cell[1]])

    def describe(self) -> dict[str, Any]:
        """JSON values for `aflock list recipes --json`."""
        return {
            "name": self.name,
            "description": f"paper {self.paper}, {self.where}: {self.title}",
            "source": f"{len(self.rows)} x {len(self.columns)} cells; scales {', '.join(self.scales)}",
            "scales": {name: scale.says for name, scale in self.scales.items()},
            "parameters": [],
        }


def names() -> list[str]:
    """All recipes, in the order of the papers."""
    files = resources.files(__package__).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def read(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in names():
        raise unknown("recipe", name, names())
    text = resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return parse(name, tomllib.loads(text))


def entries() -> list[Recipe]:
    """Every recipe."""
    return [read(name) for name in names()]


def parse(name: str, document: Mapping[str, Any]) -> Recipe:
    """A recipe from its file; a mistake in it is an error that names the file."""
    try:
        head, paper = dict(document["recipe"]), dict(document.get("paper", {}))
        recipe = Recipe(
            name=name,
            experiment=document["experiment"],
            rows=tuple(_line(row) for row in document["rows"]),
            columns=tuple(_line(column) for column in document["columns"]),
            scales={key: _scale(value) for key, value in document["scale"].items()},
            values=tuple(tuple(_number(x) for x in row) for row in paper.get("values", ())),
            tune=_tune(document["tune"]) if "tune" in document else None,
            claims=tuple(document.get("claims", ())),
            **_tupled(head),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the recipe {name} is not complete: {error!r}") from None
    shape = {len(row) for row in recipe.values} | {len(recipe.columns)}
    if recipe.values and (len(recipe.values) != len(recipe.rows) or len(shape) != 1):
        raise InputError(f"the recipe {name} has {len(recipe.rows)} x {len(recipe.columns)} cells, but other numbers")
    return recipe


def _number(value: float | str) -> float | None:
    return None if value == "" else float(value)


def _line(value: Mapping[str, Any]) -> Line:
    return Line(**_tupled(value))


def _scale(value: Mapping[str, Any]) -> Scale:
    return Scale(**_tupled(value))


def _tupled(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(part) if isinstance(part, list) else part for key, part in value.items()}


def _tune(value: Mapping[str, Any]) -> Tune:
    return Tune(value["key"], tuple(value["grid"]), value.get("column"))
