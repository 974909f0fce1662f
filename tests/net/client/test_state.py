"""The client's state on disk: what is sent after a restart, modes, locks, full disks, a lost memory."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from aflock import state, strategies
from aflock.errors import MissingVector, StateError
from aflock.net.client.client import Client, JobReport, StateInUse
from aflock.net.client.session import Unavailable
from aflock.net.client.state import ClientState, EncodedUpdate
from tests.net.client.fake_server import Refusal, serving
from tests.net.client.helpers import blobs, changing, made, one, plain, remembering

pytestmark = pytest.mark.timeout(60)


def test_an_update_that_was_not_seen_taken_is_sent_first(tmp_path: Path) -> None:
    """Also without a memory; the client got no answer to it."""
    with plain() as server:
        server.faults["update"] = ["drop after", *[Refusal(503)] * 1000]
        with pytest.raises(Unavailable):
            made(server, tmp_path, give_up=0.05).run_with(one)
        assert server.taken.total() == 1
        server.faults["update"].clear()
        assert made(server, tmp_path).run_with(one, jobs=1).jobs == 1
        assert list(server.taken.values()) == [1, 1]
        assert server.kinds()[-3:-1] == ["update", "job"]


def test_an_update_whose_job_was_dropped_meanwhile_is_void(tmp_path: Path) -> None:
    with plain() as server:
        server.faults["update"] = ["drop before"] * 1000
        with pytest.raises(Unavailable):
            made(server, tmp_path, give_up=0.05).run_with(one)
        server.faults["update"].clear()
        server.coordinator.drop(0, time.monotonic())
        assert made(server, tmp_path).run_with(one, jobs=1).jobs == 1
        assert server.taken.total() == 1


def test_files_are_the_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "state"
    modes: set[int] = set()

    def check(progress: JobReport) -> None:
        modes.update(stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir())

    with remembering() as server:
        server.faults["update"] = ["", "", *[Refusal(503)] * 1000]
        with pytest.raises(Unavailable):
            made(server, folder, give_up=0.05).run_with(changing(), progress=check)
    modes.update(stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir())
    assert {file.name for file in folder.iterdir()} == {"lock", "memory.safetensors", "pending.safetensors"}
    assert modes == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    found = state.load(folder / "pending.safetensors")
    assert (found["federation"], found["encoding"], list(found["vectors"])) == ("f00d", "float32", ["gradient"])


def test_the_state_has_a_folder_of_its_own_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with plain() as server:
        Client(server.url, server.token()).run_with(one, jobs=1)
    assert [file.name for file in (tmp_path / "aflock" / "f00d" / "alice").iterdir()] == ["lock"]
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with plain() as server:
        Client(server.url, server.token()).run_with(one, jobs=1)
    assert (tmp_path / "home" / ".local" / "state" / "aflock" / "f00d" / "alice" / "lock").exists()


def test_two_processes_cannot_be_the_same_client(tmp_path: Path) -> None:
    first = ClientState(tmp_path, "f00d")
    with plain() as server, pytest.raises(StateInUse, match="another process uses"):
        made(server, tmp_path).run_with(one)
    first.close()
    ClientState(tmp_path, "f00d").close()


def test_a_memory_of_another_federation_is_left_alone(tmp_path: Path) -> None:
    kept = ClientState(tmp_path, "f00d")
    kept.store_pending(EncodedUpdate(1, 0, 1, 1, "float32", {"gradient": b"1234"}), {"told gradient": np.ones(1)})
    kept.accept_pending()
    kept.close()
    with pytest.raises(StateError, match="belongs to another federation"):
        ClientState(tmp_path, "beef")
    again = ClientState(tmp_path, "f00d")
    assert again.memory["told gradient"].tolist() == [1.0]
    assert again.pending is None
    again.forget()
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]
    again.close()


def test_a_full_disk_gives_the_job_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with plain() as server:
        monkeypatch.setattr(state, "save", full)
        with pytest.raises(StateError, match="No space left on device"):
            made(server, tmp_path).run_with(one)
        assert server.kinds()[-1] == "decline"


def test_a_lost_memory_is_told_and_leaving_is_the_way_out(tmp_path: Path) -> None:
    x, y = blobs(10)
    with serving(strategies.create("masfl", clients=1, buffer=1, beta=0.5), np.zeros(15, np.float32)) as server:
        made(server, tmp_path).run(nn.Linear(4, 3), [(x, y)], jobs=3)
        (tmp_path / "memory.safetensors").unlink()
        with pytest.raises(StateError, match=r"is gone .*; put its state_dir back, or call leave\(\)"):
            made(server, tmp_path).run(nn.Linear(4, 3), [(x, y)], jobs=1)
        made(server, tmp_path).leave()
        assert server.kinds()[-1] == "leave"
        made(server, tmp_path).run(nn.Linear(4, 3), [(x, y)], jobs=2)
        assert [event.first for event in server.happened("arrival")] == [True, False, False, True, False]


def test_a_rule_that_misses_something_else_says_so() -> None:
    x, y = blobs(10)
    strategy, says = strategies.create("asgd", clients=1), "needs the job's extra vector 'momentum'"
    with serving(strategy, np.zeros(15, np.float32)) as server, pytest.raises(MissingVector, match=says):
        made(server).run(nn.Linear(4, 3), [(x, y)], local="masfl")
