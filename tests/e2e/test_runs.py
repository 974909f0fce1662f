"""`aflock run` and `aflock compare` as a user meets them: interrupted, killed, misspelt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

AFLOCK = [sys.executable, "-m", "aflock"]

EXPERIMENT = """
[data]
name = "synthetic"
examples = 600

[partition]
clients = 12

[strategy]
name = "fedbuff"
buffer = 4

[clock]
concurrency = 6

[budget]
uploads = 30000

[evaluation]
every = 5000

[checkpoint]
every = 300
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    return tmp_path


def run(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*AFLOCK, *arguments], capture_output=True, text=True, cwd=folder)
    assert done.returncode == code, done.stderr
    return done


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*AFLOCK, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    )


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} never came"
        time.sleep(0.01)


def same(a: Path, b: Path) -> None:
    """Two runs left the same files, but for the wall time."""
    for name in ("config.toml", "metrics.jsonl", "trace.jsonl", "model.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    results = [json.loads((path / "result.json").read_text()) for path in (a, b)]
    for result in results:
        del result["wall_time"]
    assert results[0] == results[1]


def test_run_prints_and_writes_its_result(folder: Path) -> None:
    done = run(folder, "run", "e.toml", "--set", "budget.uploads=200", "--json")
    result = json.loads(done.stdout)
    assert done.stderr == ""
    assert result["uploads"] == 200
    assert json.loads((folder / "runs" / "e-fedbuff-1" / "result.json").read_text()) == result
    run(folder, "run", "e.toml", "--set", "budget.uploads=200", "--quiet")
    assert (folder / "runs" / "e-fedbuff-2").is_dir()


def test_ctrl_c_saves_and_resume_ends_with_the_same_files(folder: Path) -> None:
    run(folder, "run", "e.toml", "--out", "whole", "--quiet")
    child = begin(folder, "run", "e.toml", "--out", "cut")
    wait_for(folder / "cut" / "trace.jsonl")
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "interrupted and saved; go on with --resume cut" in errors
    assert not (folder / "cut" / "result.json").exists()
    run(folder, "run", "e.toml", "--resume", "cut", "--quiet")
    same(folder / "whole", folder / "cut")


def test_kill_9_at_any_moment_costs_only_time(folder: Path) -> None:
    run(folder, "run", "e.toml", "--out", "whole", "--quiet")
    child = begin(folder, "run", "e.toml", "--out", "cut", "--quiet")
    wait_for(folder / "cut" / "config.toml")
    for pause in (0.2, 0.6, 0.9):
        time.sleep(pause)
        if child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        if (folder / "cut" / "result.json").exists():
            break
        child = begin(folder, "run", "e.toml", "--resume", "cut", "--quiet")
    child.communicate(timeout=120)
    same(folder / "whole", folder / "cut")
    assert not list((folder / "cut").glob(".*")), "no half-written file is left behind"


def test_bad_input_is_one_line_and_exit_code_2(folder: Path) -> None:
    cases = {
        ("run", "none.toml"): "none.toml does not exist",
        ("run", "e.toml", "--set", "strategy.bufer=3"): "did you mean 'buffer'",
        ("run", "e.toml", "--set", "clock.concurrency=99"): "exceeds the 12 clients",
        ("run", "e.toml", "--set", "partition.alpha=-1"): "alpha=-1 is not valid",
        ("run", "e.toml", "--resume", "nowhere"): "is not the folder of a run",
        ("compare", "e.toml", "--strategies", "ace,fedbuf"): "did you mean 'fedbuff'",
    }
    for arguments, text in cases.items():
        done = run(folder, *arguments, code=2)
        assert text in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
    assert not (folder / "runs").exists(), "nothing is made for what cannot run"


def test_compare_writes_table_json_and_figure(folder: Path) -> None:
    arguments = ["compare", "e.toml", "--strategies", "ace,fedbuff:buffer=2,fedavg", "--seeds", "2"]
    done = run(
        folder, *arguments, "--set", "budget.uploads=200", "--set", "evaluation.every=50", "--out", "c", "--quiet"
    )
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]]
    found = json.loads((folder / "c" / "comparison.json").read_text())
    assert set(found) == {"ace", "fedbuff:buffer=2", "fedavg"}
    assert all(len(listed) == 2 for listed in found.values())
    assert (folder / "c" / "comparison.png").stat().st_size > 5000
    assert "exists already" in run(folder, *arguments, "--out", "c", code=2).stderr


def test_config_explains_and_resolves(folder: Path) -> None:
    assert "[fleet]" in run(folder, "config", "--explain").stdout
    example = run(folder, "config", "--example").stdout
    (folder / "x.toml").write_text(example)
    assert run(folder, "config", "x.toml").stdout == example


def test_lists(folder: Path) -> None:
    for what in ("datasets", "partitions", "models", "delays"):
        names = [entry["name"] for entry in json.loads(run(folder, "list", what, "--json").stdout)]
        text = run(folder, "list", what).stdout
        assert names
        assert all(name in text for name in names)


def test_demo(folder: Path) -> None:
    done = run(folder, "demo", "--uploads", "120")
    assert "slow clients hold other digits" in done.stdout
    assert "accuracy lost when speed goes with the data" in done.stdout
    assert (folder / "runs" / "demo" / "demo.png").stat().st_size > 10_000


def test_replay_of_the_same_rule_is_the_same_model(folder: Path) -> None:
    arguments = ["--set", "budget.uploads=400", "--set", "fleet.loss=0.1", "--set", "fleet.lease=5", "--json"]
    done = json.loads(run(folder, "run", "e.toml", "--out", "r", *arguments).stdout)
    again = json.loads(run(folder, "replay", "r/trace.jsonl", "--json").stdout)
    for key in ("model_sha256", "uploads", "versions", "virtual_time", "staleness_mean", "accuracy"):
        assert again[key] == done[key], key
    other = json.loads(run(folder, "replay", "r/trace.jsonl", "--strategy", "ace:lr=0.5", "--json").stdout)
    assert other["strategy"] == "ace"
    assert done["uploads"] - other["skipped"] <= other["uploads"] <= done["uploads"]  # some pulls were lost anyway
    assert "does not exist" in run(folder, "replay", "r/none.jsonl", code=2).stderr
    (folder / "r" / "bad.jsonl").write_text('{"kind": "pull", "time": 0, "client": 1}\n{"kind"}\n')
    assert "line 2 is not an event" in run(folder, "replay", "r/bad.jsonl", code=2).stderr


def test_workers_ctrl_c_and_resume_with_another_number_of_them(folder: Path) -> None:
    """The result does not depend on who trained; a resume needs no --set again."""
    change = ("--set", "budget.uploads=3000", "--set", "strategy.name=ace")
    whole = json.loads(run(folder, "run", "e.toml", *change, "--out", "whole", "--json").stdout)
    process = begin(folder, "run", "e.toml", *change, "--out", "cut", "--workers", "2", "--quiet")
    trace = folder / "cut" / "trace.jsonl"
    deadline = time.monotonic() + 60
    while (not trace.exists() or trace.stat().st_size < 20_000) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors == "aflock: interrupted and saved; go on with --resume cut\n"
    again = json.loads(run(folder, "run", "e.toml", "--resume", "cut", "--workers", "1", "--json").stdout)
    assert again["model_sha256"] == whole["model_sha256"]


def test_partition_says_who_holds_what(folder: Path) -> None:
    done = run(folder, "partition", "e.toml", "--out", "split")
    assert "12 clients hold 480 examples" in done.stdout
    assert (folder / "split" / "partition.txt").read_text() == done.stdout
    assert (folder / "split" / "partition.png").read_bytes().startswith(b"\x89PNG")


def test_bench_sim_runs(folder: Path) -> None:
    report = json.loads(run(folder, "bench", "sim", "--quick", "--json").stdout)
    assert report["quick"]
    assert len(report["targets"]) == 9
    assert report["models"]["cnn"]["weights"] == 1_663_370
    assert report["rows disk"]["updates_per_s"] > 0
