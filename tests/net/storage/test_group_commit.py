"""Group commit: records become durable in batches, happen in order, and every sender gets an answer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aflock import state
from aflock.net.protocol.refusals import Refused
from aflock.net.server.settings import Settings
from aflock.net.storage import data_folder
from aflock.net.storage.data_folder import DataFolder, encoded, snapshots
from aflock.net.storage.group_commit import APPLY_AT_ONCE, BATCH, BATCH_BYTES, GroupCommit
from aflock.net.storage.journal import JournalFailed, JournalFull
from aflock.net.storage.segment import JournalEntry, JournalError
from tests.net.real_server import SMALL
from tests.net.server.in_process import fail
from tests.net.storage.folders import begun


def commit(
    folder: Path, play: Callable[[GroupCommit, DataFolder], Any], on_applied: Callable[[], None] = lambda: None
) -> None:
    """Plays with a store's commits; they must come to their end."""

    async def main(store: DataFolder) -> None:
        commits = GroupCommit(store, on_write=lambda seconds, count: None, on_applied=on_applied)
        try:
            async with asyncio.timeout(2):
                await play(commits, store)
        finally:
            async with asyncio.timeout(2):
                await commits.close()

    with closing(DataFolder(folder, Settings.build(SMALL))) as store:
        asyncio.run(main(store))


def pull(commits: GroupCommit, done: Callable[[Any, Refused | None], None]) -> None:
    record = {"k": "pull", "t": commits.now(), "name": "alice"}
    commits.put(record, encoded(record), b"", done)


def _tell(told: list[int], k: int, result: Any, refusal: Refused | None) -> None:
    told.append(k)


def test_a_sender_that_cannot_be_told_does_not_keep_others_from_being_told(tmp_path: Path) -> None:
    told: list[int] = []

    async def play(commits: GroupCommit, store: DataFolder) -> None:
        await commits.submit("hello", name="alice", gen=1)
        for k in range(3 * APPLY_AT_ONCE):
            pull(commits, fail if k == 2 else partial(_tell, told, k))
        while len(told) < 3 * APPLY_AT_ONCE - 1:
            await asyncio.sleep(0.01)

    with contextlib.suppress(TimeoutError):
        commit(tmp_path / "fed", play)
    assert told == [k for k in range(3 * APPLY_AT_ONCE) if k != 2]


def test_the_trace_has_a_record_before_its_sender_is_answered(tmp_path: Path) -> None:
    """Else an acknowledged update that the journal loses would be missing from the proof of the loss, too."""
    told: list[tuple[int, int]] = []

    async def play(commits: GroupCommit, store: DataFolder) -> None:
        await commits.submit("hello", name="alice", gen=1)

        def note(k: int, result: Any, refusal: Refused | None) -> None:
            told.append((k + 1, (store.folder / "trace.jsonl").read_text().count('"kind": "pull"')))

        for k in range(3 * APPLY_AT_ONCE):
            pull(commits, partial(note, k))
        while len(told) < 3 * APPLY_AT_ONCE:
            await asyncio.sleep(0.01)

    commit(tmp_path / "fed", play)
    assert all(pulls <= traced for pulls, traced in told), told


def test_a_sender_that_cannot_be_told_of_a_full_disk_does_not_end_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise JournalFull("the disk is full")

    async def play(commits: GroupCommit, store: DataFolder) -> None:
        await commits.submit("hello", name="alice", gen=1)
        with monkeypatch.context() as patched:
            patched.setattr(store, "write", full)
            pull(commits, fail)
            await asyncio.sleep(0.2)
        assert await commits.submit("pull", name="alice") is not None

    commit(tmp_path / "fed", play)


def test_what_happens_after_records_may_fail_without_silencing_the_server(tmp_path: Path) -> None:
    failures = [MemoryError("on purpose")]

    def settled() -> None:
        if failures:
            raise failures.pop()

    async def play(commits: GroupCommit, store: DataFolder) -> None:
        await commits.submit("hello", name="alice", gen=1)
        await asyncio.sleep(0.1)
        with contextlib.suppress(Refused):  # a server that stops says so; one that hangs does not
            await commits.submit("pull", name="alice")

    commit(tmp_path / "fed", play, settled)


def run(store: DataFolder, play: Callable[[GroupCommit], Any], on_applied: Callable[[], None] = lambda: None) -> Any:
    async def main() -> Any:
        commits = GroupCommit(store, on_write=lambda seconds, count: None, on_applied=on_applied)
        try:
            return await play(commits)
        finally:
            await commits.close()

    return asyncio.run(main())


def make_snapshots_due(patch: pytest.MonkeyPatch) -> None:
    """A snapshot is due before every write."""
    patch.setattr(data_folder, "MEGABYTE", 0)
    patch.setattr(data_folder, "JOURNAL_PER_STATE", 0)


def test_a_record_that_cannot_happen_stops_the_server_instead_of_silencing_it(
    store: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the journal; only a new start can tell what is true."""

    def fail(*_: Any) -> None:
        raise MemoryError

    async def play(commits: GroupCommit) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(store.federation, "apply", fail)
            with pytest.raises(Refused) as refusal:
                await commits.submit("pull", name="alice")
            assert refusal.value.status == 503
        assert isinstance(commits.failed, MemoryError)
        with pytest.raises(Refused):
            await commits.submit("pull", name="alice")
        assert store.journal.next == before + 1

    before = store.journal.next
    run(store, play)
    assert not snapshots(store.folder)  # nobody knows whether what is in memory is true


@contextmanager
def largest_file(most: int) -> Iterator[None]:
    """As if the disk ended there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_refuses_and_a_later_record_is_taken(tmp_path: Path) -> None:
    async def play(commits: GroupCommit) -> None:
        assert await commits.submit("pull", name="alice") is not None
        with largest_file(first.journal.size + 20):
            with pytest.raises(Refused, match="the server's disk is full") as refusal:
                await commits.submit("pull", name="alice")
            assert (refusal.value.status, refusal.value.code) == (503, "disk-full")
            assert commits.full
        assert await commits.submit("pull", name="alice") is not None
        assert not commits.full

    with closing(begun(tmp_path)) as first:
        before = first.journal.next
        run(first, play)
        assert first.journal.next == before + 2
    with closing(begun(tmp_path)) as again:
        assert again.federation.counts.pulls == 2


def test_after_a_failed_sync_the_server_takes_nothing_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def play(commits: GroupCommit) -> None:
        assert await commits.submit("pull", name="alice") is not None
        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", fails)
            with pytest.raises(Refused, match="it must be started again"):
                await commits.submit("pull", name="alice")
        with pytest.raises(Refused, match="the server is stopping"):
            await commits.submit("pull", name="alice")
        assert isinstance(commits.failed, JournalFailed)

    with closing(begun(tmp_path)) as store:
        run(store, play)
        assert store.federation.counts.pulls == 1
    assert not snapshots(tmp_path)
    begun(tmp_path).close()


def test_a_journal_that_cannot_be_tidied_goes_on(store: DataFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise JournalError("the folder cannot be written")

    async def play(commits: GroupCommit) -> None:
        monkeypatch.setattr(store.journal, "rotate", refuse)
        make_snapshots_due(monkeypatch)
        assert await commits.submit("pull", name="alice") is not None
        assert commits.failed is None
        assert len(snapshots(store.folder)) == 1

    run(store, play)


def test_old_snapshots_go_though_the_journal_cannot_grow(store: DataFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be just the space they take that is missing."""

    def refuse(*_: Any) -> None:
        raise JournalFull("the disk is full")

    async def play(commits: GroupCommit) -> None:
        for _ in range(5):
            with monkeypatch.context() as patched:
                patched.setattr(store.journal, "rotate", refuse)
                make_snapshots_due(patched)
                assert await commits.submit("pull", name="alice") is not None

    run(store, play)
    assert len(snapshots(store.folder)) == 2


def test_a_snapshot_waits_for_what_is_durable_and_has_not_happened(
    store: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing runs ahead of settling; what is saved must be the state at the journal's end."""
    count, before, write = 5 * APPLY_AT_ONCE, store.journal.next - 1, store.write

    def slowly(batch: Sequence[JournalEntry]) -> None:
        write(batch)
        make_snapshots_due(monkeypatch)
        time.sleep(0.1)

    async def play(commits: GroupCommit) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(store, "write", slowly)
            first = asyncio.gather(*(commits.submit("pull", name="alice") for _ in range(count)))
            await asyncio.sleep(0.05)
        await asyncio.gather(first, commits.submit("pull", name="alice"))
        (saved,) = snapshots(store.folder)
        assert saved.stem == f"snapshot-{before + count:016d}"
        assert state.load(saved)["state"]["federation"]["counts"]["pulls"] == count

    run(store, play, lambda: time.sleep(0.05))  # a snapshot that did not wait would be made meanwhile


@pytest.mark.parametrize(
    ("count", "length", "expected"),
    [(2 * BATCH + 5, 0, [BATCH, BATCH, 5]), (6, BATCH_BYTES // 2, [2, 2, 2]), (3, BATCH_BYTES, [1, 1, 1])],
)
def test_a_write_takes_so_many_records_and_no_more(
    store: DataFolder, monkeypatch: pytest.MonkeyPatch, count: int, length: int, expected: list[int]
) -> None:
    """Large records would wait for each other."""
    sizes, write, body = list[int](), store.write, bytes(length)

    def counted(batch: Sequence[JournalEntry]) -> None:
        sizes.append(len(batch))
        write(batch)

    async def play(commits: GroupCommit) -> None:
        monkeypatch.setattr(store, "write", counted)
        await asyncio.gather(*(commits.submit("pull", body, name="alice") for _ in range(count)))

    run(store, play)
    assert sizes == expected


def test_senders_see_what_came_of_their_records_before_others_are_woken(store: DataFolder) -> None:
    """Whoever got nothing would otherwise begin to wait after the call he waits for."""
    order: list[str] = []

    async def play(commits: GroupCommit) -> None:
        await commits.submit("pull", name="nobody")
        order.append("sender")
        await asyncio.sleep(0.05)

    run(store, play, lambda: order.append("settled"))
    assert order == ["sender", "settled"]
