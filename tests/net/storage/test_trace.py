"""The trace: its lines wait while the disk is full, torn ones are written again, and a loss of lines is noticed."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from aflock.net.commands.replay import replay
from aflock.net.storage import trace as traces
from aflock.net.storage.data_folder import DataFolder, snapshots
from tests.net.storage.folders import begun, settings, told, work


class FullDisk:
    """Takes so many bytes of the trace and no more."""

    def __init__(self, free: int) -> None:
        self.free = free

    def pwrite(self, descriptor: int, data: bytes, offset: int) -> int:
        if not self.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(self.free, len(data))
        self.free -= taken
        return os.pwrite(descriptor, data[:taken], offset)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


# --- the trace -------------------------------------------------------------------------------------------------------


def test_the_lines_of_a_trace_wait_while_the_disk_is_full(store: DataFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    work(store, 3)
    with monkeypatch.context() as patched:
        patched.setattr(traces, "os", FullDisk(free=50))
        work(store, 100)  # far more lines than any buffer of a file holds
        assert store.federation.version == 103
        assert not (store.folder / "trace.jsonl").read_bytes().endswith(b"\n")
        with pytest.raises(OSError, match="No space left"):
            store.snapshot()  # it would say that the trace is longer than it is
        assert not snapshots(store.folder)
    work(store)
    lines = told(store.folder)
    assert sum(line["kind"] == "arrival" for line in lines) == 104
    store.snapshot()
    store.close()
    assert replay(store.folder / "trace.jsonl")["agrees"]


def test_a_trace_is_cut_back_to_the_snapshot_and_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with closing(begun(folder)) as store:
        work(store, 2)
        store.snapshot()
        work(store, 3)
        whole = (folder / "trace.jsonl").read_bytes()
    for torn in (whole[:-1], whole + b'{"kind": "dr', whole[: len(whole) // 2]):
        (folder / "trace.jsonl").write_bytes(torn)
        DataFolder(folder, settings()).close()
        if len(torn) > len(whole) // 2:
            assert (folder / "trace.jsonl").read_bytes() == whole


def test_a_trace_that_lost_lines_of_a_snapshot_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "fed"
    with closing(begun(folder)) as store:
        work(store, 2)
        store.snapshot()
    (folder / "trace.jsonl").write_bytes(b"")
    DataFolder(folder, settings()).close()
    assert "lines are lost" in caplog.text
    assert not replay(folder / "trace.jsonl")["agrees"]


def test_a_killed_servers_journal_may_know_more_than_its_trace(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with closing(begun(folder)) as store:
        work(store, 2)
        store.snapshot()
        work(store, 2)
    lines = (folder / "trace.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "trace.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:10])
    assert replay(folder / "trace.jsonl")["agrees"]
    (folder / "trace.jsonl").write_bytes(b"".join([*lines[:-2], lines[-1]]))  # a line in the middle is another thing
    assert not replay(folder / "trace.jsonl")["agrees"]
