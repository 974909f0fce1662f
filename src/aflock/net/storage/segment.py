"""A segment of a journal: one file of checksummed records.

A segment is a header (magic, format, first seq, mark, checksum) and frames, one for each record: mark, seq, batch,
length of the head, length of the body, checksum of both, checksum of all that; then the head and the body. The mark is
eight random bytes that are the segment's own, so that nothing a client sends can look like a frame.

What a crash can do. A batch is written to one segment and synced before the next one begins, so only the last batch
may be torn; it was never acknowledged. Not all file systems write a file's pages in order, so whole frames of a torn
batch can stand behind a hole. Every frame therefore names the first seq of its batch. Let the frame of record e be
bad. A later frame whose batch is at most e is of the same batch as e, and says nothing. A later frame whose batch is
greater than e was begun after e had been synced: then e was lost to something else than a crash, and the journal is
refused. Without such a frame the rest of the file is a torn tail and is cut off.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..checksum import crc32
from ..errors import AflockError

Buffer = bytes | bytearray | memoryview

_MAGIC = b"aflock\0j"
_FORMAT = 2
_HEADER = struct.Struct("<8sIQ8s")  # magic, format, first seq, mark
_FRAME = struct.Struct("<8sQQIQI")  # mark, seq, batch, length of head, length of body, checksum of both
_SEAL_BYTES = 4
_HEADER_BYTES = _HEADER.size + _SEAL_BYTES
_FRAME_BYTES = _FRAME.size + _SEAL_BYTES
_MARK_BYTES = 8
IOV_MAX = 1024
_SCAN_BYTES = 1 << 20
_ALIGNED = 8  # as numbers in a body want to stand in memory
_PAGE_BYTES = 1 << 16  # the largest there are
_LET_GO_BYTES = 1 << 20

_datasync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)  # not every system has the cheaper one
_advise: Callable[[int, int, int, int], None] | None = getattr(os, "posix_fadvise", None)  # nor that


class JournalError(AflockError):
    """The journal cannot do what was asked."""


class CorruptJournal(JournalError):
    """Records that were acknowledged are damaged or missing; `path` and `offset` say where."""

    def __init__(self, path: Path, offset: int, what: str) -> None:
        super().__init__(
            f"the journal is damaged at byte {offset} of {path} ({what}); restore its files from a backup, "
            "or move this one away and start from a snapshot newer than it"
        )
        self.path, self.offset = path, offset


class Entry(NamedTuple):
    """What is written: head and body mean nothing to the journal."""

    head: bytes
    body: Buffer
    checksum: int
    """Of both."""


def entry(head: bytes, body: Buffer = b"") -> Entry:
    """An entry, in the thread that has it: one that writes would have to wait for its turn after each checksum."""
    if type(body) is memoryview and (body.itemsize > 1 or body.ndim > 1):
        body = body.cast("B") if len(body) else b""  # an empty view cannot be cast
    return Entry(head, body, crc32(body, crc32(head)))


class Record(NamedTuple):
    """One entry of the journal."""

    seq: int
    head: bytes
    body: memoryview


class _Frame(NamedTuple):
    record: Record
    batch: int
    end: int


class Writing(NamedTuple):
    """A batch on its way to the disk: for each record what stands before its body, and the body."""

    descriptor: int
    heads: list[bytes]
    bodies: list[Buffer]
    place: int
    end: int
    kept: int
    let_go: int
    """Bytes from `kept` on that nobody will read: they need not stay in memory."""


class Segment:
    """One file: whole frames up to `end`, the last of them of the record before `next`."""

    def __init__(self, path: Path, descriptor: int, first: int, mark: bytes) -> None:
        self.path, self.first, self.mark = path, first, mark
        self.next, self.end = first, _HEADER_BYTES
        self._descriptor = descriptor
        self._kept = 0  # pages before that are not kept in memory
        self._size = os.fstat(descriptor).st_size

    @classmethod
    def begin(cls, path: Path, descriptor: int, first: int) -> Segment:
        """A new one, in an empty file; its header is on the disk when it returns."""
        mark = os.urandom(_MARK_BYTES)
        _write_all(descriptor, [_sealed(_HEADER.pack(_MAGIC, _FORMAT, first, mark))], 0)
        os.fsync(descriptor)
        return cls(path, descriptor, first, mark)

    @classmethod
    def open(cls, path: Path, first: int) -> Segment:
        """One that is there; nothing but its header is read."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            return cls(path, descriptor, first, _mark(path, first, os.pread(descriptor, _HEADER_BYTES, 0)))
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def is_empty(self) -> bool:
        """Whether it holds no record."""
        return self.end == _HEADER_BYTES

    @property
    def is_whole(self) -> bool:
        """Whether its records have been read up to the end of the file."""
        return self.end == self._size

    def records(self, after: int) -> Iterator[Record]:
        """The records after `after`, up to the end of the file or to what is no whole frame."""
        while frame := self._frame(self.end):
            if frame.record.seq != self.next:
                raise CorruptJournal(self.path, self.end, missing(self.next, frame.record.seq))
            self.next, self.end = self.next + 1, frame.end
            if frame.record.seq > after:
                yield frame.record

    def cut_torn_tail(self) -> None:
        """Cuts off what a crash left of the last batch; the module's text says how that is told from damage."""
        if self.is_whole:
            return
        if any(frame.batch > self.next for frame in self._later_frames()):
            raise self.damaged()
        self.cut(self.end, self.next)

    def damaged(self) -> CorruptJournal:
        """What to raise where the record after the last whole one should be."""
        return CorruptJournal(self.path, self.end, f"record {self.next} is not whole")

    def append(self, batch: Sequence[Entry]) -> None:
        """Writes records behind the last one; they count when `next` does."""
        frames = _frames(batch, self.next, self.mark)
        self.end = self._size = _write_all(self._descriptor, frames, self.end)

    def plan(self, batch: Sequence[Entry], needed: int) -> Writing:
        """What `append` and `sync` would do with so many bytes, for somebody else to do it."""
        end = self.end + needed
        heads = _heads(batch, self.next, self.mark)
        bodies = [body for _, body, _ in batch]
        return Writing(self._descriptor, heads, bodies, self.end, end, self._kept, self._unread(end))

    def wrote(self, writing: Writing) -> None:
        """It has been done."""
        self.end = self._size = writing.end
        self._kept += writing.let_go
        self.next += len(writing.heads)

    def cut(self, end: int, following: int) -> None:
        """Takes back everything behind `end`; `following` is the next record again."""
        os.ftruncate(self._descriptor, end)
        os.fsync(self._descriptor)  # or what was cut off might be back after a power cut
        self.end = self._size = end
        self.next = following

    def sync(self) -> None:
        """What was appended is on the disk when it returns."""
        _datasync(self._descriptor)
        self._let_go()

    def _let_go(self) -> None:
        """Nobody reads a journal before the next start: its pages are of more use to the next batch."""
        unread = self._unread(self.end)
        if _advise is not None and unread:
            _advise(self._descriptor, self._kept, unread, os.POSIX_FADV_DONTNEED)
            self._kept += unread

    def _unread(self, end: int) -> int:
        """Bytes that need not be kept in memory any longer, once there are enough of them."""
        unread = end - end % _PAGE_BYTES - self._kept  # the last page is written to again
        return unread if unread >= _LET_GO_BYTES else 0

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def _later_frames(self) -> Iterator[_Frame]:
        for start in range(self.end + 1, self._size, _SCAN_BYTES):
            chunk = self._read(start, min(_SCAN_BYTES + _MARK_BYTES - 1, self._size - start))
            for found in re.finditer(re.escape(self.mark), chunk):
                if frame := self._frame(start + found.start()):
                    yield frame

    def _frame(self, start: int) -> _Frame | None:
        """The frame that begins there, if it is whole."""
        content = start + _FRAME_BYTES
        if content > self._size or not _is_sealed(header := self._read(start, _FRAME_BYTES)):
            return None
        mark, seq, batch, head, body, checksum = _FRAME.unpack_from(header)
        end, gap = content + head + body, -head % _ALIGNED
        if mark != self.mark or end > self._size:
            return None
        data = memoryview(self._read(content, head + body, gap))[gap:]
        if crc32(data) != checksum:
            return None
        return _Frame(Record(seq, bytes(data[:head]), data[head:]), batch, end)

    def _read(self, start: int, count: int, gap: int = 0) -> bytearray:
        """So many bytes from there on, behind a gap."""
        data = bytearray(gap + count)
        rest, place = memoryview(data)[gap:], start
        while rest:
            try:
                read = os.preadv(self._descriptor, [rest], place)
            except OSError as error:  # a bad sector; a mapped file would kill the process here
                raise CorruptJournal(self.path, place, str(error.strerror)) from error
            if not read:
                raise CorruptJournal(self.path, place, "somebody cut it off while it was read")
            rest, place = rest[read:], place + read
        return data


def size(batch: Sequence[Entry]) -> int:
    """The bytes a batch takes on the disk."""
    return sum([_FRAME_BYTES + len(head) + len(body) for head, body, _ in batch])


def _frames(batch: Sequence[Entry], first: int, mark: bytes) -> list[Buffer]:
    pairs = zip(_heads(batch, first, mark), batch, strict=True)
    return [part for head, (_, body, _) in pairs for part in (head, body) if part]


def _heads(batch: Sequence[Entry], first: int, mark: bytes) -> list[bytes]:
    """What stands before each body."""
    return [
        _sealed(_FRAME.pack(mark, seq, first, len(head), len(body), checksum)) + head
        for seq, (head, body, checksum) in enumerate(batch, first)
    ]


def _write_all(descriptor: int, buffers: Sequence[Buffer], place: int) -> int:
    """Writes the buffers one after the other without joining them; returns where they end."""
    if len(buffers) <= IOV_MAX:
        written = os.pwritev(descriptor, buffers, place)
        if written == sum(map(len, buffers)):  # as nearly always
            return place + written
    rest, done = [memoryview(buffer) for buffer in buffers], 0  # again from the beginning: that loses nothing
    while done < len(rest):
        written = os.pwritev(descriptor, rest[done : done + IOV_MAX], place)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        place += written
        while done < len(rest) and written >= len(rest[done]):
            written -= len(rest[done])
            done += 1
        if written:
            rest[done] = rest[done][written:]
    return place


def _sealed(fields: bytes) -> bytes:
    return fields + crc32(fields).to_bytes(_SEAL_BYTES, "little")


def _is_sealed(raw: bytes | bytearray) -> bool:
    return crc32(raw[:-_SEAL_BYTES]) == int.from_bytes(raw[-_SEAL_BYTES:], "little")


def _is_header(raw: bytes) -> bool:
    return len(raw) == _HEADER_BYTES and raw.startswith(_MAGIC) and _is_sealed(raw)


def _mark(path: Path, first: int, header: bytes) -> bytes:
    """The mark of a segment's frames."""
    if not _is_header(header):
        raise CorruptJournal(path, 0, "this is not the header of a segment")
    _, version, written, mark = _HEADER.unpack_from(header)
    if version != _FORMAT:
        raise JournalError(
            f"{path} has journal format {version}; use the aflock that wrote it, this one reads {_FORMAT}"
        )
    if written != first:
        raise CorruptJournal(path, 0, f"its header says that it begins with record {written}")
    return bytes(mark)


def is_unborn(path: Path) -> bool:
    """Whether a crash came before the segment's header was on the disk; then no record had been written behind it."""
    with path.open("rb") as file:
        raw = file.read(_HEADER_BYTES + 1)
    return len(raw) <= _HEADER_BYTES and not _is_header(raw)


def missing(expected: int, found: int) -> str:
    """How to say that a record stands where another should."""
    if found > expected:
        return f"records {expected} to {found - 1} are missing before it"
    return f"record {found} is here where {expected} should be"
