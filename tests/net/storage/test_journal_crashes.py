"""What a crash leaves of a journal: what was acknowledged is there, and the rest is cut off."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aflock.net.storage.segment import CorruptJournal
from tests.net.storage.journals import (
    FRAME,
    HEADER,
    THREE,
    THREE_RECORDS,
    contents,
    filled,
    flipped,
    goes_on,
    opened,
    segments,
)


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
    for offset in range(begin, end):
        segment.write_bytes(flipped(whole, offset))
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
        offset = rng.randrange(HEADER, begin)
        raw = bytearray(whole)
        raw[offset : offset + 512] = rng.randbytes(min(512, begin - offset))
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
from aflock.net.storage.journal import Journal

def body(seq):
    return bytes([seq % 251]) * (1_500_000 if seq % 50 == 0 else seq * 37 % 3000)

journal = Journal(Path(sys.argv[1]), segment_bytes=1_000_000)
for record in journal.read(int(sys.argv[2])):
    pass
journal.make_writable()
while True:
    seqs = range(journal.next, journal.next + journal.next % 9 + 1)
    journal.write([(b"%d" % seq, body(seq)) for seq in seqs])
    print(seqs[-1], flush=True)
    if seqs[0] % 10 == 0:
        journal.delete_upto(int(sys.argv[2]))
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
