"""A federation's folder: what a new start with other settings, a second server or a wrong clock does to it."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from aflock.config import ConfigError
from aflock.errors import StateError
from aflock.net.commands.replay import replay
from aflock.net.protocol.refusals import Refused
from aflock.net.protocol.wire import UpdateHead
from aflock.net.server.settings import Settings
from aflock.net.storage import data_folder as module
from aflock.net.storage import model_file as weights
from aflock.net.storage.data_folder import DataFolder, encoded
from aflock.net.storage.group_commit import update_record
from aflock.net.storage.journal import JournalInUse
from tests.net.storage.folders import HOLDING, LENGTH, begun, let, settings, told, work

# --- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_smaller_budget_does_not_undo_what_has_happened(tmp_path: Path, snapshot: bool) -> None:
    """A killed server's journal is lived through as it was, whatever the file says now; then the federation is over."""
    folder = tmp_path / "fed"
    with closing(begun(folder, strategy=HOLDING)) as store:
        work(store, 10)
        if snapshot:
            store.snapshot()
        before = store.federation.model.copy()
    with closing(DataFolder(folder, settings(HOLDING, {"uploads": 5}))) as store:
        assert store.federation.counts.updates == 10
        assert store.federation.ended == "5 updates have come"
        assert store.federation.version == 3  # what was held is not lost
        assert not np.array_equal(store.federation.model, before)
    assert replay(folder / "trace.jsonl")["agrees"]


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_larger_budget_lets_a_federation_go_on(tmp_path: Path, snapshot: bool) -> None:
    folder = tmp_path / "fed"
    with closing(begun(folder, strategy=HOLDING, budget={"uploads": 6})) as store:
        work(store, 6)
        assert store.federation.ended
        with pytest.raises(Refused, match="ended"):
            store.federation.active_client("alice")
        if snapshot:
            store.snapshot()
        model = store.federation.model.copy()
    with closing(DataFolder(folder, settings(HOLDING, {"uploads": 8}))) as store:
        assert store.federation.state == "running"
        assert np.array_equal(store.federation.model, model)  # the step of the first end has been made
        work(store, 2)
        assert store.federation.ended == "8 updates have come"
    for _ in range(2):
        with closing(DataFolder(folder, settings(HOLDING, {"uploads": 8}))) as store:
            assert store.federation.ended == "8 updates have come"
    assert replay(folder / "trace.jsonl")["agrees"]


def test_another_model_to_begin_with_is_refused(tmp_path: Path) -> None:
    """Without a snapshot everything would come out otherwise, and nobody would know."""
    file, folder = tmp_path / "w0.safetensors", tmp_path / "fed"

    def opened() -> DataFolder:
        document = {**settings().resolved(), "model": {"name": "vector", "file": str(file)}}
        return DataFolder(folder, Settings.build(document))

    weights.save(file, np.zeros(LENGTH, np.float32))
    with closing(opened()) as store:
        let(store, "hello", name="alice", gen=1)
        work(store)
    weights.save(file, np.ones(LENGTH, np.float32))
    with pytest.raises(StateError, match="put its file back"):
        opened()
    weights.save(file, np.zeros(LENGTH, np.float32))
    with closing(opened()) as store:
        assert store.federation.version == 1


def test_the_kept_file_need_not_pass_todays_rules_where_it_does_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    begun(folder).close()
    kept = folder / "federation.toml"
    kept.write_text(kept.read_text().replace("[server]\n", "[server]\nnames = ''\n"))
    assert "names = ''" in kept.read_text()
    DataFolder(folder, settings()).close()


# --- snapshots -------------------------------------------------------------------------------------------------------


def test_a_start_that_fails_does_not_settle_what_the_federation_is(tmp_path: Path) -> None:
    wrong = {"strategy": {"name": "asgd"}, "model": {"name": "vector", "file": "none"}, "federation": {"clients": 1}}
    with pytest.raises(ConfigError, match="cannot be read"):
        DataFolder(tmp_path, Settings.build(wrong))
    with closing(begun(tmp_path)) as store:
        work(store)


# --- starting --------------------------------------------------------------------------------------------------------


def test_a_second_server_changes_nothing(store: DataFolder) -> None:
    before = (store.folder / "federation.toml").read_bytes()
    with pytest.raises(JournalInUse):
        DataFolder(store.folder, settings(port=1234))
    assert (store.folder / "federation.toml").read_bytes() == before


def test_a_start_that_fails_leaves_the_folder_to_others(store: DataFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    store.close()
    with monkeypatch.context() as patched:
        patched.setattr(Settings, "start", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            DataFolder(store.folder, settings())
    DataFolder(store.folder, settings()).close()


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_time_never_runs_backwards(jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "fed"

    class Clock:
        offset = 0.0

        def time(self) -> float:
            return time.time() + self.offset

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    for offset in (0.0, jump, 0.0):
        clock.offset = offset
        with closing(begun(folder)) as store:
            work(store, 2)
    times = [line["time"] for line in told(folder)]
    assert times == sorted(times)
    assert replay(folder / "trace.jsonl")["agrees"]


@pytest.mark.parametrize("names", [["gradient"], ["delta", "control"]])
def test_the_head_of_an_update_is_what_json_would_write(names: list[str]) -> None:
    head, norms = UpdateHead(3, 4, 5, tuple(names), "float32"), [1.5e40, 1e-45][: len(names)]
    record, text = update_record(1234.5678901234567, "al-1_c", 12, head, True, norms)
    assert text == encoded(record)
    assert json.loads(text) == {
        "k": "update", "t": 1234.5678901234567, "name": "al-1_c", "j": 12, "v": 3, "s": 4, "e": 5,
        "n": names, "enc": "float32", "next": 1, "norm": norms,
    }  # fmt: skip
