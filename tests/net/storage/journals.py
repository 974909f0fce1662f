"""A journal that is filled, opened, read and damaged, for the tests of several files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from aflock.net.protocol.wire import BytesLike
from aflock.net.storage.journal import Journal
from aflock.net.storage.segment import Record

Plain = tuple[int, bytes, bytes]


HEADER = 32


FRAME = 44


def recovered(journal: Journal, after: int = 0) -> Iterator[Record]:
    """Yields the records after a seq, as a start of the server reads them; after the last, the journal is writable."""
    yield from journal.read(after)
    journal.make_writable()


def delete_upto(journal: Journal, upto: int) -> int:
    """Deletes old segments; returns how many."""
    before = len(segments(journal.folder))
    journal.delete_upto(upto)
    return before - len(segments(journal.folder))


def opened(folder: Path, after: int = 0, segment_bytes: int = 64 << 20) -> tuple[Journal, list[Plain]]:
    """A journal that can be written to, and what was in it."""
    journal = Journal(folder, segment_bytes=segment_bytes)
    try:
        return journal, [(seq, head, bytes(body)) for seq, head, body in recovered(journal, after)]
    except BaseException:
        journal.close()
        raise


def contents(folder: Path, after: int = 0) -> list[Plain]:
    journal, records = opened(folder, after)
    journal.close()
    return records


def filled(folder: Path, *batches: Sequence[tuple[bytes, BytesLike]], segment_bytes: int = 64 << 20) -> list[int]:
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


def flipped(raw: bytes, offset: int) -> bytes:
    """One bit of one byte turned over; another bit for every byte."""
    return raw[:offset] + bytes([raw[offset] ^ 1 << offset % 8]) + raw[offset + 1 :]


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
