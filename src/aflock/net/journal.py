"""A journal: records appended to checksummed files, synced in batches, read again after a crash.

The files are segments, `journal-<first seq>.log`. A segment is a header (magic, format, first seq, mark, checksum) and
frames, one for each record: mark, seq, batch, length of the head, length of the body, checksum of both, checksum of
all that; then the head and the body. The mark is eight random bytes that are the segment's own, so that nothing a
client sends can look like a frame.

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
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from ..checksum import crc32
from ..errors import AflockError, OrderError
from ..files import locked

Buffer = bytes | bytearray | memoryview

_MAGIC = b"aflock\0j"
_FORMAT = 1
_NAME = re.compile(r"journal-(\d{16})\.log")
_SEGMENT = struct.Struct("<8sIQ8s")  # magic, format, first seq, mark
_FRAME = struct.Struct("<8sQQIQI")  # mark, seq, batch, length of head, length of body, checksum of both
_SEAL_BYTES = 4
_SEGMENT_BYTES = _SEGMENT.size + _SEAL_BYTES
_FRAME_BYTES = _FRAME.size + _SEAL_BYTES
_MARK_BYTES = 8
_IOV_MAX = 1024
_SCAN_BYTES = 1 << 20
_PAGE_BYTES = 1 << 16  # the largest there are
_LET_GO_BYTES = 1 << 20

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OUT_OF_MEANS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # many connections at once; they pass

_datasync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)  # not every system has the cheaper one
_advise: Callable[[int, int, int, int], None] | None = getattr(os, "posix_fadvise", None)  # nor that


class JournalError(AflockError):
    """The journal cannot do what was asked."""


class JournalInUse(JournalError):
    """Another server has the folder."""


class JournalNotOpen(JournalError, OrderError):
    """The journal has not been recovered to its end yet, or is closed."""


class JournalFull(JournalError):
    """There is no room; nothing of the batch was kept, and a later one may succeed."""


class JournalFailed(JournalError):
    """Nobody knows what is on the disk; the journal takes nothing any more."""


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
    flat = memoryview(body).cast("B") if len(body) else memoryview(b"")  # an empty view cannot be cast
    return Entry(head, flat, crc32(flat, crc32(head)))


class Record(NamedTuple):
    """One entry of the journal."""

    seq: int
    head: bytes
    body: memoryview


class Journal:
    """The journal in a folder, which is this one's alone until `close`. One call at a time: it has no locks inside."""

    def __init__(self, folder: Path, *, segment_bytes: int = 64 << 20) -> None:
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._segment: _Segment | None = None  # the last one, once recovered
        self._older: dict[int, int] = {}  # first seq and bytes of the others
        self._failure: str | None = None
        self._closed = False
        self.written = 0
        """Bytes, since the folder was opened."""
        try:
            _make_folder(folder)
            self._folder = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise _unusable(folder, error) from error
        try:
            self._lock = _take(folder)
        except BaseException:
            os.close(self._folder)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def next(self) -> int:
        """The seq the next record gets."""
        return self._recovered().next

    @property
    def size(self) -> int:
        """The bytes of all segments on disk."""
        return self._recovered().end + sum(tuple(self._older.values()))

    @property
    def oldest(self) -> int:
        """The seq of the oldest record that has not been deleted, or that the first one will get."""
        return min(_firsts(self.folder), default=1)

    def recover(self, after: int = 0) -> Iterator[Record]:
        """Every record after the seq `after`, in order; once they are exhausted the journal can be written to.

        Records up to `after` are in a snapshot: segments that hold no others are not even read. A record is read when
        it is asked for, and its body belongs to whoever asked.
        """
        if self._failure or self._closed:
            raise self._refusal()
        self._release_segment()
        try:
            yield from self._recover(after)
        except OSError as error:
            raise _unusable(self.folder, error) from error

    def write(self, entries: Sequence[Entry | tuple[bytes, Buffer]]) -> int:
        """Appends a batch of heads and bodies and returns the seq of its first record.

        When it returns the batch is on the disk. When it raises, nothing of the batch counts.
        """
        batch = [each if isinstance(each, Entry) else entry(*each) for each in entries]
        if not batch:
            return self._usable().next
        size = sum([_FRAME_BYTES + len(head) + len(body) for head, body, _ in batch])
        segment = self._with_room(size)
        first = segment.next
        with self._all_or_nothing(partial(segment.cut, segment.end, first)):
            segment.append(_frames(batch, first, segment.mark))
            self._sync(segment)
            segment.next += len(batch)
        self.written += size
        return first

    def rotate(self) -> None:
        """Begins a new segment, so that `forget` can delete the one there is; does nothing if that has no records."""
        segment = self._usable()
        if not segment.is_empty:
            self._follow(segment, segment.next)

    def forget(self, upto: int) -> int:
        """Deletes the segments without any record after the seq `upto`, but never the last; returns how many."""
        firsts = [*self._older, self._usable().first]
        gone = [first for first, following in pairwise(firsts) if following <= upto + 1]
        try:
            for first in gone:
                self._path(first).unlink(missing_ok=True)
                del self._older[first]
            if gone:
                os.fsync(self._folder)
        except OSError as error:
            raise _unusable(self.folder, error) from error
        return len(gone)

    def close(self) -> None:
        """Gives the folder free; whatever was written is on the disk already."""
        if self._closed:
            return
        self._closed = True
        self._release_segment()
        os.close(self._folder)
        os.close(self._lock)

    def _recover(self, after: int) -> Iterator[Record]:
        os.fsync(self._folder)
        firsts = _firsts(self.folder)
        if firsts and firsts[0] > after + 1:
            raise CorruptJournal(self._path(firsts[0]), 0, _missing(after + 1, firsts[0]))
        self._older = {first: self._path(first).stat().st_size for first in firsts[:-1]}
        for first, following in pairwise(firsts):
            if following > after + 1:
                yield from self._recover_older(first, following, after)
        yield from self._recover_last(firsts[-1] if firsts else None, after)

    def _recover_older(self, first: int, following: int, after: int) -> Iterator[Record]:
        with closing(_Segment.open(self._path(first), first)) as segment:
            yield from segment.records(after)
            if not segment.is_whole:
                raise segment.damaged()
            if segment.next != following:
                raise CorruptJournal(self._path(following), 0, _missing(segment.next, following))

    def _recover_last(self, first: int | None, after: int) -> Iterator[Record]:
        segment = self._new_segment(after + 1) if first is None else self._last_segment(first)
        try:
            segment.sync()  # a killed server may have left records in memory only; who reads them counts on them
            yield from segment.records(after)
            segment.cut_torn_tail()
            if segment.next > after:
                self._segment = segment
            else:  # the snapshot is newer than the journal
                self._follow(segment, after + 1)
        except BaseException:
            segment.close()
            raise

    def _last_segment(self, first: int) -> _Segment:
        path = self._path(first)
        if not _is_unborn(path):
            return _Segment.open(path, first)
        path.unlink()
        return self._new_segment(first)

    def _with_room(self, needed: int) -> _Segment:
        """The last segment; a new one if the batch would make it too large."""
        segment = self._usable()
        if segment.end + needed > self._segment_bytes:
            self.rotate()
        return self._usable()

    def _follow(self, segment: _Segment, first: int) -> None:
        self._segment = self._new_segment(first)
        self._older[segment.first] = segment.end
        segment.close()

    def _new_segment(self, first: int) -> _Segment:
        """A segment that is on the disk, under its name, before any record is written to it."""
        path = self._path(first)
        with self._all_or_nothing(lambda: None):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with self._all_or_nothing(partial(self._discard, path, descriptor)):
            segment = _Segment.begin(path, descriptor, first)
            os.fsync(self._folder)
        return segment

    def _discard(self, path: Path, descriptor: int) -> None:
        os.close(descriptor)
        path.unlink()
        os.fsync(self._folder)

    @contextmanager
    def _all_or_nothing(self, undo: Callable[[], None]) -> Iterator[None]:
        """Undoes what was broken off; if that succeeds and no sync had failed, the journal goes on as it was."""
        try:
            yield
        except BaseException as error:
            try:
                undo()
            except OSError as worse:
                raise self._failed(worse) from error
            if not isinstance(error, OSError):
                raise
            if error.errno in _DISK_FULL | _OUT_OF_MEANS:
                raise self._full(error) from error
            raise self._failed(error) from error

    def _sync(self, segment: _Segment) -> None:
        try:
            segment.sync()
        except OSError as error:
            raise self._failed(error) from error

    def _full(self, error: OSError) -> JournalFull:
        cause = "the disk is full" if error.errno in _DISK_FULL else "the system gives no more"
        return JournalFull(
            f"{cause} and the journal in {self.folder} cannot grow ({error.strerror}); "
            "make room or raise the limit, and write again: nothing of this batch was kept"
        )

    def _failed(self, error: OSError) -> JournalFailed:
        self._failure = (
            f"the disk failed and nobody knows how much of the last batch the journal in {self.folder} holds "
            f"({error.strerror}); restart the server, which recovers what is there"
        )
        return JournalFailed(self._failure)

    def _recovered(self) -> _Segment:
        if self._segment is None:
            raise self._refusal()
        return self._segment

    def _usable(self) -> _Segment:
        if self._failure:
            raise self._refusal()
        return self._recovered()

    def _refusal(self) -> JournalError:
        if self._failure:
            return JournalFailed(self._failure)
        if self._closed:
            return JournalNotOpen(f"the journal in {self.folder} is closed; open it again")
        return JournalNotOpen(f"the journal in {self.folder} is not recovered; read all of `recover` first")

    def _release_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _path(self, first: int) -> Path:
        return self.folder / f"journal-{first:016d}.log"


class _Frame(NamedTuple):
    record: Record
    batch: int
    end: int


class _Segment:
    """One file: whole frames up to `end`, the last of them of the record before `next`."""

    def __init__(self, path: Path, descriptor: int, first: int, mark: bytes) -> None:
        self.path, self.first, self.mark = path, first, mark
        self.next, self.end = first, _SEGMENT_BYTES
        self._descriptor = descriptor
        self._kept = 0  # pages before that are not kept in memory
        self._size = os.fstat(descriptor).st_size

    @classmethod
    def begin(cls, path: Path, descriptor: int, first: int) -> _Segment:
        mark = os.urandom(_MARK_BYTES)
        _write_all(descriptor, [_sealed(_SEGMENT.pack(_MAGIC, _FORMAT, first, mark))], 0)
        os.fsync(descriptor)
        return cls(path, descriptor, first, mark)

    @classmethod
    def open(cls, path: Path, first: int) -> _Segment:
        descriptor = os.open(path, os.O_RDWR)
        try:
            return cls(path, descriptor, first, _mark(path, first, os.pread(descriptor, _SEGMENT_BYTES, 0)))
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def is_empty(self) -> bool:
        return self.end == _SEGMENT_BYTES

    @property
    def is_whole(self) -> bool:
        return self.end == self._size

    def records(self, after: int) -> Iterator[Record]:
        """The records after `after`, up to the end of the file or to what is no whole frame."""
        while frame := self._frame(self.end):
            if frame.record.seq != self.next:
                raise CorruptJournal(self.path, self.end, _missing(self.next, frame.record.seq))
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
        return CorruptJournal(self.path, self.end, f"record {self.next} is not whole")

    def append(self, buffers: Sequence[Buffer]) -> None:
        self.end = self._size = _write_all(self._descriptor, buffers, self.end)

    def cut(self, end: int, following: int) -> None:
        os.ftruncate(self._descriptor, end)
        os.fsync(self._descriptor)  # or what was cut off might be back after a power cut
        self.end = self._size = end
        self.next = following

    def sync(self) -> None:
        _datasync(self._descriptor)
        self._let_go()

    def _let_go(self) -> None:
        """Nobody reads a journal before the next start: its pages are of more use to the next batch."""
        whole = self.end - self.end % _PAGE_BYTES  # the last page is written to again
        if _advise is not None and whole - self._kept >= _LET_GO_BYTES:
            _advise(self._descriptor, self._kept, whole - self._kept, os.POSIX_FADV_DONTNEED)
            self._kept = whole

    def close(self) -> None:
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
        end = content + head + body
        if mark != self.mark or end > self._size or crc32(data := self._read(content, head + body)) != checksum:
            return None
        return _Frame(Record(seq, bytes(data[:head]), memoryview(data).toreadonly()[head:]), batch, end)

    def _read(self, start: int, count: int) -> bytearray:
        data = bytearray(count)
        rest, place = memoryview(data), start
        while rest:
            try:
                read = os.preadv(self._descriptor, [rest], place)
            except OSError as error:  # a bad sector; a mapped file would kill the process here
                raise CorruptJournal(self.path, place, str(error.strerror)) from error
            if not read:
                raise CorruptJournal(self.path, place, "somebody cut it off while it was read")
            rest, place = rest[read:], place + read
        return data


def _frames(batch: Sequence[Entry], first: int, mark: bytes) -> list[Buffer]:
    frames: list[Buffer] = []
    for seq, (head, body, checksum) in enumerate(batch, first):
        frames.append(_sealed(_FRAME.pack(mark, seq, first, len(head), len(body), checksum)) + head)
        if body:
            frames.append(body)
    return frames


def _write_all(descriptor: int, buffers: Sequence[Buffer], place: int) -> int:
    """Writes the buffers one after the other without joining them; returns where they end."""
    if len(buffers) <= _IOV_MAX:
        written = os.pwritev(descriptor, buffers, place)
        if written == sum(map(len, buffers)):  # as nearly always
            return place + written
    rest, done = [memoryview(buffer) for buffer in buffers], 0  # again from the beginning: that loses nothing
    while done < len(rest):
        written = os.pwritev(descriptor, rest[done : done + _IOV_MAX], place)
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
    return len(raw) == _SEGMENT_BYTES and raw.startswith(_MAGIC) and _is_sealed(raw)


def _mark(path: Path, first: int, header: bytes) -> bytes:
    """The mark of a segment's frames."""
    if not _is_header(header):
        raise CorruptJournal(path, 0, "this is not the header of a segment")
    _, version, written, mark = _SEGMENT.unpack_from(header)
    if version != _FORMAT:
        raise JournalError(
            f"{path} has journal format {version}; use the aflock that wrote it, this one reads {_FORMAT}"
        )
    if written != first:
        raise CorruptJournal(path, 0, f"its header says that it begins with record {written}")
    return bytes(mark)


def _is_unborn(path: Path) -> bool:
    """Whether a crash came before the segment's header was on the disk; then no record had been written behind it."""
    with path.open("rb") as file:
        raw = file.read(_SEGMENT_BYTES + 1)
    return len(raw) <= _SEGMENT_BYTES and not _is_header(raw)


def _firsts(folder: Path) -> list[int]:
    """The first seqs of the segments, by their names."""
    return sorted(int(name[1]) for path in folder.iterdir() if (name := _NAME.fullmatch(path.name)))


def _missing(expected: int, found: int) -> str:
    if found > expected:
        return f"records {expected} to {found - 1} are missing before it"
    return f"record {found} is here where {expected} should be"


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(0o700, exist_ok=True)
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _take(folder: Path) -> int:
    """An open file that is locked as long as it is open."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise _unusable(folder, error) from error
    if not locked(descriptor):
        os.close(descriptor)
        raise JournalInUse(f"another server uses the journal in {folder}; stop it, or give this one its own folder")
    return descriptor


def _unusable(folder: Path, error: OSError) -> JournalError:
    return JournalError(
        f"{error.filename or folder} cannot be used for the journal ({error.strerror}); "
        "see that this user may read and write it and that its disk works"
    )
