"""A segment of a journal: one file of checksummed records.

A segment is a header (magic, format, first seq, mark, checksum) and one frame per record: mark, seq, batch, length of
the head, length of the body, checksum of both, checksum of these fields; then the head and the body. The mark is eight
random bytes, drawn for each segment, so that nothing a client sends can look like a frame.

What a crash can do. The journal writes a batch to one segment and syncs it before it writes the next batch, so a crash
can tear only the last batch, and none of its records was acknowledged. Not all file systems write the pages of a file
in order, so a torn batch can have a hole with whole frames behind it. A reader cuts off a torn batch from its first bad
frame on, but it must not cut off acknowledged records that were damaged. Therefore every frame names the first seq of
its batch. Say that the frame of record e is bad. A later frame whose batch begins at or before e is of the same batch
as e: the batch may be torn. A later frame whose batch begins after e was written after the batch of e had been synced:
a crash cannot have damaged record e, and the reader refuses the journal. If there is no such frame, everything from
record e on is the rest of a torn batch.

What a failed sync can do. The kernel may drop the pages of the last batch and still show them to a process that reads
the file; a later sync finds no page to write and succeeds. After a restart the journal therefore writes the last batch
again, the same bytes, and syncs it, before a server relies on it. If that is the first batch of the segment, the
journal also writes the header again.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ...errors import AflockError
from ...system.checksum import crc32
from ..protocol.wire import BytesLike
from .disk import DISK, Disk

_MAGIC = b"aflock\0j"
_FORMAT = 2
_HEADER = struct.Struct("<8sIQ8s")  # magic, format, first seq, mark
_FRAME = struct.Struct("<8sQQIQI")  # mark, seq, batch, length of head, length of body, checksum of both
_SEAL_BYTES = 4  # the checksum behind the fields of a header or frame
_HEADER_BYTES = _HEADER.size + _SEAL_BYTES
_FRAME_BYTES = _FRAME.size + _SEAL_BYTES
_MARK_BYTES = 8
IOV_MAX = 1024  # most buffers that Linux takes in one pwritev
_SCAN_BYTES = 1 << 20
_ALIGNED = 8  # a body is read to an address that is a multiple of this: unaligned numbers are slow to work with
_PAGE_BYTES = 1 << 16  # the largest page size of any system
_DROP_BYTES = 1 << 20  # a smaller part of the page cache is not worth a system call


class JournalError(AflockError):
    """A call of the journal failed."""


class CorruptJournal(JournalError):
    """Records that were acknowledged are damaged or missing; `path` and `offset` say where."""

    def __init__(self, path: Path, offset: int, what: str) -> None:
        super().__init__(
            f"the journal is damaged at byte {offset} of {path} ({what}); restore the folder from a backup, "
            "or move this file away if a snapshot holds all of its records"
        )
        self.path, self.offset = path, offset


class JournalEntry(NamedTuple):
    """One record to write; the journal does not look into head and body."""

    head: bytes
    body: BytesLike
    checksum: int
    """Of head and body together."""


def entry(head: bytes, body: BytesLike = b"") -> JournalEntry:
    """Makes an entry, with its checksum.

    The caller's thread computes the checksum. The journal's thread would release the interpreter for each checksum and
    then wait until it gets it back, once per record of a batch.
    """
    if type(body) is memoryview and (body.itemsize > 1 or body.ndim > 1):
        body = body.cast("B") if len(body) else b""  # an empty view cannot be cast
    return JournalEntry(head, body, crc32(body, crc32(head)))


class Record(NamedTuple):
    """One record that was read from the journal."""

    seq: int
    head: bytes
    body: memoryview


class _Frame(NamedTuple):
    record: Record
    batch: int
    """The first seq of the batch the record was written with."""
    end: int
    """Where the next frame begins."""


class Segment:
    """One open file of a journal.

    All frames that were read or written end at `end`; the next record gets the seq `next`.
    """

    def __init__(self, disk: Disk, path: Path, descriptor: int, first: int, mark: bytes) -> None:
        self.path, self.first, self.mark = path, first, mark
        self.next, self.end = first, _HEADER_BYTES
        self._disk, self._descriptor = disk, descriptor
        self._batch, self._batch_begin = first, _HEADER_BYTES  # first seq and offset of the last batch that was read
        self._dropped = 0  # the page cache need not hold the bytes before this offset
        self._size = disk.size(descriptor)

    @classmethod
    def begin(cls, disk: Disk, path: Path, descriptor: int, first: int) -> Segment:
        """Writes the header of a new segment to an empty file; it is on the disk when this returns."""
        mark = os.urandom(_MARK_BYTES)
        _write_all(disk, descriptor, [_sealed(_HEADER.pack(_MAGIC, _FORMAT, first, mark))], 0)
        disk.sync(descriptor)
        return cls(disk, path, descriptor, first, mark)

    @classmethod
    def open(cls, path: Path, first: int, *, disk: Disk = DISK, writable: bool = False) -> Segment:
        """Opens an existing segment and reads its header."""
        descriptor = disk.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            return cls(disk, path, descriptor, first, _mark(path, first, _first_bytes(disk, descriptor, _HEADER_BYTES)))
        except BaseException:
            disk.close(descriptor)
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
        """Yields the records after the seq `after`, up to the end of the file or the first frame that is not whole."""
        while frame := self._frame(self.end):
            if frame.record.seq != self.next:
                raise CorruptJournal(self.path, self.end, missing(self.next, frame.record.seq))
            if frame.batch != self._batch:
                self._batch, self._batch_begin = frame.batch, self.end
            self.next, self.end = self.next + 1, frame.end
            if frame.record.seq > after:
                yield frame.record

    def check_tail(self) -> None:
        """Raises `CorruptJournal` if the frame at `end` is not whole and a crash cannot be the cause.

        The text at the top of this module says how this is decided.
        """
        if not self.is_whole and any(frame.batch > self.next for frame in self._later_frames()):
            raise self.damaged()

    def rewrite_tail(self) -> None:
        """Writes the last batch that was read again, syncs it, and cuts off the rest of a torn batch behind it."""
        begin = 0 if self._batch_begin == _HEADER_BYTES else self._batch_begin
        for start in range(begin, self.end, _SCAN_BYTES):
            _write_all(self._disk, self._descriptor, [self._read(start, min(_SCAN_BYTES, self.end - start))], start)
        self.sync()
        if not self.is_whole:
            self.cut(self.end, self.next)

    def damaged(self) -> CorruptJournal:
        """The error that says that the frame at `end` is damaged."""
        return CorruptJournal(self.path, self.end, f"record {self.next} is not whole")

    def append(self, batch: Sequence[JournalEntry]) -> None:
        """Writes the frames of a batch behind the last one; the caller syncs, and then raises `next`."""
        frames = _frames(batch, self.next, self.mark)
        self.end = self._size = _write_all(self._disk, self._descriptor, frames, self.end)

    def cut(self, end: int, following: int) -> None:
        """Cuts the file off at `end`; the next record gets the seq `following`."""
        self._disk.truncate(self._descriptor, end)
        self._disk.sync(self._descriptor)  # otherwise the bytes could be there again after a loss of power
        self.end = self._size = end
        self.next = following

    def sync(self) -> None:
        """Makes the appended frames durable."""
        self._disk.sync_data(self._descriptor)
        self._drop_cache()

    def _drop_cache(self) -> None:
        """Frees the page cache of what was written: no process reads it before the next start, and new batches need it.

        The last page stays: the next batch begins in it.
        """
        unread = self.end - self.end % _PAGE_BYTES - self._dropped
        if unread >= _DROP_BYTES:
            self._disk.drop_cache(self._descriptor, self._dropped, unread)
            self._dropped += unread

    def close(self) -> None:
        """Closes the file."""
        self._disk.close(self._descriptor)

    def _later_frames(self) -> Iterator[_Frame]:
        """Searches everything behind `end` for the segment's mark, and yields the whole frames."""
        for start in range(self.end + 1, self._size, _SCAN_BYTES):  # parts overlap: a mark may lie across two of them
            chunk = self._read(start, min(_SCAN_BYTES + _MARK_BYTES - 1, self._size - start))
            for found in re.finditer(re.escape(self.mark), chunk):
                if frame := self._frame(start + found.start()):
                    yield frame

    def _frame(self, start: int) -> _Frame | None:
        """The frame that begins at `start`; None if it is not whole."""
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
        """Reads `count` bytes from `start` into a buffer, behind `gap` bytes that align what follows."""
        data = bytearray(gap + count)
        rest, offset = memoryview(data)[gap:], start
        while rest:
            try:
                read = self._disk.read(self._descriptor, rest, offset)
            except OSError as error:  # a bad sector; a mapped file would kill the process here
                raise CorruptJournal(self.path, offset, str(error.strerror)) from error
            if not read:
                raise CorruptJournal(self.path, offset, "another process cut the file off while it was read")
            rest, offset = rest[read:], offset + read
        return data


def size(batch: Sequence[JournalEntry]) -> int:
    """The bytes a batch takes in a segment."""
    return sum([_FRAME_BYTES + len(head) + len(body) for head, body, _ in batch])


def _frames(batch: Sequence[JournalEntry], first: int, mark: bytes) -> list[BytesLike]:
    parts: list[BytesLike] = []
    for seq, (head, body, checksum) in enumerate(batch, first):
        parts.append(_sealed(_FRAME.pack(mark, seq, first, len(head), len(body), checksum)) + head)
        if len(body):
            parts.append(body)
    return parts


def _write_all(disk: Disk, descriptor: int, buffers: Sequence[BytesLike], offset: int) -> int:
    """Writes the buffers one after the other without joining them; returns where they end."""
    if len(buffers) <= IOV_MAX:
        written = disk.write(descriptor, buffers, offset)
        if written == sum(map(len, buffers)):  # the usual case: one call of the system
            return offset + written
    rest, done = [memoryview(buffer) for buffer in buffers], 0  # starts over: the same bytes go to the same offset
    while done < len(rest):
        written = disk.write(descriptor, rest[done : done + IOV_MAX], offset)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        offset += written
        while done < len(rest) and written >= len(rest[done]):
            written -= len(rest[done])
            done += 1
        if written:
            rest[done] = rest[done][written:]
    return offset


def _sealed(fields: bytes) -> bytes:
    """The fields, with their checksum behind them."""
    return fields + crc32(fields).to_bytes(_SEAL_BYTES, "little")


def _is_sealed(raw: bytes | bytearray) -> bool:
    return crc32(raw[:-_SEAL_BYTES]) == int.from_bytes(raw[-_SEAL_BYTES:], "little")


def _is_header(raw: bytes) -> bool:
    return len(raw) == _HEADER_BYTES and raw.startswith(_MAGIC) and _is_sealed(raw)


def _mark(path: Path, first: int, header: bytes) -> bytes:
    """The mark in a segment's header; raises if the header is not that of the segment that begins with `first`."""
    if not _is_header(header):
        raise CorruptJournal(path, 0, "this is not the header of a segment")
    _, version, written, mark = _HEADER.unpack_from(header)
    if version != _FORMAT:
        raise JournalError(
            f"{path} has journal format {version}, but this version of aflock reads format {_FORMAT}; "
            "use the version that wrote it"
        )
    if written != first:
        raise CorruptJournal(path, 0, f"its header says that it begins with record {written}")
    return bytes(mark)


def is_headless(disk: Disk, path: Path) -> bool:
    """Whether the file is a segment without a whole header and without frames.

    A crash leaves one, if it comes between the creation of the file and the sync of its header. Records are written
    only after that sync.
    """
    descriptor = disk.open(path, os.O_RDONLY)
    try:
        raw = _first_bytes(disk, descriptor, _HEADER_BYTES + 1)
    finally:
        disk.close(descriptor)
    return len(raw) <= _HEADER_BYTES and not _is_header(raw)


def _first_bytes(disk: Disk, descriptor: int, most: int) -> bytes:
    data = bytearray(min(most, disk.size(descriptor)))
    return bytes(data[: disk.read(descriptor, memoryview(data), 0)]) if data else b""


def missing(expected: int, found: int) -> str:
    """Says that the record `found` follows where the record `expected` must follow."""
    if found > expected:
        return f"records {expected} to {found - 1} are missing before it"
    return f"found record {found}, expected record {expected}"
