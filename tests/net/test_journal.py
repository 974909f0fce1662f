"""The journal: what was acknowledged is there after any crash, and damage is never taken for a crash."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aflock.net import segment as module
from aflock.net.journal import Journal, JournalFailed, JournalInUse, JournalNotOpen
from aflock.net.segment import Buffer, CorruptJournal, JournalError

Plain = tuple[int, bytes, bytes]

HEADER = 32
FRAME = 44


def opened(folder: Path, after: int = 0, segment_bytes: int = 64 << 20) -> tuple[Journal, list[Plain]]:
    """A journal that can be written to, and what was in it."""
    journal = Journal(folder, segment_bytes=segment_bytes)
    try:
        return journal, [(seq, head, bytes(body)) for seq, head, body in journal.recover(after)]
    except BaseException:
        journal.close()
        raise


def contents(folder: Path, after: int = 0) -> list[Plain]:
    journal, records = opened(folder, after)
    journal.close()
    return records


def filled(folder: Path, *batches: Sequence[tuple[bytes, Buffer]], segment_bytes: int = 64 << 20) -> list[int]:
    """Writes batches to a new journal; returns how many bytes it had before each of them, and at the end."""
    journal, _ = opened(folder, segment_bytes=segment_bytes)
    sizes = []
    with journal:
        for batch in batches:
            sizes.append(journal.size)
            journal.write(batch)
        return [*sizes, journal.size]


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("journal-*.log"))


def flipped(raw: bytes, place: int) -> bytes:
    """One bit of one byte turned over; another bit for every byte."""
    return raw[:place] + bytes([raw[place] ^ 1 << place % 8]) + raw[place + 1 :]


def goes_on(folder: Path, expected: list[Plain]) -> None:
    """What is there is exactly that, and one more record can be written and read."""
    journal, records = opened(folder)
    with journal:
        assert records == expected
        seq = len(expected) + 1
        assert journal.next == seq
        assert journal.write([(b"more", b"of it")]) == seq
    assert contents(folder) == [*expected, (seq, b"more", b"of it")]


THREE = [[(b"one", b"first body")], [(b"two", b"second body")], [(b"three", b"third body")]]
THREE_RECORDS = [(1, b"one", b"first body"), (2, b"two", b"second body"), (3, b"three", b"third body")]


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
        bodies = [record.body for record in journal.recover()]
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
        for k, record in enumerate(journal.recover()):
            vector = np.frombuffer(record.body, np.float32)
            assert vector.flags.carray
            assert vector.tolist() == [k] * 5


def test_a_system_that_writes_a_few_bytes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def few(descriptor: int, buffers: Sequence[memoryview], place: int) -> int:
        return os.pwrite(descriptor, b"".join(buffers)[:7], place)

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


def test_a_journal_is_written_to_only_between_recover_and_close(tmp_path: Path) -> None:
    filled(tmp_path, *THREE)
    journal = Journal(tmp_path)
    with pytest.raises(JournalNotOpen, match="read all of `recover` first"):
        journal.write([(b"", b"")])
    next(records := journal.recover())
    del records  # given up half way
    with pytest.raises(JournalNotOpen):
        _ = journal.next
    assert len(list(journal.recover())) == 3
    assert len(list(journal.recover(2))) == 1  # as often as one likes
    assert journal.next == 4
    journal.close()
    journal.close()
    for call in (lambda: journal.write([(b"", b"")]), lambda: journal.forget(1), lambda: list(journal.recover())):
        with pytest.raises(JournalNotOpen, match="closed; open it again"):
            call()


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


# -- crashes


def test_a_tail_cut_off_at_any_byte(tmp_path: Path) -> None:
    *_, begin, end = filled(tmp_path, *THREE)
    (segment,) = segments(tmp_path)
    whole = segment.read_bytes()
    assert len(whole) == end
    for length in range(begin, end):
        segment.write_bytes(whole[:length])
        goes_on(tmp_path, THREE_RECORDS[:2])


def test_a_tail_with_any_bit_flipped(tmp_path: Path) -> None:
    *_, begin, end = filled(tmp_path, *THREE)
    (segment,) = segments(tmp_path)
    whole = segment.read_bytes()
    for place in range(begin, end):
        segment.write_bytes(flipped(whole, place))
        goes_on(tmp_path, THREE_RECORDS[:2])


@pytest.mark.parametrize("tail", [b"\0", b"\0" * 5000, b"garbage" * 99, b"\xff" * 3_000_000])
def test_zeros_or_garbage_behind_the_last_record(tmp_path: Path, tail: bytes) -> None:
    filled(tmp_path, *THREE)
    with segments(tmp_path)[0].open("ab") as file:
        file.write(tail)
    goes_on(tmp_path, THREE_RECORDS)


def test_a_long_torn_body_full_of_foreign_frames(tmp_path: Path) -> None:
    """A client can send what looks like a journal; it is not taken for records that follow."""
    filled(tmp_path / "foreign", *([(b"head", b"x" * 50)] for _ in range(30)))
    foreign = segments(tmp_path / "foreign")[0].read_bytes()
    filled(tmp_path / "own", *THREE, [(b"torn", foreign * 300)])
    segment = segments(tmp_path / "own")[0]
    os.truncate(segment, segment.stat().st_size - 1)
    goes_on(tmp_path / "own", THREE_RECORDS)


@pytest.mark.parametrize("torn", [0, 1, 2, 3])
def test_a_torn_batch_with_whole_records_behind_the_hole(tmp_path: Path, torn: int) -> None:
    """Pages reach the disk in any order; what comes first is kept, and it was not acknowledged anyway."""
    batch = [(b"%d" % n, bytes([65 + n]) * 2_000_000) for n in range(4)]
    begin, _ = filled(tmp_path, [*THREE[0], *THREE[1], *THREE[2]], batch)[1:]
    (segment,) = segments(tmp_path)
    hole = begin + torn * (FRAME + 1 + 2_000_000) + 500
    with segment.open("r+b") as file:
        file.seek(hole)
        file.write(b"\0" * 4096)
    kept = [(n + 4, head, body) for n, (head, body) in enumerate(batch[:torn])]
    goes_on(tmp_path, THREE_RECORDS + kept)


def test_sectors_lost_from_the_last_batch_are_a_crash_and_from_others_damage(tmp_path: Path) -> None:
    rng = random.Random(7)
    batches = [[(b"%d" % n, rng.randbytes(rng.randrange(3000))) for n in range(rng.randrange(1, 6))] for _ in range(6)]
    *_, begin, end = filled(tmp_path, *batches)
    (segment,) = segments(tmp_path)
    whole = segment.read_bytes()
    acknowledged, written = sum(map(len, batches[:-1])), sum(map(len, batches))
    for _ in range(60):
        raw = bytearray(whole)
        for start in rng.sample(range(begin, end, 512), rng.randrange(1, (end - begin) // 512)):
            raw[start : start + 512] = bytes(min(512, end - start))
        segment.write_bytes(raw)
        assert acknowledged <= len(contents(tmp_path)) < written
        place = rng.randrange(HEADER, begin)
        raw = bytearray(whole)
        raw[place : place + 512] = rng.randbytes(min(512, begin - place))
        segment.write_bytes(raw)
        with pytest.raises(CorruptJournal):
            contents(tmp_path)


def test_records_kept_from_a_torn_batch_are_as_good_as_others(tmp_path: Path) -> None:
    """What recovery has handed out is synced: if it is damaged later, that is no torn tail."""
    begin, end = filled(tmp_path, [*THREE[0], *THREE[1], *THREE[2]])
    (segment,) = segments(tmp_path)
    os.truncate(segment, end - 1)
    goes_on(tmp_path, THREE_RECORDS[:2])
    segment.write_bytes(flipped(segment.read_bytes(), begin + 50))
    with pytest.raises(CorruptJournal) as caught:
        contents(tmp_path)
    assert caught.value.offset == begin


@pytest.mark.parametrize("header", [*(b"x" * n for n in range(0, HEADER + 1, 4)), b"\0" * HEADER])
def test_a_crash_while_a_segment_is_begun(tmp_path: Path, header: bytes) -> None:
    filled(tmp_path, *THREE, segment_bytes=100)
    (tmp_path / f"journal-{4:016d}.log").write_bytes(header)
    goes_on(tmp_path, THREE_RECORDS)
    assert len(segments(tmp_path)) == 4


def test_a_crash_while_the_first_segment_is_begun(tmp_path: Path) -> None:
    filled(tmp_path)
    os.truncate(segments(tmp_path)[0], 9)
    goes_on(tmp_path, [])


def test_an_empty_last_segment_is_fine(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path)
    with journal:
        journal.write([(head, body) for _, head, body in THREE_RECORDS])
        journal.rotate()
        journal.rotate()
    assert len(segments(tmp_path)) == 2
    goes_on(tmp_path, THREE_RECORDS)


KILLED = """
import sys
from pathlib import Path
from aflock.net.journal import Journal

def body(seq):
    return bytes([seq % 251]) * (1_500_000 if seq % 50 == 0 else seq * 37 % 3000)

journal = Journal(Path(sys.argv[1]), segment_bytes=1_000_000)
for record in journal.recover(int(sys.argv[2])):
    pass
while True:
    seqs = range(journal.next, journal.next + journal.next % 9 + 1)
    journal.write([(b"%d" % seq, body(seq)) for seq in seqs])
    print(seqs[-1], flush=True)
    if seqs[0] % 10 == 0:
        journal.forget(int(sys.argv[2]))
"""


def test_a_server_killed_at_any_moment_has_kept_what_it_acknowledged(tmp_path: Path) -> None:
    rng = random.Random(5)
    known = 0
    for _ in range(20):
        with subprocess.Popen([sys.executable, "-c", KILLED, tmp_path, str(known)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            first = child.stdout.readline()
            time.sleep(rng.random() * 0.15)
            os.kill(child.pid, signal.SIGKILL)
            lines = (first + child.stdout.read()).splitlines(keepends=True)
        acknowledged = max(int(line) for line in lines if line.endswith(b"\n"))
        records = contents(tmp_path, after=known)
        assert [seq for seq, _, _ in records] == list(range(known + 1, known + 1 + len(records)))
        for seq, head, body in records:
            assert head == b"%d" % seq
            assert body == bytes([seq % 251]) * (1_500_000 if seq % 50 == 0 else seq * 37 % 3000)
        assert known + len(records) >= acknowledged > known
        known += len(records)


# -- damage


def test_a_flipped_bit_in_a_middle_record_is_refused(tmp_path: Path) -> None:
    _, begin, end, _ = filled(tmp_path, *THREE)
    (segment,) = segments(tmp_path)
    whole = segment.read_bytes()
    for place in range(begin, end):
        broken = flipped(whole, place)
        segment.write_bytes(broken)
        with pytest.raises(
            CorruptJournal, match=f"byte {begin} of {segment} .*restore its files from a backup"
        ) as error:
            contents(tmp_path)
        assert (error.value.path, error.value.offset) == (segment, begin)
        assert segment.read_bytes() == broken  # nothing was cut off


def test_a_damaged_record_followed_by_a_later_batch_is_refused(tmp_path: Path) -> None:
    """Later records of its own batch do not hide that another batch came after."""
    batch = [(b"a", b"x" * 100), (b"b", b"y" * 100), (b"c", b"z" * 100)]
    begin, later, _ = filled(tmp_path, batch, [(b"d", b"")])
    (segment,) = segments(tmp_path)
    whole = segment.read_bytes()
    for place in (begin + 60, begin + 60 + 145, later - 1):
        segment.write_bytes(flipped(whole, place))
        with pytest.raises(CorruptJournal):
            contents(tmp_path)
    segment.write_bytes(flipped(whole[:later], begin + 60))  # without the later batch it is a torn one
    goes_on(tmp_path, [])


def test_a_record_that_was_cut_out_is_missed(tmp_path: Path) -> None:
    _, begin, end, _ = filled(tmp_path, *THREE)
    (segment,) = segments(tmp_path)
    whole = segment.read_bytes()
    segment.write_bytes(whole[:begin] + whole[end:])
    with pytest.raises(CorruptJournal, match="records 2 to 2 are missing") as caught:
        contents(tmp_path)
    assert caught.value.offset == begin
    segment.write_bytes(whole[:end] + whole[begin:])
    with pytest.raises(CorruptJournal, match="record 2 is here where 3 should be"):
        contents(tmp_path)


def test_any_damage_in_an_older_segment_is_refused(tmp_path: Path) -> None:
    filled(tmp_path, *THREE, segment_bytes=100)
    middle = segments(tmp_path)[1]
    whole = middle.read_bytes()
    broken = [flipped(whole, place) for place in range(len(whole))]
    broken += [whole[:length] for length in range(len(whole))] + [whole + b"\0"]
    for raw in broken:
        middle.write_bytes(raw)
        with pytest.raises(CorruptJournal) as caught:
            contents(tmp_path)
        assert caught.value.path in segments(tmp_path)[1:]  # a file that ends early is missed by the one after it
        assert contents(tmp_path, after=2) == THREE_RECORDS[2:]  # a newer snapshot needs it no more


def test_a_damaged_header_of_a_segment_with_records_is_refused(tmp_path: Path) -> None:
    filled(tmp_path, *THREE)
    (segment,) = segments(tmp_path)
    whole = segment.read_bytes()
    for place in range(HEADER):
        segment.write_bytes(flipped(whole, place))
        with pytest.raises(CorruptJournal, match=f"byte 0 of {segment}"):
            contents(tmp_path)
    segment.write_bytes(whole)
    segment.rename(tmp_path / f"journal-{2:016d}.log")
    with pytest.raises(CorruptJournal, match="begins with record 1"):
        contents(tmp_path, after=1)


def test_a_missing_segment_is_refused_unless_a_snapshot_has_it(tmp_path: Path) -> None:
    filled(tmp_path, *THREE, segment_bytes=100)
    _, middle, last = segments(tmp_path)
    middle.unlink()
    for after in (0, 1):
        with pytest.raises(CorruptJournal, match=f"byte 0 of {last} .records 2 to 2 are missing"):
            contents(tmp_path, after)
    assert contents(tmp_path, after=2) == THREE_RECORDS[2:]


def test_a_journal_that_begins_too_late_is_refused(tmp_path: Path) -> None:
    filled(tmp_path, *THREE, segment_bytes=100)
    first, _, last = segments(tmp_path)
    first.unlink()
    with pytest.raises(CorruptJournal, match="records 1 to 1 are missing"):
        contents(tmp_path)
    assert contents(tmp_path, after=1) == THREE_RECORDS[1:]
    segments(tmp_path)[0].unlink()
    os.truncate(last, 0)  # its name still tells what came before
    with pytest.raises(CorruptJournal, match="records 1 to 2 are missing"):
        contents(tmp_path)
    assert contents(tmp_path, after=2) == []


def test_damage_in_the_last_segment_is_mended_by_moving_it_away(tmp_path: Path) -> None:
    begin, *_ = filled(tmp_path, *THREE)
    (segment,) = segments(tmp_path)
    segment.write_bytes(flipped(segment.read_bytes(), begin + 3))
    with pytest.raises(CorruptJournal):
        contents(tmp_path, after=3)
    segment.rename(tmp_path / "damaged")
    journal, records = opened(tmp_path, after=3)
    with journal:
        assert (records, journal.next) == ([], 4)


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
        assert journal.forget(10) == 1
    assert contents(tmp_path, after=10) == [(11, b"eleven", b"")]


def test_a_snapshot_without_a_journal(tmp_path: Path) -> None:
    journal, records = opened(tmp_path, after=41)
    with journal:
        assert records == []
        assert journal.write([(b"", b"")]) == 42
    with pytest.raises(CorruptJournal):
        contents(tmp_path)


def test_forget_deletes_whole_segments_only(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path, segment_bytes=250)
    with journal:
        for seq in range(1, 11):  # two in each segment
            journal.write([(b"%d" % seq, b"x" * 50)])
        assert len(segments(tmp_path)) == 5
        assert [journal.forget(upto) for upto in (0, 1, 2, 2, 5, 6)] == [0, 0, 1, 0, 1, 1]
        assert journal.size == sum(path.stat().st_size for path in segments(tmp_path))
        assert journal.forget(1000) == 1  # the last one stays
        assert len(segments(tmp_path)) == 1
        assert journal.write([(b"11", b"")]) == 11
    assert [seq for seq, _, _ in contents(tmp_path, after=8)] == [9, 10, 11]
    journal, _ = opened(tmp_path, after=11)
    with journal:
        journal.rotate()
        assert journal.forget(11) == 2
        assert journal.next == 12
    with pytest.raises(CorruptJournal):
        contents(tmp_path, after=10)
    assert contents(tmp_path, after=11) == []


# -- disk trouble


def run(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LIMITED = """
import resource, signal, sys
from pathlib import Path
from aflock.net.journal import Journal, JournalFull

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])

def limit(kind, value):
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))

def refused(call):
    size, following = journal.size, journal.next
    on_disk = {path: path.read_bytes() for path in folder.glob("journal-*")}
    try:
        call()
    except JournalFull as error:
        print(error)
    else:
        raise SystemExit("this should not have been possible")
    assert (journal.size, journal.next) == (size, following)
    assert {path: path.read_bytes() for path in folder.glob("journal-*")} == on_disk

journal = Journal(folder)
assert not list(journal.recover())
journal.write([(b"1", b"a" * 1000)])
"""


def test_a_full_disk_keeps_nothing_of_the_batch_and_stops_nobody(tmp_path: Path) -> None:
    script = """
limit(resource.RLIMIT_FSIZE, 5000)
refused(lambda: journal.write([(b"2", b"b" * 2000), (b"3", b"c" * 2000)]))
refused(lambda: journal.write([(b"2", b"d" * 2_000_000)]))
journal.write([(b"2", b"e" * 1000)])
limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
journal.write([(b"3", b"f" * 10_000)])
"""
    message = run(LIMITED + script, tmp_path).splitlines()[0]
    assert message == (
        f"the disk is full and the journal in {tmp_path} cannot grow (File too large); "
        "make room or raise the limit, and write again: nothing of this batch was kept"
    )
    assert contents(tmp_path) == [(1, b"1", b"a" * 1000), (2, b"2", b"e" * 1000), (3, b"3", b"f" * 10_000)]


@pytest.mark.parametrize("kind", ["FSIZE", "NOFILE"])
def test_no_room_for_a_new_segment(tmp_path: Path, kind: str) -> None:
    script = f"""
limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
kind = resource.RLIMIT_{kind}
import os
before = resource.getrlimit(kind)[0]
taken = []
def tight():
    if kind == resource.RLIMIT_FSIZE:
        limit(kind, 10)
    else:
        limit(kind, 40)
        try:
            while True:
                taken.append(os.open(folder, os.O_RDONLY))
        except OSError:
            pass
def narrow():
    tight()
    try:
        journal.rotate()
    finally:
        limit(kind, before)
        for descriptor in taken:
            os.close(descriptor)
        taken.clear()
refused(narrow)
journal.write([(b"2", b"")])
refused(narrow)
journal.rotate()
journal.write([(b"3", b"")])
"""
    assert "cannot grow" in run(LIMITED + script, tmp_path)
    assert [head for _, head, _ in contents(tmp_path)] == [b"1", b"2", b"3"]
    assert len(segments(tmp_path)) == 2


def fails(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_after_a_failed_sync_nothing_is_taken_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, *THREE)
    journal, _ = opened(tmp_path)
    with journal:
        with monkeypatch.context() as patch:
            patch.setattr(module, "_datasync", fails)
            with pytest.raises(JournalFailed, match="restart the server, which recovers what is there"):
                journal.write([(b"lost", b"")])
        for call in (
            lambda: journal.write([(b"", b"")]),
            lambda: journal.forget(1),
            journal.rotate,
            lambda: list(journal.recover()),
        ):
            with pytest.raises(JournalFailed, match="Input/output error"):
                call()
        assert journal.next == 4
    goes_on(tmp_path, THREE_RECORDS)


def test_a_batch_that_cannot_be_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, *THREE)
    journal, _ = opened(tmp_path)
    with journal:
        monkeypatch.setattr(os, "ftruncate", fails)
        monkeypatch.setattr(module, "IOV_MAX", 1)
        real, calls = os.pwritev, iter(range(99))

        def full(descriptor: int, buffers: Sequence[memoryview], place: int) -> int:
            if next(calls) == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, buffers, place)

        monkeypatch.setattr(os, "pwritev", full)
        with pytest.raises(JournalFailed):
            journal.write([(b"half", b"of a record")])
        monkeypatch.undo()
        with pytest.raises(JournalFailed):
            journal.write([(b"", b"")])
    goes_on(tmp_path, THREE_RECORDS)


def test_a_write_that_is_interrupted_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    filled(tmp_path, *THREE)
    journal, _ = opened(tmp_path)
    with journal:
        with monkeypatch.context() as patch:
            patch.setattr(module, "_datasync", interrupted)
            with pytest.raises(KeyboardInterrupt):
                journal.write([(b"a long head that would stand behind a short one", b"")] * 3)
        assert journal.write([(b"4", b"")]) == 4
    assert contents(tmp_path) == [*THREE_RECORDS, (4, b"4", b"")]


def test_one_folder_is_one_servers(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from aflock.net.journal import Journal, JournalInUse
try:
    Journal(Path(sys.argv[1]))
except JournalInUse as error:
    print(error)
"""
    with Journal(tmp_path):
        message = run(script, tmp_path).strip()
        assert message == f"another server uses the journal in {tmp_path}; stop it, or give this one its own folder"
        with pytest.raises(JournalInUse):
            Journal(tmp_path)
    assert run(script, tmp_path) == ""
    filled(tmp_path, *THREE)


# -- everything at once

STEPS = st.one_of(
    st.tuples(st.just("write"), st.lists(st.tuples(st.binary(max_size=5), st.integers(0, 300)), max_size=6)),
    st.tuples(st.just("reopen"), st.integers(0, 5)),
    st.tuples(st.just("lost"), st.integers(1, 3)),
    st.tuples(st.just("forget"), st.integers(0, 40)),
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
                if kind == "forget":
                    forgotten = max(forgotten, min(what, following - 1))
                    journal.forget(what)
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
