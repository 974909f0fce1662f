"""The finished runs of a recipe at a scale, in one file of results/: one line per run, and what it came from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..system.files import to_json, write_whole
from .origin import origin
from .recipe import Line, Recipe


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
    """A hash of what the recipe says of the run: a changed recipe runs anew what changed, and nothing else."""


class Store:
    """The runs by their keys."""

    def __init__(self, folder: Path, recipe: Recipe, scale: str) -> None:
        self.file = folder / f"{recipe.name}.{scale}.json"
        self._head = {"recipe": recipe.name, "scale": scale, "says": recipe.scale(scale).says}
        self.runs: dict[str, dict[str, Any]] = {}
        self.origins: dict[str, dict[str, str]] = {}
        if self.file.is_file():
            stored = json.loads(self.file.read_text(encoding="utf-8"))
            self.runs = {run["key"]: run for run in stored["runs"]}
            self.origins = stored.get("origins", {})

    def has(self, key: str) -> bool:
        """Whether the run is there and was not found to be stale."""
        return key in self.runs and "stale" not in self.runs[key]

    def add(self, work: Work, found: dict[str, Any]) -> None:
        """Stores one run and where it came from; the file is replaced whole."""
        made_by = origin()
        name = hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()[:8]
        self.origins[name] = made_by
        head = {"key": work.key, "row": work.row.label, "column": work.column.label, "seed": work.seed}
        self.runs[work.key] = head | {"changes": list(work.changes), "origin": name} | found
        self.write()

    def keep(self, keys: set[str]) -> None:
        """Drops runs of an earlier form of the recipe."""
        if not set(self.runs) <= keys:
            self.runs = {key: run for key, run in self.runs.items() if key in keys}
            self.write()

    def write(self) -> None:
        """Writes the file, whole or not at all."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        document = self.document()
        lines = ",\n".join(to_json(run) for run in document.pop("runs"))
        write_whole(self.file, json.dumps(document)[:-1] + ', "runs": [\n' + lines + "\n]}\n")

    def document(self) -> dict[str, Any]:
        """What the file holds: the runs in the order of rows, columns and seeds."""
        ordered = sorted(self.runs.values(), key=lambda run: (run["row"], run["column"], run["seed"], run["key"]))
        used = {str(run.get("origin")) for run in ordered}
        origins = {name: found for name, found in self.origins.items() if name in used}
        return {**self._head, "origins": origins, "runs": ordered}
