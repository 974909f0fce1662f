"""A federation's folder: what a crash, a full disk or a wrong clock does to it. The storms are in test_chaos.py."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aflock import state
from aflock.config import ConfigError
from aflock.errors import StateError
from aflock.net import store as module
from aflock.net import trace as traces
from aflock.net import weights
from aflock.net.commits import AT_ONCE, Commits
from aflock.net.federation import Federation, Given
from aflock.net.journal import JournalFull, JournalInUse
from aflock.net.leases import Leases
from aflock.net.refusals import Refused
from aflock.net.replay import replay
from aflock.net.segment import CorruptJournal, Entry, JournalError, entry
from aflock.net.settings import Settings
from aflock.net.store import Store, encoded, snapshots, update_record
from aflock.net.wire import UpdateHead

LENGTH = 1000


def settings(strategy: dict[str, Any] | None = None, budget: dict[str, int] | None = None, **server: Any) -> Settings:
    return Settings.build(
        {
            "strategy": strategy or {"name": "asgd"},
            "model": {"name": "vector", "length": LENGTH},
            "federation": {"clients": 1},
            "budget": budget or {},
            "server": server,
        }
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(begun(tmp_path / "fed")) as made:
        yield made


def begun(folder: Path, **other: Any) -> Store:
    """A federation with one member."""
    made = Store(folder, settings(**other))
    let(made, "hello", name="alice", gen=1)
    return made


def let(store: Store, kind: str, body: bytes = b"", **head: Any) -> Any:
    """A record is written and happens."""
    record = {"k": kind, "t": store.now(), **head}
    store.write([entry(encoded(record), body)])
    happened = store.federation.apply(record, body)
    store.tell()
    return happened


def work(store: Store, jobs: int = 1) -> None:
    for _ in range(jobs):
        given: Given = let(store, "pull", name="alice")
        gradient, names = np.full(LENGTH, given.id, np.float32), list(store.federation.strategy.needs)
        let(
            store, "update", gradient.tobytes(),
            name="alice", j=given.id, v=given.job.version, s=1, e=1, n=names, enc="float32", next=0,
        )  # fmt: skip


def save_often(store: Store, times: int) -> None:
    """Two jobs before each snapshot."""
    for _ in range(times):
        work(store, 2)
        store.snapshot()
        store.tidy()


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


class FullDisk:
    """Takes so many bytes of the trace and no more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def pwrite(self, descriptor: int, data: bytes, place: int) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(self.room, len(data))
        self.room -= taken
        return os.pwrite(descriptor, data[:taken], place)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


# --- the end ---------------------------------------------------------------------------------------------------------


HOLDING = {"name": "fedbuff", "buffer": 4}


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_smaller_budget_does_not_undo_what_has_happened(tmp_path: Path, snapshot: bool) -> None:
    """A killed server's journal is lived through as it was, whatever the file says now; then the federation is over."""
    folder = tmp_path / "fed"
    with closing(begun(folder, strategy=HOLDING)) as store:
        work(store, 10)
        if snapshot:
            store.snapshot()
        before = store.federation.model.copy()
    with closing(Store(folder, settings(HOLDING, {"uploads": 5}))) as store:
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
            store.federation.seat("alice")
        if snapshot:
            store.snapshot()
        model = store.federation.model.copy()
    with closing(Store(folder, settings(HOLDING, {"uploads": 8}))) as store:
        assert store.federation.state == "running"
        assert np.array_equal(store.federation.model, model)  # the step of the first end has been made
        work(store, 2)
        assert store.federation.ended == "8 updates have come"
    for _ in range(2):
        with closing(Store(folder, settings(HOLDING, {"uploads": 8}))) as store:
            assert store.federation.ended == "8 updates have come"
    assert replay(folder / "trace.jsonl")["agrees"]


@pytest.mark.parametrize(("target", "state"), [(0.8, "ended"), (0.9, "ended"), (0.95, "running"), (None, "running")])
def test_a_federation_goes_on_that_does_not_reach_its_new_target(target: float | None, state: str) -> None:
    federation = Federation(settings(), np.zeros(LENGTH, np.float32))
    federation.apply({"k": "hello", "t": 0.0, "name": "alice", "gen": 1}, b"")
    federation.apply({"k": "end", "t": 1.0, "why": "accuracy 0.9000 reaches the target", "accuracy": 0.9}, b"")
    again = Federation(settings(), np.zeros(LENGTH, np.float32))
    again.load_state_dict(federation.state_dict())
    for each in (federation, again):
        each.apply({"k": "terms", "t": 2.0, "terms": [None, None, target]}, b"")
        assert each.state == state


@pytest.mark.parametrize("rule", [{"name": "fedavg"}, {"name": "ace"}, {"name": "asgd"}, HOLDING])
def test_who_has_left_after_the_end_is_not_waited_for_when_it_goes_on(rule: dict[str, Any]) -> None:
    p = settings(rule).resolved()
    p["federation"] |= {"clients": 2, "concurrency": 2}
    federation = Federation(Settings.build(p), np.zeros(LENGTH, np.float32))

    def happens(kind: str, body: bytes = b"", **head: Any) -> Any:
        return federation.apply({"k": kind, "t": 0.0, **head}, body)

    for name in ("alice", "bob"):
        happens("hello", name=name, gen=1)
    assert all(happens("pull", name=name) for name in ("alice", "bob"))
    happens("end", why="accuracy 0.9000 reaches the target", accuracy=0.9)
    happens("leave", name="alice")
    happens("terms", terms=[None, None, 0.99])
    assert federation.coordinator.clients == {1}
    happens("hello", name="carol", gen=1)
    version = federation.version
    for name in ["bob", "carol"] * 4:  # bob has lost his job: he asks again
        given = happens("pull", name=name)
        if given is not None:
            names = ["gradient"] if given.job.first else list(federation.strategy.needs)
            happens(
                "update", np.ones(LENGTH * len(names), np.float32).tobytes(),
                name=name, j=given.id, v=given.job.version, s=1, e=1, n=names, enc="float32", next=0,
            )  # fmt: skip
    assert federation.version > version


def test_another_model_to_begin_with_is_refused(tmp_path: Path) -> None:
    """Without a snapshot everything would come out otherwise, and nobody would know."""
    file, folder = tmp_path / "w0.safetensors", tmp_path / "fed"

    def opened() -> Store:
        document = {**settings().resolved(), "model": {"name": "vector", "file": str(file)}}
        return Store(folder, Settings.build(document))

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
    Store(folder, settings()).close()


# --- the trace -------------------------------------------------------------------------------------------------------


def test_a_trace_that_finds_no_room_waits_and_loses_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    work(store, 3)
    with monkeypatch.context() as patched:
        patched.setattr(traces, "os", FullDisk(room=50))
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
        Store(folder, settings()).close()
        if len(torn) > len(whole) // 2:
            assert (folder / "trace.jsonl").read_bytes() == whole


def test_a_trace_that_lost_lines_of_a_snapshot_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "fed"
    with closing(begun(folder)) as store:
        work(store, 2)
        store.snapshot()
    (folder / "trace.jsonl").write_bytes(b"")
    Store(folder, settings()).close()
    assert "has lost lines" in caplog.text
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
    assert "has changed since it was saved" in caplog.text
    assert newest.with_suffix(".damaged").is_file()


def test_a_journal_that_was_taken_away_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(begun(tmp_path)) as store:
        work(store, 2)
        store.snapshot()
        work(store, 3)
    with closing(begun(tmp_path)):
        assert not caplog.records
    for file in (tmp_path / "journal").glob("*.log"):
        file.unlink()
    with closing(begun(tmp_path)) as again:
        assert again.federation.version == 2
    assert "acknowledged updates are lost" in caplog.text


def test_a_start_that_fails_does_not_settle_what_the_federation_is(tmp_path: Path) -> None:
    wrong = {"strategy": {"name": "asgd"}, "model": {"name": "vector", "file": "none"}, "federation": {"clients": 1}}
    with pytest.raises(ConfigError, match="cannot be read"):
        Store(tmp_path, Settings.build(wrong))
    with closing(begun(tmp_path)) as store:
        work(store)


def test_a_damaged_snapshot_is_put_aside_for_an_older_one(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with closing(begun(folder)) as store:
        save_often(store, 3)
        work(store)
        trace, model = told(folder), store.federation.model
    newest, older = snapshots(folder)
    os.truncate(newest, 1000)
    with closing(Store(folder, settings())) as again:
        np.testing.assert_array_equal(again.federation.model, model)
        assert told(folder) == trace
        assert snapshots(folder) == [older]
        again.snapshot()
        work(again)
        again.snapshot()
        again.tidy()
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
        Store(folder, settings())
    for file, content in kept.items():
        file.write_bytes(content)
    with closing(Store(folder, settings())) as again:
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


def test_a_snapshot_that_fails_is_not_tried_after_every_batch(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no room")

    work(store)
    monkeypatch.setattr(module, "MEGABYTE", 1)
    assert store.snapshot_due
    with monkeypatch.context() as patched:
        patched.setattr(state, "save", full)
        with pytest.raises(OSError, match="no room"):
            store.snapshot()
    assert not store.snapshot_due


def test_what_a_killed_server_had_not_finished_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    begun(folder).close()
    (folder / ".snapshot-0000000000000007.safetensors.x3f").write_bytes(b"half")
    Store(folder, settings()).close()
    assert not list(folder.glob(".snapshot-*"))


# --- starting --------------------------------------------------------------------------------------------------------


def test_a_second_server_changes_nothing(store: Store) -> None:
    before = (store.folder / "federation.toml").read_bytes()
    with pytest.raises(JournalInUse):
        Store(store.folder, settings(port=1234))
    assert (store.folder / "federation.toml").read_bytes() == before


def test_a_start_that_fails_leaves_the_folder_to_others(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.close()
    with monkeypatch.context() as patched:
        patched.setattr(Settings, "start", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Store(store.folder, settings())
    Store(store.folder, settings()).close()


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
    record, text = update_record(1234.5678901234567, "al-1_c", 12, UpdateHead(3, 4, 5, tuple(names), "float32"), True)
    assert text == encoded(record)
    assert json.loads(text) == {
        "k": "update", "t": 1234.5678901234567, "name": "al-1_c", "j": 12, "v": 3, "s": 4, "e": 5,
        "n": names, "enc": "float32", "next": 1,
    }  # fmt: skip


# --- commits ---------------------------------------------------------------------------------------------------------


def run(store: Store, play: Callable[[Commits], Any], on_settled: Callable[[], None] = lambda: None) -> Any:
    async def main() -> Any:
        commits = Commits(store, on_write=lambda seconds, count: None, on_settled=on_settled)
        try:
            return await play(commits)
        finally:
            await commits.close()

    return asyncio.run(main())


def test_a_record_that_cannot_happen_stops_the_server_instead_of_silencing_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the journal; only a new start can tell what is true."""

    def fail(*_: Any) -> None:
        raise MemoryError

    async def play(commits: Commits) -> None:
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


def test_a_full_disk_refuses_and_a_later_record_is_taken(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise JournalFull("no room")

    async def play(commits: Commits) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(store, "write", full)
            with pytest.raises(Refused) as refusal:
                await commits.submit("pull", name="alice")
            assert (refusal.value.status, refusal.value.code) == (503, "disk-full")
            assert commits.full
        assert await commits.submit("pull", name="alice") is not None
        assert not commits.full

    run(store, play)


def test_a_journal_that_cannot_be_tidied_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise JournalError("the folder cannot be written")

    async def play(commits: Commits) -> None:
        monkeypatch.setattr(store.journal, "rotate", refuse)
        monkeypatch.setattr(store, "_since", 1 << 40)  # a snapshot is due
        assert await commits.submit("pull", name="alice") is not None
        assert commits.failed is None
        assert len(snapshots(store.folder)) == 1

    run(store, play)


def test_old_snapshots_go_though_the_journal_cannot_grow(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be just the room they take that is missing."""

    def refuse(*_: Any) -> None:
        raise JournalFull("no room")

    async def play(commits: Commits) -> None:
        for _ in range(5):
            with monkeypatch.context() as patched:
                patched.setattr(store.journal, "rotate", refuse)
                patched.setattr(store, "_since", 1 << 40)  # a snapshot is due
                assert await commits.submit("pull", name="alice") is not None

    run(store, play)
    assert len(snapshots(store.folder)) == 2


def test_a_file_that_is_only_called_like_a_snapshot(store: Store) -> None:
    other = store.folder / "snapshot-before-upgrade.safetensors"
    other.write_bytes(b"mine")
    save_often(store, 4)
    assert len(snapshots(store.folder)) == 2
    assert other.read_bytes() == b"mine"


def test_a_snapshot_waits_for_what_is_durable_and_has_not_happened(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing runs ahead of settling; what is saved must be the state at the journal's end."""
    count, before, write = 5 * AT_ONCE, store.journal.next - 1, store.write

    def slowly(batch: Sequence[Entry]) -> None:
        write(batch)
        store._since = 1 << 40  # a snapshot is due
        time.sleep(0.1)

    async def play(commits: Commits) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(store, "write", slowly)
            first = asyncio.gather(*(commits.submit("pull", name="alice") for _ in range(count)))
            await asyncio.sleep(0.05)
        await asyncio.gather(first, commits.submit("pull", name="alice"))
        (saved,) = snapshots(store.folder)
        assert saved.stem == f"snapshot-{before + count:016d}"
        assert state.load(saved)["state"]["federation"]["counts"]["pulls"] == count

    run(store, play)


def test_senders_see_what_came_of_their_records_before_others_are_woken(store: Store) -> None:
    """Whoever got nothing would otherwise begin to wait after the call he waits for."""
    order: list[str] = []

    async def play(commits: Commits) -> None:
        await commits.submit("pull", name="nobody")
        order.append("sender")
        await asyncio.sleep(0.05)

    run(store, play, lambda: order.append("settled"))
    assert order == ["sender", "settled"]


# --- leases ----------------------------------------------------------------------------------------------------------


def test_a_job_begun_while_others_expire_keeps_its_lease() -> None:
    expired: list[tuple[str, int]] = []

    async def expire(name: str, job: int) -> None:
        expired.append((name, job))
        if name == "alice":
            leases.begin("bob", 3)  # he answered, and got another job, while hers was let go

    leases = Leases(expire, 0.01)
    leases.begin("alice", 1)
    leases.begin("bob", 2)
    time.sleep(0.02)
    asyncio.run(leases.check())
    assert expired == [("alice", 1)]
    time.sleep(0.02)
    asyncio.run(leases.check())
    assert expired == [("alice", 1), ("bob", 3)]
