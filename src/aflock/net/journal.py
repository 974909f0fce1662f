"""A journal: records appended to checksummed files, synced in batches, read again after a crash.

The files are segments (segment.py), `journal-<first seq>.log`; a batch is written to one of them, and a new one is
begun when a batch would make the last one too large.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import OrderError
from ..files import locked
from .segment import (
    IOV_MAX,
    Buffer,
    CorruptJournal,
    Entry,
    JournalError,
    Record,
    Segment,
    Writing,
    entry,
    is_unborn,
    missing,
    size,
)

_NAME = re.compile(r"journal-(\d{16})\.log")

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OUT_OF_MEANS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # many connections at once; they pass


class JournalInUse(JournalError):
    """Another server has the folder."""


class JournalNotOpen(JournalError, OrderError):
    """The journal has not been recovered to its end yet, or is closed."""


class JournalFull(JournalError):
    """There is no room; nothing of the batch was kept, and a later one may succeed."""


class JournalFailed(JournalError):
    """Nobody knows what is on the disk; the journal takes nothing any more."""


class Journal:
    """The journal in a folder, which is this one's alone until `close`.

    One call at a time: it has no locks inside. Only `plan` and `wrote` may be called while another thread is in
    `forget`.
    """

    def __init__(self, folder: Path, *, segment_bytes: int = 64 << 20) -> None:
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._segment: Segment | None = None  # the last one, once recovered
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
        needed = size(batch)
        segment = self._with_room(needed)
        first = segment.next
        with self._all_or_nothing(partial(segment.cut, segment.end, first)):
            segment.append(batch)
            self._sync(segment)
            segment.next += len(batch)
        self.written += needed
        return first

    def plan(self, batch: Sequence[Entry]) -> Writing | None:
        """What `write` would do, for somebody else to do it; None if only `write` can."""
        segment, needed = self._usable(), size(batch)
        if not batch or 2 * len(batch) > IOV_MAX or segment.end + needed > self._segment_bytes:
            return None
        return segment.plan(batch, needed)

    def wrote(self, writing: Writing) -> int:
        """It is on the disk; how many bytes it was."""
        self._usable().wrote(writing)
        written = writing.end - writing.place
        self.written += written
        return written

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
            raise CorruptJournal(self._path(firsts[0]), 0, missing(after + 1, firsts[0]))
        self._older = {first: self._path(first).stat().st_size for first in firsts[:-1]}
        for first, following in pairwise(firsts):
            if following > after + 1:
                yield from self._recover_older(first, following, after)
        yield from self._recover_last(firsts[-1] if firsts else None, after)

    def _recover_older(self, first: int, following: int, after: int) -> Iterator[Record]:
        with closing(Segment.open(self._path(first), first)) as segment:
            yield from segment.records(after)
            if not segment.is_whole:
                raise segment.damaged()
            if segment.next != following:
                raise CorruptJournal(self._path(following), 0, missing(segment.next, following))

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

    def _last_segment(self, first: int) -> Segment:
        path = self._path(first)
        if not is_unborn(path):
            return Segment.open(path, first)
        path.unlink()
        return self._new_segment(first)

    def _with_room(self, needed: int) -> Segment:
        """The last segment; a new one if the batch would make it too large."""
        segment = self._usable()
        if segment.end + needed > self._segment_bytes:
            self.rotate()
        return self._usable()

    def _follow(self, segment: Segment, first: int) -> None:
        self._segment = self._new_segment(first)
        self._older[segment.first] = segment.end
        segment.close()

    def _new_segment(self, first: int) -> Segment:
        """A segment that is on the disk, under its name, before any record is written to it."""
        path = self._path(first)
        with self._all_or_nothing(lambda: None):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with self._all_or_nothing(partial(self._discard, path, descriptor)):
            segment = Segment.begin(path, descriptor, first)
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
                raise self.failed(worse) from error
            if not isinstance(error, OSError):
                raise
            if error.errno in _DISK_FULL | _OUT_OF_MEANS:
                raise self._full(error) from error
            raise self.failed(error) from error

    def _sync(self, segment: Segment) -> None:
        try:
            segment.sync()
        except OSError as error:
            raise self.failed(error) from error

    def _full(self, error: OSError) -> JournalFull:
        cause = "the disk is full" if error.errno in _DISK_FULL else "the system gives no more"
        return JournalFull(
            f"{cause} and the journal in {self.folder} cannot grow ({error.strerror}); "
            "make room or raise the limit, and write again: nothing of this batch was kept"
        )

    def failed(self, error: OSError) -> JournalFailed:
        """A sync has failed: nothing is taken any more; what is to be raised."""
        self._failure = (
            f"the disk failed and nobody knows how much of the last batch the journal in {self.folder} holds "
            f"({error.strerror}); restart the server, which recovers what is there"
        )
        return JournalFailed(self._failure)

    def _recovered(self) -> Segment:
        if self._segment is None:
            raise self._refusal()
        return self._segment

    def _usable(self) -> Segment:
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


def _firsts(folder: Path) -> list[int]:
    """The first seqs of the segments, by their names."""
    return sorted(int(name[1]) for path in folder.iterdir() if (name := _NAME.fullmatch(path.name)))


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
