"""Recipes: complete, runnable at once, resumable, and judged by numbers a reader can check."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from aflock import recipes
from aflock.errors import InputError, UnknownName
from aflock.recipes import report, rounds
from aflock.recipes.cells import TUNING_SEED
from aflock.recipes.check import check
from aflock.recipes.claims import Comparison
from aflock.recipes.numbers import budgets, grouped
from aflock.recipes.papers import Paper
from aflock.recipes.recipe import SCALES, Recipe, parse
from aflock.recipes.reproduce import EXTENSIONS, key, reproduce
from aflock.recipes.verdicts import holm, judge, needs_seeds, p_value, visible
from aflock.sim.simulation import Simulation

TINY: dict[str, Any] = {
    "recipe": {"title": "tiny", "paper": "0", "where": "nowhere", "limits": {"versions": 4, "uploads": 12}},
    "experiment": {
        "data": {"name": "synthetic", "examples": 200, "features": 5, "classes": 3},
        "partition": {"clients": 6, "alpha": 1.0},
        "budget": {"uploads": 12},
        "evaluation": {"every": 4},
    },
    "rows": [
        {"label": "ASGD", "set": ["strategy.name=asgd"]},
        {"label": "Buff", "set": ["strategy.name=fedbuff", "strategy.buffer=3"]},
    ],
    "columns": [{"label": "fast", "set": ["delays.mean=1"]}, {"label": "slow", "set": ["delays.mean=9"]}],
    "paper": {"values": [[50, ""], [60.5, 61]]},
    "tune": {"key": "strategy.lr", "grid": [0.1, 1.0], "column": "fast"},
    "claims": [{"says": "buffers help", "kind": "better", "row": "Buff", "than": ["ASGD"]}],
    "scale": {"smoke": {"says": "all of it.", "seeds": 2}},
}  # fmt: skip


def tiny(**changes: Any) -> Recipe:
    return parse("tiny", {key: value for key, value in (TINY | changes).items() if value is not None})


def quiet(line: str) -> None:
    pass


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_runs_at_smoke_scale(name: str, tmp_path: Path) -> None:
    recipe = recipes.read(name)
    document = reproduce(recipe, "smoke", tmp_path, jobs=1, report=quiet)
    rows, columns = recipe.lines("smoke")
    grids = budgets(recipe, grouped(recipe, "smoke", document))
    assert grids
    assert all(
        set(grid) <= {(row.label, column.label) for row in rows for column in columns} for grid in grids.values()
    )
    assert report.text(recipe, "smoke", document)


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_is_complete(name: str) -> None:
    """All of its cells are valid experiments at every scale, and its claims speak of its own lines."""
    recipe = recipes.read(name)
    assert set(recipe.scales) <= set(SCALES)
    assert {"smoke", "paper"} <= set(recipe.scales)
    for scale in recipe.scales:
        rows, columns = recipe.lines(scale)
        assert rows
        assert columns
        for row in rows:
            for column in columns:
                recipe.cell(scale, row, column, 1)
    labels = {line.label for line in (*recipe.rows, *recipe.columns)}
    for claim in recipe.claims:
        named = [*claim.get("rows", []), *claim.get("columns", []), *claim.get("than", [])]
        named += [claim[key] for key in ("row", "column", "to") if key in claim]
        assert set(named) <= labels, claim["says"]


def test_rates_of_the_theorems_are_those_of_the_steps_that_are_run() -> None:
    """AdaMasFL takes gamma from S, K and T, and a scale with fewer server steps has another T; MasFL only needs K/T."""
    checked = 0
    for recipe in (recipe for recipe in recipes.entries() if recipe.paper == "002"):
        for scale in (scale for scale in recipe.scales if scale != "smoke"):
            rows, columns = recipe.lines(scale)
            for row in rows:
                cell, full = recipe.cell(scale, row, columns[0], 0), recipe.cell("paper", row, columns[0], 0)
                name, p, paper = (
                    cell.section("strategy").name,
                    cell.section("strategy").params,
                    full.section("strategy"),
                )
                if name in ("masfl", "adamasfl"):
                    assert p["steps"] / p["rounds"] == paper.params["steps"] / paper.params["rounds"]
                    checked += 1
                if name == "adamasfl":
                    assert p["rounds"] == cell.section("budget").versions, f"{recipe.name}, {scale}, {row.label}"
    assert checked > 50


def test_tuning_chooses_per_row_and_every_budget_is_read_off(tmp_path: Path) -> None:
    lines: list[str] = []
    document = reproduce(tiny(), "smoke", tmp_path, jobs=1, report=lines.append)
    runs = document["runs"]
    tuned = [run for run in runs if run["seed"] == TUNING_SEED]
    assert len(runs) - len(tuned) == 2 * 2 * 2  # rows x columns x seeds
    for row in ("ASGD", "Buff"):
        tried = {float(run["changes"][0].partition("=")[2]): run for run in tuned if run["row"] == row}
        assert {0.1, 1.0} <= set(tried)
        best = max(tried, key=lambda value: tried[value]["at"]["versions"]["accuracy"])
        assert min(tried) < best < max(tried) or len(tried) == 2 + EXTENSIONS, sorted(tried)
    chosen = {(run["row"], tuple(run["changes"])) for run in runs if run["seed"] < 1000}
    assert len(chosen) == 2  # one value per row, the same in both columns
    for run in runs:
        assert run["result"]["uploads"] == 12
        assert run["at"]["versions"] is not None
        assert run["at"]["uploads"] is not None
    unbuffered = next(run for run in runs if run["row"] == "ASGD")
    four_uploads = unbuffered["curve"][1]  # four steps, without a buffer
    assert unbuffered["at"]["versions"]["accuracy"] == pytest.approx(four_uploads[3], abs=1e-4)
    assert lines[0] == "tuning: 0 of 4 there, 4 to do"


def test_a_column_may_take_the_choice_of_another_one(tmp_path: Path) -> None:
    columns = [*TINY["columns"], {"label": "slower", "set": ["delays.mean=20"]}]
    tune = TINY["tune"] | {"column": {"slower": "slow"}}
    document = reproduce(tiny(columns=columns, paper={}, tune=tune), "smoke", tmp_path, seeds=1, report=quiet)
    assert {run["column"] for run in document["runs"] if run["seed"] == TUNING_SEED} == {"fast", "slow"}
    chosen = {(run["row"], run["column"]): run["changes"] for run in document["runs"] if run["seed"] == 0}
    assert all(chosen[row, "slower"] == chosen[row, "slow"] for row in ("ASGD", "Buff"))


def test_a_row_may_go_without_tuning_and_have_changes_of_its_own(tmp_path: Path) -> None:
    rows = [TINY["rows"][0], TINY["rows"][1] | {"tune": False}]
    scale = {"smoke": {"says": "half.", "seeds": 1, "by_row": {"Buff": ["strategy.buffer=4"]}}}
    recipe = tiny(rows=rows, scale=scale)
    document = reproduce(recipe, "smoke", tmp_path, report=quiet)
    tuned = [run["row"] for run in document["runs"] if run["seed"] == TUNING_SEED]
    assert set(tuned) == {"ASGD"}
    [buff, _] = [run for run in document["runs"] if run["row"] == "Buff"]
    assert (buff["changes"], buff["result"]["versions"]) == ([], 3)  # 12 uploads, 4 for a step


def test_round_by_round(tmp_path: Path) -> None:
    """Durations of one unit: every round waits for exactly that."""
    head = TINY["recipe"] | {"rounds": True}
    experiment = TINY["experiment"] | {"delays": {"name": "constant", "value": 1.0}, "clock": {"concurrency": 3}}
    rows = [{"label": "Buff", "set": ["strategy.name=fedbuff", "strategy.buffer=3"]}]
    columns = [{"label": "only", "set": []}]
    recipe = tiny(recipe=head, experiment=experiment, rows=rows, columns=columns, paper={}, tune=None)
    document = reproduce(recipe, "smoke", tmp_path, seeds=1, report=quiet)
    [run] = document["runs"]
    found = rounds.loaded(run["rounds"])
    assert [(len(one.clients), one.delay) for one in found] == [(3, 1.0)] * 4
    counts = Counter(client for one in found for client in one.clients)
    assert rounds.busiest(found) == max(counts.values())
    assert rounds.delay_by_size(found) == {3: 1.0}
    assert f"| Buff, only | 4 | 3.0 | {max(counts.values())} of 4 | 3: 1.00 |" in report.text(recipe, "smoke", document)


def test_the_weights_of_mr_asyncfl_follow_from_its_rounds(tmp_path: Path) -> None:
    """What is drawn from the stored rounds is what the rule itself held at the end of the run."""
    head = TINY["recipe"] | {"rounds": True, "weights": True}
    rows = [{"label": "MR", "set": ["strategy.name=mr-asyncfl", "strategy.gamma=0.7"]}]
    columns = [{"label": "only", "set": []}]
    recipe = tiny(recipe=head, rows=rows, columns=columns, paper={}, tune=None, claims=[])
    document = reproduce(recipe, "smoke", tmp_path, seeds=1, report=quiet)
    found = rounds.replacement_weights(rounds.loaded(document["runs"][0]["rounds"]), 6, 0.7)
    with Simulation(recipe.cell("smoke", recipe.rows[0], recipe.columns[0], 0)) as simulation:
        simulation.run()
        held = simulation.strategy.coefficients  # type: ignore[attr-defined]
    assert len(found) == 13
    assert found[-1] == pytest.approx([held[client] for client in range(6)])
    assert found.sum(axis=1) == pytest.approx([1.0] * 13)
    text = report.section(report.Stored(recipe, "smoke", document), tmp_path / "figures")
    assert "](tiny.smoke.weights.png)" in text
    assert (tmp_path / "figures" / "tiny.smoke.weights.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    lines: list[str] = []
    first = reproduce(tiny(), "smoke", tmp_path, seeds=1, jobs=1, report=quiet)
    assert reproduce(tiny(), "smoke", tmp_path, seeds=1, jobs=1, report=lines.append) == first
    assert lines == []
    reproduce(tiny(), "smoke", tmp_path, seeds=2, jobs=1, report=lines.append)
    assert lines[0] == "runs: 4 of 8 there, 4 to do"
    changed = TINY["experiment"] | {"training": {"batch": 5}}
    again = reproduce(tiny(experiment=changed), "smoke", tmp_path, seeds=1, jobs=1, report=lines.append)
    assert sum(run["seed"] != TUNING_SEED for run in again["runs"]) == 4  # other experiments: the old ones are gone
    assert {run["key"] for run in again["runs"]}.isdisjoint({run["key"] for run in first["runs"]})


def test_side_by_side_gives_the_same(tmp_path: Path) -> None:
    one = reproduce(tiny(), "smoke", tmp_path / "one", seeds=1, jobs=1, report=quiet)
    two = reproduce(tiny(), "smoke", tmp_path / "two", seeds=1, jobs=2, report=quiet)
    for found in (one, two):
        for run in found["runs"]:
            run["result"].pop("wall_time")
        found["runs"].sort(key=lambda run: run["key"])
    assert one == two


def test_a_killed_recipe_goes_on_cell_by_cell(tmp_path: Path) -> None:
    name = recipes.names()[0]
    command = [sys.executable, "-m", "aflock", "reproduce", name, "--scale", "smoke", "--jobs", "1"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    file = tmp_path / "results" / f"{name}.smoke.json"
    deadline = time.monotonic() + 60
    while not file.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = {run["key"] for run in json.loads(file.read_text())["runs"]}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = json.loads(file.read_text())["runs"]
    assert before <= {run["key"] for run in after}
    assert not list(file.parent.glob(".*"))


def test_workers_end_with_the_recipe_they_work_for(tmp_path: Path) -> None:
    """Also with one that was killed; and a recipe whose worker was killed says so in one sentence."""
    command = [sys.executable, "-m", "aflock", "reproduce", "000-figure-2-steps", "--scale", "smoke", "--jobs", "2"]
    for victim in ("recipe", "worker"):
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        workers = wait_for_workers(process)
        os.kill(process.pid if victim == "recipe" else workers[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
        deadline = time.monotonic() + 30
        while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
        if victim == "worker":
            assert process.returncode == 1
            assert "a worker process was killed" in errors.splitlines()[-1]
            assert "Traceback" not in errors


def wait_for_workers(process: subprocess.Popen[str]) -> list[int]:
    """The worker processes of a recipe, once there are two."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        found = [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
        if len(found) == 2:
            return found
        time.sleep(0.02)
    raise AssertionError("the recipe has started no workers")


def test_the_page_shows_paper_and_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, claims = TINY["recipe"] | {"paper": "tiny"}, [TINY["claims"][0] | {"headline": True}]
    recipe = tiny(recipe=head, claims=claims, scale={"laptop": {"says": "less of it.", "seeds": 2}})
    reproduce(recipe, "laptop", tmp_path / "results", jobs=1, report=quiet)
    monkeypatch.setattr(report, "PAPERS", {"tiny": Paper("Tiny", "2026", "A tiny paper", "Nobody")})
    monkeypatch.setattr(report, "names", lambda: ["tiny"])
    monkeypatch.setattr(report, "read", lambda name: recipe)
    assert report.write(tmp_path / "results", tmp_path / "page.md") == ["tiny (laptop)"]
    first = (tmp_path / "page.md").read_text()
    assert "| Tiny (2026) | buffers help | **" in first
    assert "`laptop`, 2 seeds; Buff minus ASGD, " in first
    assert "](page/tiny.md#tiny-laptop) |" in first
    page = (tmp_path / "page" / "tiny.md").read_text()
    assert "](#tiny-laptop) | " in page.partition("## tiny, laptop")[0]
    assert "## tiny, laptop" in page
    assert "at equal server steps:" in page
    assert "**at equal uploads**" in page
    assert "**at equal virtual time**" in page
    assert "[0.605]" in page
    assert "buffers help" in page
    assert "Chosen `strategy.lr`: ASGD:" in page
    assert (tmp_path / "page" / "tiny.laptop.png").read_bytes().startswith(b"\x89PNG")


def test_every_number_on_the_committed_pages_comes_from_the_stored_results(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    report.write(root / "results", tmp_path / "reproduction.md", figures=False)
    made = {file.relative_to(tmp_path): file.read_text() for file in tmp_path.rglob("*.md")}
    committed = [root / "docs" / "reproduction.md", *(root / "docs" / "reproduction").glob("*.md")]
    assert {file.relative_to(root / "docs"): file.read_text() for file in committed} == made
    shown = {match for text in made.values() for match in re.findall(r"\]\((\S+\.png)\)", text)}
    assert shown == {file.name for file in (root / "docs" / "reproduction").glob("*.png")}


def test_every_stored_run_is_one_that_its_recipe_would_make() -> None:
    """A recipe that has changed since must be run again, or its results removed: pages show no numbers of another."""
    root = Path(__file__).parents[2]
    for file in sorted((root / "results").glob("*.json")):
        document = json.loads(file.read_text())
        recipe, scale = recipes.read(document["recipe"]), document["scale"]
        assert document["says"] == recipe.scale(scale).says, file.name
        rows, columns = ({line.label: line for line in lines} for lines in recipe.lines(scale))
        for run in document["runs"]:
            where = f"{file.name}: {run['row']} | {run['column']} | seed {run['seed']} {run['changes']}"
            assert run["row"] in rows, where
            assert run["column"] in columns, where
            cell = rows[run["row"]], columns[run["column"]]
            assert run["key"] == key(recipe, scale, *cell, run["seed"], *run["changes"]), where


# --- claims ----------------------------------------------------------------------------------------------------------

GRID = {
    ("A", "x"): {0: 0.80, 1: 0.82, 2: 0.81},
    ("B", "x"): {0: 0.70, 1: 0.71, 2: 0.72},
    ("A", "y"): {0: 0.60, 1: 0.70, 2: 0.65},
    ("B", "y"): {0: 0.64, 1: 0.66, 2: 0.65},
}


@pytest.mark.parametrize(
    ("claim", "outcome"),
    [
        ({"kind": "better", "row": "A", "than": ["B"], "columns": ["x"]}, "holds"),
        ({"kind": "better", "row": "B", "than": ["A"], "columns": ["x"]}, "fails"),
        ({"kind": "better", "row": "A", "than": ["B"]}, "too close to tell"),  # in y nobody can tell
        ({"kind": "near", "column": "y", "to": "x", "within": 0.5}, "holds"),
        ({"kind": "near", "column": "y", "to": "x", "within": 0.01}, "fails"),
        ({"kind": "falling", "rows": ["A", "B"], "columns": ["x", "y"]}, "holds"),
        ({"kind": "falling", "rows": ["B", "A"]}, "fails"),
        ({"kind": "steadier", "row": "B", "than": ["A"], "columns": ["x", "y"]}, "holds"),  # .06 lost, not .16
        ({"kind": "steadier", "row": "A", "than": ["B"], "columns": ["x", "y"]}, "fails"),
        ({"kind": "below", "value": 0.9}, "holds"),
        ({"kind": "below", "value": 0.75, "rows": ["A"]}, "fails"),  # in x it is above
        ({"kind": "below", "value": 0.66, "rows": ["A"], "columns": ["y"]}, "too close to tell"),
        ({"kind": "better", "row": "A", "than": ["C"]}, "too close to tell"),  # never run
    ],
)
def test_claims(claim: dict[str, Any], outcome: str) -> None:
    assert judge({"says": "so"} | claim, GRID).outcome == outcome


def test_differences_are_paired_by_seed() -> None:
    """Seeds that differ by 20 points from each other, and rules that differ by one: only pairs show it."""
    a, b = {k: 0.2 * k + 0.01 + 0.001 * k for k in range(4)}, {k: 0.2 * k for k in range(5)}
    claim = {"says": "so", "kind": "better", "row": "A", "than": ["B"]}
    verdict = judge(claim, {("A", "x"): a, ("B", "x"): b})
    assert verdict.outcome == "holds"
    assert len(verdict.comparisons[0].differences) == 4  # the fifth seed of B has no partner


def test_holm_by_hand() -> None:
    """0.01 <= 0.05/3 and 0.02 <= 0.05/2, but 0.06 > 0.05: the third is not decided, and 0.03 alone would be."""
    assert holm([0.02, 0.06, 0.01], [1.0, 1.0, -1.0]) == [1, 0, -1]
    assert holm([0.03, 0.04, 0.2], [1.0, 1.0, 1.0]) == [0, 0, 0]
    assert holm([0.03], [1.0]) == [1]


def test_p_values_and_what_could_have_been_seen() -> None:
    """Differences 1, 2, 3: t = 2/(1/sqrt 3) = 3.4641 with 2 degrees of freedom, p = 0.0742."""
    assert p_value([1.0, 2.0, 3.0]) == pytest.approx(0.07418, abs=1e-5)
    assert p_value([0.5]) == 1.0
    assert p_value([0.5, 0.5]) == 0.0
    assert p_value([0.0, 0.0]) == 1.0
    seen = visible(Comparison("x", (), (1.0, 2.0, 3.0), 0.02))
    assert seen == pytest.approx((4.30265 + 1.06066) / 3**0.5, abs=1e-4)


def test_more_seeds_are_needed_until_the_half_interval_is_a_third_of_the_claim() -> None:
    """Differences 1, 2, 3: the half interval is 4.30265/sqrt 3 = 2.484, a third of 7.452."""
    for claimed, more in ((7.46, False), (7.44, True), (-7.46, False), (-7.44, True)):
        assert needs_seeds(Comparison("x", (), (1.0, 2.0, 3.0), claimed)) is more
    assert needs_seeds(Comparison("x", (), (1.0,), 100.0))  # one seed has no interval
    assert not needs_seeds(Comparison("x", (), (0.5, 0.5), 0.1))


def test_seeds_are_added_until_a_claim_can_be_judged(tmp_path: Path) -> None:
    """A claim of 90 points needs few seeds, one of a tenth of a point more than there may be."""
    for difference, count in ((90.0, 2), (0.001, 5)):
        claims = [TINY["claims"][0] | {"difference": difference}]
        recipe = tiny(claims=claims, tune=None, scale={"smoke": {"says": "all.", "seeds": 2, "most_seeds": 5}})
        found = reproduce(recipe, "smoke", tmp_path / str(count), report=quiet)
        seeds = Counter((run["row"], run["column"]) for run in found["runs"])
        assert set(seeds.values()) == {count}


def test_a_grid_is_extended_on_the_side_of_its_best_value(tmp_path: Path) -> None:
    """Rates so small that longer ones are better: the grid grows upwards by its own ratio, and not downwards."""
    recipe = tiny(tune={"key": "strategy.lr", "grid": [1e-5, 1e-4], "column": "fast"}, rows=TINY["rows"][:1],
                  paper={}, claims=[], experiment=TINY["experiment"] | {"budget": {"uploads": 60}},
                  recipe=TINY["recipe"] | {"limits": {}, "metric": "loss"})  # fmt: skip
    found = reproduce(recipe, "smoke", tmp_path, seeds=1, report=quiet)
    tried = sorted(float(run["changes"][0].partition("=")[2]) for run in found["runs"] if run["seed"] == TUNING_SEED)
    assert tried[:2] == [1e-5, 1e-4]
    assert len(tried) > 3
    assert [round(b / a, 6) for a, b in pairwise(tried)] == [10.0] * (len(tried) - 1)


def test_check_finds_what_no_longer_agrees(tmp_path: Path) -> None:
    lines: list[str] = []
    recipe = tiny(tune=None)
    reproduce(recipe, "smoke", tmp_path, report=quiet)
    assert check(recipe, "smoke", tmp_path, count=3, report=lines.append) == (3, 0)
    file = tmp_path / "tiny.smoke.json"
    stored = json.loads(file.read_text())
    assert {run["origin"] for run in stored["runs"]} == set(stored["origins"])
    assert {"version", "commit", "cpu", "blas"} <= set(next(iter(stored["origins"].values())))
    for run in stored["runs"]:
        run["result"]["model_sha256"] = "0" * 64
    file.write_text(json.dumps(stored))
    assert check(recipe, "smoke", tmp_path, count=2, report=lines.append) == (0, 2)
    assert "another model: accuracy" in lines[-1]
    marked = [run for run in json.loads(file.read_text())["runs"] if "stale" in run]
    assert len(marked) == 2
    for found in stored["origins"].values():
        found["cpu"] = "another"
    file.write_text(json.dumps(stored))
    assert check(recipe, "smoke", tmp_path, count=8, report=quiet) == (8, 0)  # elsewhere: within the spread
    for run in stored["runs"]:
        run["result"]["accuracy"] += 0.5
    file.write_text(json.dumps(stored))
    assert check(recipe, "smoke", tmp_path, count=1, report=lines.append) == (0, 1)
    assert "further apart than the seeds" in lines[-1]
    reproduce(recipe, "smoke", tmp_path, report=lines.append)
    assert lines[-1].startswith("runs 8/8")  # what is stale is run again
    assert not [run for run in json.loads(file.read_text())["runs"] if "stale" in run]


def test_bad_recipes() -> None:
    with pytest.raises(UnknownName, match="there is no recipe called"):
        recipes.read("none")
    with pytest.raises(InputError, match="is not complete"):
        parse("x", {"recipe": {}})
    with pytest.raises(InputError, match="has 2 x 2 cells, but other numbers"):
        tiny(paper={"values": [[1, 2]]})
    with pytest.raises(InputError, match="has no scale 'huge'; it has smoke"):
        tiny().scale("huge")
