"""The journal: what is written is read, what a snapshot has is forgotten, and any order of steps keeps a list."""

from __future__ import annotations

import json
import os
import random
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aflock.net.storage import segment as module
from aflock.net.storage.journal import Journal, JournalNotOpen
from aflock.net.storage.segment import CorruptJournal, JournalError
from tests.net.storage.journals import HEADER, THREE, Plain, contents, delete_upto, filled, opened, recovered, segments

# -- writing and reading


def test_what_is_written_is_read_in_order_over_many_segments(tmp_path: Path) -> None:
    rng = random.Random(1)
    lengths = [0, 1, 7, 100, 4096, 65_536, 3_000_000, 0, 5_000_001, 31_000, *(rng.randrange(40_000) for _ in range(60))]
    entries = [(json.dumps({"n": n}).encode() * (n % 3), rng.randbytes(length)) for n, length in enumerate(lengths)]
    model = [(seq, head, body) for seq, (head, body) in enumerate(entries, 1)]
    written = 0
    while written < len(entries):
        journal, records = opened(tmp_path, segment_bytes=200_000)
        with journal:
            assert records == model[:written]
            for _ in range(4):
                batch = entries[written : written + rng.randrange(1, 8)]
                assert journal.write(batch) == written + 1
                written += len(batch)
                assert journal.next == written + 1
            assert journal.size == sum(path.stat().st_size for path in segments(tmp_path))
    assert contents(tmp_path) == model
    assert contents(tmp_path, after=33) == model[33:]
    assert len(segments(tmp_path)) > 8


def test_bodies_of_every_kind_are_written_as_they_lie(tmp_path: Path) -> None:
    grid = memoryview(bytearray(range(24))).cast("H", (3, 4))
    filled(tmp_path, [(b"", bytearray(b"array")), (b"view", memoryview(b"a view")[2:]), (b"grid", grid), (b"", b"")])
    assert [body for _, _, body in contents(tmp_path)] == [b"array", b"view", bytes(range(24)), b""]
    with Journal(tmp_path) as journal:
        bodies = [record.body for record in recovered(journal)]
    assert not any(body.readonly for body in bodies)  # each belongs to whoever asked for it
    assert bytes(bodies[1]) == b"view"  # a body is the reader's own, whatever becomes of the journal


def test_a_batch_of_more_parts_than_the_system_takes_at_once(tmp_path: Path) -> None:
    entries = [(b"%d" % n, b"x" * (n % 5)) for n in range(2500)]
    filled(tmp_path, entries)
    assert [(head, body) for _, head, body in contents(tmp_path)] == entries


def test_numbers_stand_in_memory_as_they_came(tmp_path: Path) -> None:
    """Else the rules' kernels would have to be compiled anew for a recovery."""
    filled(tmp_path, [(b"x" * k, np.full(5, k, np.float32).tobytes()) for k in range(20)])
    with Journal(tmp_path) as journal:
        for k, record in enumerate(recovered(journal)):
            vector = np.frombuffer(record.body, np.float32)
            assert vector.flags.carray
            assert vector.tolist() == [k] * 5


def test_a_system_that_writes_a_few_bytes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def few(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwrite(descriptor, b"".join(buffers)[:7], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", few)
        filled(tmp_path, [(b"head", b"b" * n) for n in range(30)])
    assert contents(tmp_path) == [(n + 1, b"head", b"b" * n) for n in range(30)]


def test_an_empty_batch_writes_nothing(tmp_path: Path) -> None:
    before, after = filled(tmp_path, [])
    assert before == after == HEADER
    assert contents(tmp_path) == []


def test_a_record_larger_than_a_segment_gets_one_of_its_own(tmp_path: Path) -> None:
    small, large = [(b"small", b"")], [(b"large", b"x" * 5000)]
    filled(tmp_path, small, large, small, small, segment_bytes=1000)
    assert [path.name for path in segments(tmp_path)] == [f"journal-{seq:016d}.log" for seq in (1, 2, 3)]
    assert len(contents(tmp_path)) == 4


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    filled(folder, *THREE, segment_bytes=100)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_journal_is_written_to_only_between_make_writable_and_close(tmp_path: Path) -> None:
    filled(tmp_path, *THREE)
    journal = Journal(tmp_path)
    with pytest.raises(JournalNotOpen, match="then call `make_writable`"):
        journal.write([(b"", b"")])
    next(records := recovered(journal))
    del records  # given up half way
    with pytest.raises(JournalNotOpen):
        _ = journal.next
    assert len(list(recovered(journal))) == 3
    assert len(list(recovered(journal, 2))) == 1  # as often as one likes
    assert journal.next == 4
    journal.close()
    journal.close()
    for call in (lambda: journal.write([(b"", b"")]), lambda: journal.delete_upto(1), lambda: list(recovered(journal))):
        with pytest.raises(JournalNotOpen, match="closed; open it again"):
            call()


def test_records_are_read_again_while_others_are_written(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path, segment_bytes=300)
    with journal:
        for k in range(1, 21):
            journal.write([(b"%d" % k, b"body")])
        assert len(segments(tmp_path)) > 3
        for after, upto in ((0, 20), (0, 1), (7, 13), (19, 20), (20, 20), (5, 5)):
            records = journal.read_again(after, upto)
            found = [next(records).seq] if after < upto else []
            journal.write([(b"later", b"")])
            assert found + [record.seq for record in records] == list(range(after + 1, upto + 1))
        journal.delete_upto(7)
        with pytest.raises(CorruptJournal, match="missing"):
            list(journal.read_again(0, 20))
        with pytest.raises(CorruptJournal, match="missing"):
            list(journal.read_again(10, journal.next))


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="cannot be used for the journal"):
        Journal(tmp_path / "file")
    with pytest.raises(JournalError, match="cannot be used for the journal"):
        Journal(tmp_path / "file" / "folder")


def test_another_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "_FORMAT", 3)
        filled(tmp_path, *THREE)
    with pytest.raises(JournalError, match="has journal format 3"):
        contents(tmp_path)


# -- snapshots


def test_a_snapshot_newer_than_the_journal(tmp_path: Path) -> None:
    filled(tmp_path, *THREE)
    journal, records = opened(tmp_path, after=10)
    with journal:
        assert records == []
        assert journal.write([(b"eleven", b"")]) == 11
    assert contents(tmp_path, after=10) == [(11, b"eleven", b"")]
    with pytest.raises(CorruptJournal, match="records 4 to 10 are missing"):
        contents(tmp_path, after=2)
    journal, _ = opened(tmp_path, after=10)
    with journal:
        assert delete_upto(journal, 10) == 1
    assert contents(tmp_path, after=10) == [(11, b"eleven", b"")]


def test_a_snapshot_without_a_journal(tmp_path: Path) -> None:
    journal, records = opened(tmp_path, after=41)
    with journal:
        assert records == []
        assert journal.write([(b"", b"")]) == 42
    with pytest.raises(CorruptJournal):
        contents(tmp_path)


def test_old_segments_are_deleted_whole(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path, segment_bytes=250)
    with journal:
        for seq in range(1, 11):  # two in each segment
            journal.write([(b"%d" % seq, b"x" * 50)])
        assert len(segments(tmp_path)) == 5
        assert [delete_upto(journal, upto) for upto in (0, 1, 2, 2, 5, 6)] == [0, 0, 1, 0, 1, 1]
        assert journal.size == sum(path.stat().st_size for path in segments(tmp_path))
        assert delete_upto(journal, 1000) == 1  # the last one stays
        assert len(segments(tmp_path)) == 1
        assert journal.write([(b"11", b"")]) == 11
    assert [seq for seq, _, _ in contents(tmp_path, after=8)] == [9, 10, 11]
    journal, _ = opened(tmp_path, after=11)
    with journal:
        journal.rotate()
        assert delete_upto(journal, 11) == 2
        assert journal.next == 12
    with pytest.raises(CorruptJournal):
        contents(tmp_path, after=10)
    assert contents(tmp_path, after=11) == []


# -- everything at once


STEPS = st.one_of(
    st.tuples(st.just("write"), st.lists(st.tuples(st.binary(max_size=5), st.integers(0, 300)), max_size=6)),
    st.tuples(st.just("reopen"), st.integers(0, 5)),
    st.tuples(st.just("lost"), st.integers(1, 3)),
    st.tuples(st.just("delete"), st.integers(0, 40)),
    st.tuples(st.just("rotate"), st.none()),
)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEPS, max_size=12), segment_bytes=st.sampled_from([1, 400, 1000, 1 << 20]))
def test_a_journal_is_a_list(steps: list[tuple[str, object]], segment_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model: list[Plain] = []
        forgotten, following = 0, 1  # records up to `forgotten` are in a snapshot
        journal, _ = opened(folder, segment_bytes=segment_bytes)
        for kind, what in [*steps, ("reopen", 0)]:
            if kind == "write":
                assert isinstance(what, list)
                entries = [(head, bytes(length)) for head, length in what]
                assert journal.write(entries) == following
                model += [(seq, head, body) for seq, (head, body) in enumerate(entries, following)]
                following += len(entries)
            elif kind == "rotate":
                journal.rotate()
            else:
                assert isinstance(what, int)
                if kind == "delete":
                    forgotten = max(forgotten, min(what, following - 1))
                    journal.delete_upto(what)
                else:  # the snapshot is older than the journal, or the newest there is, or the journal lost records
                    after = min(forgotten + what, following - 1) if kind == "reopen" else following - 1 + what
                    journal.close()
                    journal, records = opened(folder, after, segment_bytes)
                    assert records == [record for record in model if record[0] > after]
                    if kind == "lost":
                        forgotten, following = after, after + 1
            assert journal.next == following
            assert journal.size == sum(path.stat().st_size for path in segments(folder))
        journal.close()
