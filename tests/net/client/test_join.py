"""`aflock join` with client files that work and that fail."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aflock import cli, strategies
from aflock.local import Memory, Trained
from aflock.net.commands.join import TrainingFailed
from aflock.types import Job
from tests.net.client.fake_server import FakeServer, serving
from tests.net.client.helpers import made, plain

pytestmark = pytest.mark.timeout(60)

CLIENT_FILE = """
import torch
from torch import nn

model = nn.Linear(4, 3)
batches = [(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))]
"""


def join(server: FakeServer, folder: Path, more: str, *options: str) -> int:
    """`aflock join`; its exit code."""
    (folder / "my_client.py").write_text(CLIENT_FILE + more)
    (folder / "token").write_text(server.token())
    (folder / "token").chmod(0o600)
    files = ["--token-file", str(folder / "token"), "--client-file", str(folder / "my_client.py")]
    return cli.main([*options, "join", server.url, *files, "--state-dir", str(folder / "state"), "--jobs", "1"])


def fifteen(**options: Any) -> Any:
    return serving(strategies.create("asgd", clients=1), np.zeros(15, np.float32), **options)


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        ("batches = [(torch.ones(2, 5), torch.zeros(2, dtype=torch.long))]", 1, "RuntimeError: mat1 and mat2 shapes"),
        (
            "def batches():\n    raise KeyError('mine')",
            1,
            "training failed in .*my_client.py, line 8: KeyError: 'mine'",
        ),
        (
            "def batches():\n    return open('no.csv')",
            1,
            "failed in .*my_client.py, line 8: FileNotFoundError: .*no.csv",
        ),
        ("def steps():\n    raise BrokenPipeError('mine')", 1, "my_client.py, line 8: BrokenPipeError: mine"),
        ("def loss(output, y):\n    raise ValueError('a\\nb')", 1, "ValueError: a b\\n"),
        ("def model():\n    raise KeyError('mine')", 2, "my_client.py cannot be run: KeyError: 'mine'"),
        ("1 / 0", 2, "cannot be run: ZeroDivisionError: division by zero"),
        ("model = nn.Linear(4, 4)", 2, "has 20 weights, the federation's 15"),
        ("buffers = 'loca'", 2, "loca"),
    ],
)
def test_a_client_file_that_fails_says_so_in_one_line(
    more: str, code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fifteen() as server:
        assert join(server, tmp_path, more) == code
        assert not server.coordinator.working
    err = capsys.readouterr().err
    assert (err.startswith("aflock: "), err.count("\n")) == (True, 1)
    assert re.search(says, err)


def test_the_traceback_of_a_client_file_is_to_be_had(tmp_path: Path) -> None:
    with fifteen() as server, pytest.raises(TrainingFailed) as caught:
        join(server, tmp_path, "def batches():\n    raise KeyError('mine')", "--debug")
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_old_name_of_the_client_file_still_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_client.py").write_text(CLIENT_FILE)
    (tmp_path / "token").touch(0o600)
    with fifteen() as server:
        (tmp_path / "token").write_text(server.token())
        files = ["--token-file", str(tmp_path / "token"), "--recipe", str(tmp_path / "my_client.py")]
        assert cli.main(["join", server.url, *files, "--state-dir", str(tmp_path / "state"), "--jobs", "1"]) == 0
        assert server.taken.total() == 1
    with pytest.raises(SystemExit):
        cli.main(["join", "--help"])
    shown = capsys.readouterr().out
    assert ("--client-file FILE" in shown, "recipe" in shown) == (True, False)


def test_an_error_in_training_comes_without_a_story_about_event_loops() -> None:
    def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
        raise ZeroDivisionError("my own")

    with plain() as server, pytest.raises(ZeroDivisionError) as caught:
        made(server).run_with(train)
    assert caught.value.__context__ is None


def test_a_client_file_may_have_a_loss_and_buffers(tmp_path: Path) -> None:
    more = """
model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3))
buffers = "local"

def loss(output, y):
    return 2 * output.sum()
"""
    with fifteen() as server:
        assert join(server, tmp_path, more) == 0
        bias = server.strategy.model[-3:].copy()
    assert bias[0] == bias[2] != 0  # no cross-entropy of class 0 is like that
    assert (tmp_path / "state" / "memory.safetensors").exists()
