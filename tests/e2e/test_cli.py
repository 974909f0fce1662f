"""The command as a user runs it: real processes, real output."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aflock import cli, local, strategies
from aflock.errors import InputError

AFLOCK = [sys.executable, "-m", "aflock"]
ROOT = Path(__file__).parents[2]


def run(*arguments: str, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*AFLOCK, *arguments], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == code, done.stderr
    return done


def test_without_arguments_it_explains_itself() -> None:
    assert "COMMAND" in run().stdout


def test_help_and_version() -> None:
    assert "list" in run("--help").stdout
    assert re.fullmatch(r"aflock \d+\.\d+\.\d+\n", run("--version").stdout)


def test_the_installed_command_is_there() -> None:
    command = Path(sys.executable).with_name("aflock")
    assert subprocess.run([command, "--version"], capture_output=True, check=True).stdout.startswith(b"aflock ")


def test_help_loads_nothing_heavy() -> None:
    """--help answers at once because neither numba nor torch nor NumPy's users are imported."""
    script = (
        "import sys; from aflock import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print('HEAVY', sorted({'numba', 'torch', 'scipy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_list_strategies() -> None:
    text = run("list", "strategies").stdout
    for entry in strategies.entries():
        block = text[text.index(f"\n{entry.name}\n" if not text.startswith(entry.name) else entry.name) :]
        assert entry.rule in block
        assert entry.paper in block
        for parameter in entry.params.describe():
            assert f"{parameter['name']}=" in block


def test_list_strategies_as_json() -> None:
    entries = json.loads(run("list", "strategies", "--json").stdout)
    assert [entry["name"] for entry in entries] == strategies.names()
    ace = next(entry for entry in entries if entry["name"] == "ace")
    assert ace["first"] is True
    assert ace["needs"] == ["gradient"]
    assert {p["name"]: p["default"] for p in ace["parameters"]}["lr"] == 0.1
    for entry in entries:
        for parameter in entry["parameters"]:
            assert parameter["help"]
            assert parameter["expected"]


def test_list_local() -> None:
    entries = json.loads(run("list", "local", "--json").stdout)
    assert [entry["name"] for entry in entries] == local.names()
    assert "fedprox" in run("list", "local").stdout


def test_wrong_usage_is_exit_code_2() -> None:
    assert "invalid choice: 'strategie'" in run("list", "strategie", code=2).stderr
    assert "not a positive integer" in run("optimum", "--arrivals", "0", code=2).stderr
    assert "not a positive integer" in run("optimum", "--arrivals", "many", code=2).stderr


def test_optimum() -> None:
    text = run("optimum").stdout
    rows = text[text.index("settings\n") :].splitlines()[1:]
    verdicts = {row.split()[0]: "optimum" if row.split()[2] == "optimum" else "biased" for row in rows}
    assert set(verdicts) == set(strategies.names())
    assert verdicts == {e.name: "biased" if e.optimum == "biased" else "optimum" for e in strategies.entries()}
    assert "tau_algo=2" in text


def test_optimum_as_json() -> None:
    runs = json.loads(run("optimum", "--arrivals", "200", "--json").stdout)
    assert {item["name"] for item in runs} == set(strategies.names())
    assert all(item["arrivals"] == 200 for item in runs)


def test_bench_prints_a_table_and_json(tmp_path: Path) -> None:
    done = run("bench", "server", "--quick", "--out", "bench.json", cwd=tmp_path)
    report = json.loads((tmp_path / "bench.json").read_text())
    assert set(strategies.names()) <= set(report["rules"])
    assert report["quick"] is True
    assert "STREAM triad" in done.stdout
    assert "QUICK" in done.stdout
    assert all(row["us"] > 0 for row in report["rules"].values())
    assert {"what", "value", "target", "met"} <= set(report["targets"][0])


def test_bench_refuses_a_place_it_cannot_write_to_before_it_measures(tmp_path: Path) -> None:
    started = time.monotonic()
    done = run("bench", "server", "--out", str(tmp_path / "no" / "bench.json"), code=1)
    assert "cannot be written: its folder does not exist" in done.stderr
    assert "Traceback" not in done.stderr
    assert "bench:" not in done.stderr, f"it measured for {time.monotonic() - started:.0f} s first"


@pytest.mark.parametrize("signum", [signal.SIGINT])
def test_ctrl_c_is_quiet(signum: int) -> None:
    child = subprocess.Popen(
        [*AFLOCK, "optimum"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signum, signal.SIG_DFL),  # a shell's background job ignores it
    )  # fmt: skip
    time.sleep(2.0)
    child.send_signal(signum)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 130
    assert errors == "aflock: interrupted\n"


def test_a_closed_pipe_is_no_traceback() -> None:
    """`aflock list strategies | head -1`."""
    command = f"{sys.executable} -m aflock list strategies | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env={**os.environ})
    assert done.stdout == "ace\n"
    assert done.stderr == ""


def test_rules_with_parameters_of_their_own() -> None:
    assert cli.split_rules("ace,fedbuff:buffer=5,lr=0.5,asgd") == ["ace", "fedbuff:buffer=5,lr=0.5", "asgd"]
    assert cli.split_rules("fedbuff:buffer=2,fedbuff:buffer=3") == ["fedbuff:buffer=2", "fedbuff:buffer=3"]
    with pytest.raises(InputError, match="names a rule twice"):
        cli.split_rules("ace,ace")
    with pytest.raises(InputError, match="names no rule"):
        cli.split_rules(",")
