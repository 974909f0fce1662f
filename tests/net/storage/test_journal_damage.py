"""Damage is never taken for a crash: a journal that lost acknowledged records is refused."""

from __future__ import annotations

import os
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


def test_a_flipped_bit_in_a_middle_record_is_refused(tmp_path: Path) -> None:
    _, begin, end, _ = filled(tmp_path, *THREE)
    (segment,) = segments(tmp_path)
    whole = segment.read_bytes()
    for offset in range(begin, end):
        broken = flipped(whole, offset)
        segment.write_bytes(broken)
        with pytest.raises(
            CorruptJournal, match=f"byte {begin} of {segment} .*restore the folder from a backup"
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
    for offset in (begin + 60, begin + 60 + 145, later - 1):
        segment.write_bytes(flipped(whole, offset))
        with pytest.raises(CorruptJournal):
            contents(tmp_path)
    segment.write_bytes(flipped(whole[:later], begin + 60))  # without the later batch it is a torn one
    goes_on(tmp_path, [])


def test_a_later_batch_is_found_wherever_it_begins(tmp_path: Path) -> None:
    """Also across the border of two pieces of a megabyte, in which the rest of the file is searched."""
    for short in range(-1, 10):
        folder, body = tmp_path / str(short), b"x" * ((1 << 20) - FRAME - short)
        begin, *_ = filled(folder, [(b"", body)], [(b"later", b"")])
        (segment,) = segments(folder)
        segment.write_bytes(flipped(segment.read_bytes(), begin + FRAME + 5))
        with pytest.raises(CorruptJournal):
            contents(folder)


def test_a_record_that_was_cut_out_is_missed(tmp_path: Path) -> None:
    _, begin, end, _ = filled(tmp_path, *THREE)
    (segment,) = segments(tmp_path)
    whole = segment.read_bytes()
    segment.write_bytes(whole[:begin] + whole[end:])
    with pytest.raises(CorruptJournal, match="records 2 to 2 are missing") as caught:
        contents(tmp_path)
    assert caught.value.offset == begin
    segment.write_bytes(whole[:end] + whole[begin:])
    with pytest.raises(CorruptJournal, match="found record 2, expected record 3"):
        contents(tmp_path)


def test_any_damage_in_an_older_segment_is_refused(tmp_path: Path) -> None:
    filled(tmp_path, *THREE, segment_bytes=100)
    middle = segments(tmp_path)[1]
    whole = middle.read_bytes()
    broken = [flipped(whole, offset) for offset in range(len(whole))]
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
    for offset in range(HEADER):
        segment.write_bytes(flipped(whole, offset))
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
