"""A journal: records are appended to checksummed files, synced in batches, and read again after a crash.

The files are segments (segment.py) with the names `journal-<first seq>.log`. The journal appends a batch to the last
segment; if the batch would make it too large, to a new one. `JournalReader` only reads; `Journal` writes, too.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from ...errors import OrderError
from ...system.files import locked, sync_folder
from ..protocol.wire import BytesLike
from .disk import DISK, Disk
from .segment import (
    CorruptJournal,
    JournalEntry,
    JournalError,
    Record,
    Segment,
    entry,
    is_headless,
    missing,
    size,
)

_NAME = re.compile(r"journal-(\d{16})\.log")

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # too many connections, say: a later write can succeed


class JournalInUse(JournalError):
    """Another process has locked the folder."""


class JournalNotOpen(JournalError, OrderError):
    """The journal has not been read to its end and made writable yet, or is closed."""


class JournalFull(JournalError):
    """The disk is full, or the system is short of files or memory; nothing was kept, and a later batch may succeed."""


class JournalFailed(JournalError):
    """A sync failed, so the content of the disk is unknown; the journal takes no batch any more."""


class JournalReader:
    """The journal in a folder, read only: it changes nothing on the disk.

    It locks the folder: no server can start there until `close`.
    """

    _writable = False

    def __init__(self, folder: Path, *, disk: Disk = DISK) -> None:
        self.folder, self._disk = folder, disk
        self._after = 0  # the argument of the last `read`
        self._older: dict[int, int] = {}  # first seq -> bytes, of all segments but the last
        self._headless: int | None = None  # first seq of the last segment, if a crash came before its header was synced
        self._tail: Segment | None = None  # the last segment, once it was read to its end
        self._closed = False
        try:
            self._lock = self._lock_folder()
        except OSError as error:
            raise _unusable(folder, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def oldest(self) -> int:
        """The seq of the oldest record in the folder; of an empty journal, the seq its first record will get."""
        return min(self._firsts(), default=1)

    @property
    def following(self) -> int:
        """The seq after the last record that was read."""
        tail = self._tail.next if self._tail is not None else self._headless or 1
        return max(tail, self._after + 1)

    def read(self, after: int = 0) -> Iterator[Record]:
        """Yields every record after the seq `after`, in order.

        Records up to `after` are in a snapshot: segments that hold no others are not read. A record is read when the
        caller asks for it, and the caller may keep its body.
        """
        self._release_tail()
        self._after = after
        try:
            yield from self._read(after)
        except OSError as error:
            raise _unusable(self.folder, error) from error

    def read_again(self, after: int, upto: int) -> Iterator[Record]:
        """Yields the records after the seq `after` up to `upto`, in order; all of them must have been written.

        It opens the segments anew, so it may be called at any time, also while a `read` is not exhausted.
        """
        following = after + 1
        try:
            for record in self._read_again(after, upto):
                if record.seq != following:
                    break
                following += 1
                yield record
        except OSError as error:
            raise _unusable(self.folder, error) from error
        if following <= upto:
            raise CorruptJournal(self.folder, 0, missing(following, upto + 1))

    def close(self) -> None:
        """Closes all files and unlocks the folder."""
        if self._closed:
            return
        self._closed = True
        self._release_tail()
        if self._lock is not None:
            os.close(self._lock)

    def _lock_folder(self) -> int | None:
        """Locks the folder; returns the lock file's descriptor, or None if no server has ever created that file."""
        self._disk.names(self.folder)  # raises if there is no such folder
        try:
            return self._locked(os.open(self.folder / "lock", os.O_RDONLY))
        except FileNotFoundError:
            return None

    def _locked(self, descriptor: int) -> int:
        if not locked(descriptor):
            os.close(descriptor)
            raise JournalInUse(
                f"another server uses the journal in {self.folder}; stop it, or give this one its own folder"
            )
        return descriptor

    def _read(self, after: int) -> Iterator[Record]:
        firsts = self._firsts()
        if firsts and firsts[0] > after + 1:
            raise CorruptJournal(self._path(firsts[0]), 0, missing(after + 1, firsts[0]))
        self._older = {first: self._disk.size(self._path(first)) for first in firsts[:-1]}
        for first, following in pairwise(firsts):
            if following > after + 1:
                yield from self._read_older(first, following, after)
        if firsts:
            yield from self._read_last(firsts[-1], after)

    def _read_again(self, after: int, upto: int) -> Iterator[Record]:
        firsts = [first for first in self._firsts() if first <= upto]
        for first, end in pairwise([*firsts, upto + 1]):
            if end > after + 1:
                with closing(Segment.open(self._path(first), first, disk=self._disk)) as segment:
                    yield from islice(segment.records(after), end - max(first, after + 1))  # `upto` may be in it

    def _read_older(self, first: int, following: int, after: int) -> Iterator[Record]:
        with closing(Segment.open(self._path(first), first, disk=self._disk)) as segment:
            yield from segment.records(after)
            if not segment.is_whole:
                raise segment.damaged()
            if segment.next != following:
                raise CorruptJournal(self._path(following), 0, missing(segment.next, following))

    def _read_last(self, first: int, after: int) -> Iterator[Record]:
        if is_headless(self._disk, self._path(first)):
            self._headless = first
            return
        segment = Segment.open(self._path(first), first, disk=self._disk, writable=self._writable)
        try:
            yield from segment.records(after)
            segment.check_tail()
        except BaseException:
            segment.close()
            raise
        self._tail = segment

    def _release_tail(self) -> None:
        if self._tail is not None:
            self._tail.close()
        self._tail = self._headless = None

    def _firsts(self) -> list[int]:
        """The first seq of each segment in the folder, sorted; the file names hold them."""
        return sorted(int(found[1]) for name in self._disk.names(self.folder) if (found := _NAME.fullmatch(name)))

    def _path(self, first: int) -> Path:
        return self.folder / f"journal-{first:016d}.log"


class Journal(JournalReader):
    """The journal in a folder, open for writing: read all records, call `make_writable`, then `write` batches.

    It locks the folder until `close`. It has no locks for threads: callers make one call at a time.
    """

    _writable = True

    def __init__(self, folder: Path, *, segment_bytes: int = 64 << 20, disk: Disk = DISK) -> None:
        self._segment_bytes = segment_bytes
        self._segment: Segment | None = None  # the last segment, once `make_writable` was called
        self._failure: str | None = None
        self.written = 0
        """Bytes written since the folder was opened."""
        super().__init__(folder, disk=disk)
        try:
            self._folder = disk.open(folder, os.O_RDONLY)
        except OSError as error:
            super().close()
            raise _unusable(folder, error) from error

    @property
    def next(self) -> int:
        """The seq that the next record will get."""
        return self._recovered().next

    @property
    def size(self) -> int:
        """The bytes of all segments on disk."""
        return self._recovered().end + sum(tuple(self._older.values()))  # a copy: the journal's thread may change it

    def read(self, after: int = 0) -> Iterator[Record]:
        """As in `JournalReader`; nothing can be written until the last record was read and `make_writable` called."""
        if self._failure or self._closed:
            raise self._refusal()
        self._segment = None  # it is `_tail`, which the next line closes, or None already
        yield from super().read(after)

    def make_writable(self) -> None:
        """Makes durable what was read, cuts off the rest of a torn batch, and opens the journal for `write`."""
        try:
            self._disk.sync(self._folder)
            segment = self._writable_tail()
            if segment.next <= self._after:  # the snapshot is newer than the journal: the seqs go on after the snapshot
                segment = self._follow(segment, self._after + 1)
            self._segment = self._tail = segment
        except OSError as error:
            raise _unusable(self.folder, error) from error

    def _writable_tail(self) -> Segment:
        if self._tail is not None:
            self._tail.rewrite_tail()
            return self._tail
        if self._headless is not None:
            self._disk.remove(self._path(self._headless))
        self._tail = self._new_segment(self._headless or self._after + 1)
        return self._tail

    def write(self, entries: Sequence[JournalEntry | tuple[bytes, BytesLike]]) -> int:
        """Appends a batch of heads and bodies and returns the seq of its first record.

        When it returns, the batch is durable. When it raises `JournalFull`, the journal is as it was before.
        """
        batch = [each if isinstance(each, JournalEntry) else entry(*each) for each in entries]
        if not batch:
            return self._usable().next
        needed = size(batch)
        segment = self._segment_for(needed)
        first = segment.next
        with self._all_or_nothing(partial(segment.cut, segment.end, first)):
            segment.append(batch)
            self._sync(segment)
            segment.next += len(batch)
        self.written += needed
        return first

    def rotate(self) -> None:
        """Begins a new segment, unless the last one has no records; `delete_upto` can then delete the one before.

        `delete_upto` deletes whole segments, and never the one that is written to.
        """
        segment = self._usable()
        if not segment.is_empty:
            self._segment = self._tail = self._follow(segment, segment.next)

    def delete_upto(self, upto: int) -> None:
        """Deletes the segments that hold no record after the seq `upto`, but never the last."""
        firsts = [*self._older, self._usable().first]
        gone = [first for first, following in pairwise(firsts) if following <= upto + 1]
        try:
            for first in gone:
                self._disk.remove(self._path(first))
                del self._older[first]
            if gone:
                self._disk.sync(self._folder)
        except OSError as error:
            raise _unusable(self.folder, error) from error

    def close(self) -> None:
        """Closes all files and unlocks the folder; all batches are durable already."""
        if not self._closed:
            self._segment = None
            self._disk.close(self._folder)
        super().close()

    def _lock_folder(self) -> int:
        _make_durable_folder(self.folder)
        return self._locked(os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600))

    def _segment_for(self, needed: int) -> Segment:
        """The last segment, or a new one if a batch of `needed` bytes would make that too large."""
        segment = self._usable()
        if segment.end + needed > self._segment_bytes:
            self.rotate()
        return self._usable()

    def _follow(self, segment: Segment, first: int) -> Segment:
        """Begins a new segment, and closes the one before it."""
        new = self._new_segment(first)
        self._older[segment.first] = segment.end
        segment.close()
        return new

    def _new_segment(self, first: int) -> Segment:
        """A new segment, whose header and name are on the disk before any record is written to it."""
        path = self._path(first)
        with self._all_or_nothing(lambda: None):
            descriptor = self._disk.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        with self._all_or_nothing(partial(self._discard, path, descriptor)):
            segment = Segment.begin(self._disk, path, descriptor, first)
            self._disk.sync(self._folder)
        return segment

    def _discard(self, path: Path, descriptor: int) -> None:
        self._disk.close(descriptor)
        self._disk.remove(path)
        self._disk.sync(self._folder)

    @contextmanager
    def _all_or_nothing(self, undo: Callable[[], None]) -> Iterator[None]:
        """Calls `undo` if the body of the `with` raises.

        If the disk was full and `undo` succeeds, `JournalFull` is raised and the journal is as it was before. After
        any other error of the disk it takes no batch any more.
        """
        try:
            yield
        except BaseException as error:
            try:
                undo()
            except OSError as worse:
                raise self._failed(worse) from error
            if not isinstance(error, OSError):
                raise
            if error.errno in _DISK_FULL | _OUT_OF_RESOURCES:
                raise self._full(error) from error
            raise self._failed(error) from error

    def _sync(self, segment: Segment) -> None:
        try:
            segment.sync()
        except OSError as error:
            raise self._failed(error) from error

    def _full(self, error: OSError) -> JournalFull:
        cause = "the disk is full" if error.errno in _DISK_FULL else "the system is short of open files or memory"
        return JournalFull(
            f"{cause}, so the journal in {self.folder} cannot grow ({error.strerror}); "
            "free disk space or raise the limit; clients send the updates again"
        )

    def _failed(self, error: OSError) -> JournalFailed:
        """Marks the journal as failed, so that it takes no batch any more, and returns the error to raise."""
        self._failure = (
            f"the disk failed, and it is unknown how much of the last batch the journal in {self.folder} holds "
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
        return JournalNotOpen(
            f"the journal in {self.folder} is not writable yet; read all of it, then call `make_writable`"
        )


def _make_durable_folder(folder: Path) -> None:
    """Makes a folder and its parents, and syncs each name."""
    if folder.is_dir():
        return
    _make_durable_folder(folder.parent)
    folder.mkdir(0o700, exist_ok=True)
    sync_folder(folder.parent)


def _unusable(folder: Path, error: OSError) -> JournalError:
    return JournalError(
        f"{error.filename or folder} cannot be used for the journal ({error.strerror}); "
        "check that this user may read and write it and that its disk works"
    )
