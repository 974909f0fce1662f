"""Every example runs and prints what its .out file says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example(script: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "error", str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == script.with_suffix(".out").read_text()


def test_there_is_one_of_each() -> None:
    assert {path.stem for path in EXAMPLES} >= {"own_strategy", "own_local_rule", "own_delay", "own_dataset"}
