"""Storms over federations (chaos.py), short ones; `make chaos` has the long ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 240.0


@pytest.mark.parametrize(("weather", "kills"), [("memory", 30), ("plain", 16), ("rows", 6), ("rounds", 6)])
def test_what_was_acknowledged_is_applied_once_whatever_happens(weather: str, kills: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.net.chaos", "--weather", weather, "--kills", str(kills)]
    storm = subprocess.Popen(
        [*command, "--folder", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that nothing it has started can be left behind
    )
    try:
        said, _ = storm.communicate(timeout=PATIENCE)
    finally:
        if storm.poll() is None:
            os.killpg(storm.pid, signal.SIGKILL)
            storm.wait()
    assert storm.returncode == 0, said
