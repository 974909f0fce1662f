"""Snapshots: which one is loaded, which are kept, and what they let the journal forget."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aflock import state
from aflock.errors import StateError
from aflock.net.commands.replay import replay
from aflock.net.storage import data_folder as module
from aflock.net.storage.data_folder import DataFolder, snapshots
from aflock.net.storage.segment import CorruptJournal
from tests.net.storage.folders import begun, save_often, settings, told, work

# --- snapshots -------------------------------------------------------------------------------------------------------


def test_a_snapshot_with_other_numbers_in_it_is_put_aside_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(begun(tmp_path, snapshots=2)) as store:
        for _ in range(2):
            work(store, 2)
            store.snapshot()
        before = store.federation.model.tobytes()
    newest = snapshots(tmp_path)[0]
    raw = bytearray(newest.read_bytes())
    raw[-100] ^= 1  # one bit of a weight
    newest.write_bytes(raw)
    with closing(begun(tmp_path, snapshots=2)) as again:
        assert again.federation.model.tobytes() == before
    assert "its checksum does not match its contents" in caplog.text
    assert newest.with_suffix(".damaged").is_file()


def test_a_snapshot_with_any_bit_of_its_table_flipped_is_passed_over(tmp_path: Path) -> None:
    """The table says where each tensor stands: another table is another state."""
    with closing(begun(tmp_path)) as store:
        save_often(store, 2)
        before = store.federation.model.tobytes()
    newest, older = snapshots(tmp_path)
    whole = newest.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    assert b'"data_offsets"' in whole[:length]
    copy = tmp_path / "copy"
    for offset in range(0, 8 * length, 11):
        raw = bytearray(whole)
        raw[offset // 8] ^= 1 << offset % 8
        copy.write_bytes(raw)
        with pytest.raises(StateError):
            state.load(copy)
    copy.unlink()
    table = whole.index(b'"data_offsets"')
    for offset in (8 * table + 130, 8 * whole.index(b'"checksum"') + 9):
        raw = bytearray(whole)
        raw[offset // 8] ^= 1 << offset % 8
        newest.write_bytes(raw)
        assert replay(tmp_path / "trace.jsonl")["agrees"]
        with closing(DataFolder(tmp_path, settings())) as again:
            assert again.federation.model.tobytes() == before
        assert snapshots(tmp_path) == [older]
        newest.with_suffix(".damaged").unlink()


def test_a_damaged_snapshot_is_put_aside_for_an_older_one(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with closing(begun(folder)) as store:
        save_often(store, 3)
        work(store)
        trace, model = told(folder), store.federation.model
    newest, older = snapshots(folder)
    os.truncate(newest, 1000)
    with closing(DataFolder(folder, settings())) as again:
        np.testing.assert_array_equal(again.federation.model, model)
        assert told(folder) == trace
        assert snapshots(folder) == [older]
        again.snapshot()
        work(again)
        again.snapshot()
        again.delete_old()
        assert len(snapshots(folder)) == 2
    assert replay(folder / "trace.jsonl")["agrees"]


def test_snapshots_stay_where_they_are_if_nothing_can_be_made_without_them(tmp_path: Path) -> None:
    """They may be of another version of aflock, which only needs to be started again."""
    folder = tmp_path / "fed"
    with closing(begun(folder)) as store:
        save_often(store, 4)
    kept = {file: file.read_bytes() for file in snapshots(folder)}
    for file in kept:
        os.truncate(file, 1000)
    with pytest.raises(CorruptJournal):
        DataFolder(folder, settings())
    for file, content in kept.items():
        file.write_bytes(content)
    with closing(DataFolder(folder, settings())) as again:
        assert again.federation.version == 8
    assert sum(line["kind"] == "arrival" for line in told(folder)) == 8


def test_the_journal_is_as_long_as_the_snapshots_need_it(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with closing(begun(folder)) as store:
        save_often(store, 5)
    assert len(list((folder / "journal").glob("*.log"))) == 2
    lived = replay(folder / "trace.jsonl")
    assert lived["agrees"]
    assert lived["from_version"] == 8


def test_an_archive_keeps_the_journal_from_the_beginning(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with closing(begun(folder, archive=True)) as store:
        save_often(store, 5)
    assert replay(folder / "trace.jsonl")["from_version"] == 0


def test_an_archive_that_began_late_is_replayed_from_its_oldest_snapshot(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    for archive in (False, True):
        with closing(begun(folder, archive=archive)) as store:
            save_often(store, 3)
    lived = replay(folder / "trace.jsonl")
    assert lived["agrees"]
    assert lived["from_version"] > 0


def test_what_is_recovered_counts_towards_the_next_snapshot(tmp_path: Path) -> None:
    """Else a server that never lives long would have ever more to recover."""
    folder = tmp_path / "fed"
    for due in (False, False, True):
        with closing(begun(folder, snapshot=1)) as store:
            work(store, 100)
            assert store.snapshot_due == due


def test_a_snapshot_that_fails_is_not_tried_after_every_batch(
    store: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    work(store)
    monkeypatch.setattr(module, "MEGABYTE", 1)
    assert store.snapshot_due
    with monkeypatch.context() as patched:
        patched.setattr(state, "save", full)
        with pytest.raises(OSError, match="the disk is full"):
            store.snapshot()
    assert not store.snapshot_due


def test_what_a_killed_server_had_not_finished_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    begun(folder).close()
    (folder / ".snapshot-0000000000000007.safetensors.x3f").write_bytes(b"half")
    DataFolder(folder, settings()).close()
    assert not list(folder.glob(".snapshot-*"))


# --- commits ---------------------------------------------------------------------------------------------------------


def test_a_file_that_is_only_called_like_a_snapshot(store: DataFolder) -> None:
    other = store.folder / "snapshot-before-upgrade.safetensors"
    other.write_bytes(b"mine")
    save_often(store, 4)
    assert len(snapshots(store.folder)) == 2
    assert other.read_bytes() == b"mine"
