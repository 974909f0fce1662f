"""docs/reproduction.md and one page per paper, from stored results alone; nothing is typed in by hand.

The first page is one table: every headline claim of the papers, our verdict, and how strong the evidence is. A paper's
page begins with a list of its tables and figures; it then shows, for each of its recipes, the figure, the table at the
budget the paper counts and the headline claims; all else is folded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InputError
from ..reports.figures import panels_figure, weights_figure
from ..reports.tables import half_interval
from ..system.files import write_whole
from . import rounds
from .claims import Grid
from .numbers import Runs, budgets, grouped, has_diverged, judged_grid
from .papers import PAPERS
from .recipe import SCALES, Recipe, names, read
from .verdicts import FAILS, HOLDS, OPEN, Verdict, judge, visible

BUDGETS = {
    "versions": "at equal server steps",
    "ticks": "at equal ticks",
    "uploads": "at equal uploads",
    "time": "at equal virtual time",
    "accuracy": "when the accuracy is reached first",
    "end": "at the end",
}
FAR = 0.02
"""Two points: a cell of the paper's own set-up that is further from its number is marked."""

_FORMS = {"accuracy": ".3f", "loss": ".4g", "time": ".3g"}

_READINGS = ("steps", "ticks", "sampled")
"""The ends of the names of recipes that read one figure in several ways, in the order in which a page shows them."""


class Stored(NamedTuple):
    """The results of one recipe at one scale."""

    recipe: Recipe
    scale: str
    document: Mapping[str, Any]

    @property
    def heading(self) -> str:
        """The heading of its section."""
        return f"{self.recipe.name}, {self.scale}"

    @property
    def anchor(self) -> str:
        """The heading as Markdown makes an anchor of it."""
        return self.heading.lower().replace(",", "").replace(" ", "-")


def write(results: Path, file: Path, *, figures: bool = True) -> list[str]:
    """Writes the first page, the papers' pages and (unless told not to) figures; returns the names of what is there."""
    folder = file.parent / file.stem
    if not any(_stored(results, paper) for paper in PAPERS):
        smoke = len(list(results.glob("*.smoke.json")))
        raise InputError(
            f"{results} holds no results of the scales laptop, cnn and paper ({smoke} of smoke, which no page shows); "
            "run `aflock reproduce` first"
        )
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[str] = []
    shown: list[str] = []
    for paper, about in PAPERS.items():
        stored = _stored(results, paper)
        if not stored:
            continue
        rows += summary(stored, f"{folder.name}/{paper}.md")
        shown += [f"{each.recipe.name} ({each.scale})" for each in stored]
        back = f"[All papers](../{file.name}) has the verdicts in one table and says how to read these."
        head = [f"# {about.title}", "", f"{about.source}. Short name here: {paper}. {back}", "", *contents(stored), ""]
        sections = [section(each, folder if figures else None) for each in stored]
        write_whole(folder / f"{paper}.md", "\n".join([*head, *sections]) + "\n")
    write_whole(file, "\n".join([_HEAD, *_TABLE, *rows, "", _METHOD]) + "\n")
    return shown


def _stored(results: Path, paper: str) -> list[Stored]:
    found = []
    for name in sorted((name for name in names() if name.startswith(paper)), key=_place):
        for scale in (scale for scale in SCALES if scale != "smoke"):
            file = results / f"{name}.{scale}.json"
            if file.is_file():
                found.append(Stored(read(name), scale, json.loads(file.read_text(encoding="utf-8"))))
    return found


def _place(name: str) -> tuple[str, int]:
    """By table or figure; of several readings of one, the first reading first."""
    about, _, reading = name.rpartition("-")
    return (about, _READINGS.index(reading)) if reading in _READINGS else (name, 0)


def contents(stored: Iterable[Stored]) -> list[str]:
    """The list at the head of a paper's page: its tables and figures, and what became of their claims."""
    lines = ["| in the paper | what is shown | scale | claims: hold, fail, too close to tell |", "|---|---|---|---|"]
    for each in stored:
        outcomes = [verdict.outcome for verdict in _judged(each)]
        counts = ", ".join(str(outcomes.count(outcome)) for outcome in (HOLDS, FAILS, OPEN)) if outcomes else "none"
        recipe = each.recipe
        lines.append(f"| [{recipe.where}](#{each.anchor}) | {recipe.title} | `{each.scale}` | {counts} |")
    return lines


def _judged(stored: Stored) -> list[Verdict]:
    recipe = stored.recipe
    grid = judged_grid(recipe, grouped(recipe, stored.scale, stored.document))
    found = (judge(claim, grid, recipe.paper_value) for claim in recipe.claims)
    return [verdict for verdict in found if verdict.comparisons]


_HEAD = """# Reproduction

What the five papers claim, and what came out here. `aflock reproduction` makes this page and the pages it links to from
the files in `results/`; nothing in them is typed in by hand.
"""

_TABLE = [
    "| paper | claim | verdict | evidence | |",
    "|---|---|---|---|---|",
]

_METHOD = """## How to read it

- **Claims**: of each table or figure the one to three that the paper's text is about; the papers' pages have them all.
- **Evidence**: the scale (`paper`: the paper's set-up; `laptop`: a smaller model or horizon, so that only the order of
  rules can be compared; `cnn`: the same with a small convolutional network, closer to the paper), the seeds, and the
  comparison that decides the verdict: our mean difference with half its 95 % interval, and the paper's difference
  where it prints one. Points are percentage points of test accuracy. A claim that was judged at several scales stands
  here with the one closest to the paper; the paper's page has the others.
- **Verdicts**: differences are paired by seed (the same seed is the same data, split and schedule), tested by Student's
  t with Holm's correction over the comparisons of one claim. A claim *holds* if every comparison is on its side beyond
  chance at 5 %, *fails* if any is on the other side, and is *too close to tell* otherwise; then the evidence says which
  difference would have shown, in four cases of five.
- **Learning rates** are chosen per row on a seed that is not reported, by the test accuracy (or test loss) of that
  seed: no validation set is held out. A grid whose best value is at its end is extended until it is not.
- **Seeds** are added until the half interval is below a third of the difference the paper claims, or up to the limit of
  the recipe's scale; a recipe without such a limit has a fixed number.
- **Stale**: `aflock reproduce --check` runs stored cells again, bit for bit on the same kind of CPU, within the spread
  of the seeds elsewhere; what does not agree is marked.
- [What "the same bits" promises](design.md#the-same-bits) says why two machines may differ.
"""


def summary(stored: Sequence[Stored], page: str) -> list[str]:
    """The rows of the first page's table: the headline claims of a paper's recipes.

    A claim that was judged at several scales is shown at the one that is closest to the paper.
    """
    lines = []
    for _, group in groupby(stored, key=lambda each: each.recipe.name):
        at_scales = list(group)
        for claim in (claim for claim in at_scales[0].recipe.claims if claim.get("headline")):
            found = [
                (each, verdict) for each in at_scales for verdict in _judged(each) if verdict.says == claim["says"]
            ]
            if found:
                lines.append(_row(*found[-1], page))
    return lines


def _row(stored: Stored, verdict: Verdict, page: str) -> str:
    recipe = stored.recipe
    about = f"{PAPERS[recipe.paper].short} ({PAPERS[recipe.paper].year})"
    proof = evidence(recipe, stored.scale, verdict)
    link = f"[details]({page}#{stored.anchor})"
    return f"| {about} | {verdict.says}{_reading(recipe)} | **{verdict.outcome}** | {proof} | {link} |"


def _reading(recipe: Recipe) -> str:
    return f" ({recipe.reading})" if recipe.reading else ""


def evidence(recipe: Recipe, scale: str, verdict: Verdict) -> str:
    """The scale, the seeds, and the comparison that decides."""
    seeds = len(verdict.weakest.differences) if verdict.weakest else 0
    return f"`{scale}`, {seeds} seeds; {decisive(recipe, verdict)}"


def decisive(recipe: Recipe, verdict: Verdict) -> str:
    """The comparison that says most about the outcome: ours, the paper's, and what would have shown."""
    weakest = verdict.weakest
    if weakest is None:
        return "not run"
    values = weakest.differences
    factor, unit = _unit(recipe)
    ours = f"{factor * (sum(values) / len(values) - weakest.margin):+.3g}"
    if len(values) > 1:
        ours += f" ± {factor * half_interval(values):.2g}"
    text = f"{weakest.where}: {ours}{unit}"
    if weakest.margin:
        text += f" (the claim allows {-factor * weakest.margin:g})"
    if weakest.printed:
        text += f" (paper {factor * weakest.claimed:+.3g})"
    if verdict.outcome == OPEN and len(values) > 1:
        text += f"; a difference of {factor * visible(weakest, len(verdict.comparisons)):.2g} would have shown"
    return text


def _unit(recipe: Recipe) -> tuple[float, str]:
    """What a difference is multiplied with for people, and its unit."""
    return (100.0, " points") if recipe.metric == "accuracy" else (1.0, f" ({recipe.metric})")


def section(stored: Stored, figures: Path | None) -> str:
    """One recipe: its figure, its table at the budget the paper counts, its headline claims; the rest is folded.

    The figure is drawn into the folder `figures`; None: only its name is written.
    """
    recipe, scale, document = stored
    runs = grouped(recipe, scale, document)
    grids = budgets(recipe, runs)
    main = next((axis for axis in (recipe.counts, "end", *grids) if axis in grids), "end")
    lines = [f"## {stored.heading}", "", f"{recipe.title}. `{scale}`: {document['says']}", ""]
    figure = f"{recipe.name}.{scale}.png"
    if recipe.metric in ("accuracy", "loss", "time"):
        if figures is not None:
            draw(recipe, scale, runs, figures / figure)
        lines += [f"![{recipe.title}]({figure})", ""]
    if recipe.weights:
        file = f"{recipe.name}.{scale}.weights.png"
        if figures is not None:
            draw_weights(recipe, scale, runs, figures / file)
        lines += [f"![The weights of the clients over time]({file})", ""]
    lines += [
        f"{_seeds(runs)}, {BUDGETS.get(main, main)}:",
        "",
        *table(recipe, scale, grids.get(main, {}), main, runs),
        "",
    ]
    headlines = verdicts(recipe, grids.get(main, {}), headline=True)
    lines += [*headlines, ""] if headlines else []
    others = verdicts(recipe, grids.get(main, {}), headline=False)
    lines += [f"<details><summary>Set-up, {'other claims, ' if others else ''}other budgets, rates</summary>", ""]
    lines += [f"- {note}" for note in recipe.notes] + ([""] if recipe.notes else [])
    lines += [f"**Other claims, {BUDGETS.get(main, main)}**", "", *others, ""] if others else []
    for axis, grid in grids.items():
        if axis != main:
            lines += [f"**{BUDGETS.get(axis, axis)}**", "", *table(recipe, scale, grid, axis, runs), ""]
            lines += [*verdicts(recipe, grid), ""] if recipe.claims else []
    lines += [*by_round(runs), ""] if recipe.rounds else []
    lines += [f"Conjecture, not tested: {recipe.explained}", ""] if recipe.explained else []
    lines += _tuned(recipe, runs)
    return "\n".join([*lines, "</details>", ""])


def _seeds(runs: Runs) -> str:
    counts = sorted({len(found) for found in runs.values()})
    stale = sum("stale" in run for found in runs.values() for run in found)
    text = f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0] if counts else 0} seeds"
    return text + (f", {stale} runs stale" if stale else "")


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
            cells.append(f"diverged {text}".strip() if has_diverged(runs.get(at, [])) else text)
        lines.append(f"| {row.label} | " + " | ".join(cells) + " |")
    return lines


def _cell(seeds: Mapping[int, float] | None, paper: float | None, form: str, limit: float) -> str:
    beside = "" if paper is None else f"[{paper:{form}}]"
    if not seeds:
        return beside
    found = list(seeds.values())
    mean = sum(found) / len(found)
    half = half_interval(found) if len(found) > 1 else 0.0
    text = f"{mean:{form}}" + (f" ± {half:{form}}" if half else "")
    far = paper is not None and abs(mean - paper) > limit
    return f"{f'**{text}**' if far else text} {beside}".strip()


def verdicts(recipe: Recipe, grid: Grid, *, headline: bool | None = None) -> list[str]:
    """The claims that were run, and what became of them: all, or those that are headlines, or the others."""
    wanted = [claim for claim in recipe.claims if headline in (None, bool(claim.get("headline")))]
    found = [judge(claim, grid, recipe.paper_value) for claim in wanted]
    return [_bullet(recipe, verdict) for verdict in found if verdict.comparisons]


def _bullet(recipe: Recipe, verdict: Verdict) -> str:
    details = "; ".join(part for part in (verdict.counts, decisive(recipe, verdict)) if part)
    return f"- *{verdict.outcome}*: {verdict.says} ({details})"


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


def _tuned(recipe: Recipe, runs: Runs) -> list[str]:
    """Which value each row has chosen."""
    if recipe.tune is None:
        return []
    by_row: dict[str, list[str]] = {}
    for (row, _), found in runs.items():
        by_row.setdefault(row, []).append(found[0]["changes"][0].partition("=")[2] if found[0]["changes"] else "none")
    listed = "; ".join(f"{row}: {', '.join(dict.fromkeys(values))}" for row, values in by_row.items())
    return [f"Chosen `{recipe.tune.key}`: {listed}.", ""]


def draw(recipe: Recipe, scale: str, runs: Runs, file: Path) -> None:
    """Accuracy (or loss) against uploads, one panel per column, at most six of them."""
    _, columns = recipe.lines(scale)
    panels = {}
    for column in columns[:6]:
        curves = {row: [_named(run) for run in found] for (row, at), found in runs.items() if at == column.label}
        if curves:
            panels[column.label] = curves
    file.parent.mkdir(parents=True, exist_ok=True)
    metric = "accuracy" if recipe.metric == "time" else recipe.metric
    axis = "time" if recipe.metric == "time" or recipe.counts == "ticks" else "uploads"
    panels_figure(file, panels, axis, f"{recipe.name}, {scale}: {recipe.title}", metric)


def draw_weights(recipe: Recipe, scale: str, runs: Runs, file: Path) -> None:
    """The clients' weights over the rounds of the first seed, one panel per cell."""
    rows, columns = recipe.lines(scale)
    panels = {}
    for row in rows:
        for column in (column for column in columns if (row.label, column.label) in runs):
            first = runs[row.label, column.label][0]
            cell = recipe.cell(scale, row, column, first["seed"], *first["changes"])
            gamma, clients = float(cell.section("strategy").params["gamma"]), cell.clients
            assert clients is not None
            made = rounds.replacement_weights(rounds.loaded(first["rounds"]), clients, gamma)
            panels[f"{row.label}, {column.label}"] = made
    file.parent.mkdir(parents=True, exist_ok=True)
    weights_figure(file, panels, f"{recipe.name}, {scale}: weights of the clients over time")


def _named(run: Mapping[str, Any]) -> list[dict[str, float]]:
    keys = ("uploads", "versions", "time", "accuracy", "loss")
    return [dict(zip(keys, point, strict=True)) for point in run["curve"]]


def text(recipe: Recipe, scale: str, document: Mapping[str, Any]) -> str:
    """The tables and claims of one recipe, for a terminal."""
    lines = [f"{recipe.name} ({scale}): {recipe.title}; {document['says']}"]
    runs = grouped(recipe, scale, document)
    for axis, grid in budgets(recipe, runs).items():
        lines += ["", f"{BUDGETS.get(axis, axis)}:", *table(recipe, scale, grid, axis, runs)]
        lines += verdicts(recipe, grid)
    if recipe.rounds:
        lines += ["", *by_round(runs)]
    return "\n".join(lines)
