"""Group commit: one write and one sync make all queued journal records durable; they are then applied in their order.

The server's request handlers submit records. Each gets its result through a callback after the record is on the disk
and has been applied to the federation, never before.

Two tasks share the work, so that the disk and the federation work at the same time. The first takes all queued records
and writes them in a thread of its own; while that thread waits for the disk, the event loop reads requests and queues
the next batch. The second applies durable records, a few at a time, so that the event loop reads requests in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...errors import AflockError
from ...events import moment
from ..federation.federation import RecordHead
from ..protocol.refusals import Refused, busy, stopping
from ..protocol.wire import BytesLike, UpdateHead
from .data_folder import DataFolder, encoded
from .journal import JournalFull
from .segment import JournalEntry, JournalError, entry

log = logging.getLogger("aflock.server")

OnResult = Callable[[Any, Refused | None], None]
"""Called with what `Federation.apply` returned for a record, or with the refusal."""

Submitted = tuple[JournalEntry, RecordHead, OnResult]

BATCH, BATCH_BYTES = 512, 4 << 20
"""Most records of one write, and the bytes of bodies after which a write takes no more.

The sender of the first record of a write waits for all of it; with large bodies, that would be long.
"""

APPLY_AT_ONCE = 64
"""Most records that are applied before the event loop may do other work: about a millisecond of small ones.

Many at once are cheaper per record, because the processor's caches then hold the code of one kind of work.
"""


class GroupCommit:
    """The only way by which a running server changes the federation in its data folder.

    All methods are called from the event loop.
    """

    def __init__(
        self, store: DataFolder, *, on_write: Callable[[float, int], None], on_applied: Callable[[], None]
    ) -> None:
        """`on_write` gets the seconds and the number of records of each write; `on_applied` follows applied records."""
        self._store, self._on_write, self._on_applied = store, on_write, on_applied
        self.now = store.now
        """Returns the time to write into a record."""
        self._queue: deque[Submitted] = deque()
        """Records that are not written yet."""
        self._durable: deque[Submitted] = deque()
        """Records that are on the disk and not applied yet."""
        self._bytes = 0
        """The bytes of the bodies in the queue; the server's memory for bodies bounds them (server/bodies.py)."""
        self._has_queued, self._has_durable, self._all_applied = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._all_applied.set()
        self._thread = ThreadPoolExecutor(1, "journal")
        self._closing = False
        self.full = False
        """Whether the last write found the disk full."""
        self.failed: Exception | None = None
        """The error after which no record is taken any more; the next start recovers from the journal."""
        loop = asyncio.get_running_loop()
        self._writer, self._applier = loop.create_task(self._write_all()), loop.create_task(self._apply_all())

    async def submit(self, kind: str, body: BytesLike = b"", **head: Any) -> Any:
        """Returns what applying the record returned, once it is durable and applied.

        Raises `Refused` if the record was not written, or if the federation refused it.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def done(result: Any, refusal: Refused | None) -> None:
            if not future.done():  # the request was cancelled, and its future with it
                future.set_result(result) if refusal is None else future.set_exception(refusal)

        record = {"k": kind, "t": self._store.now(), **head}
        self.put(record, encoded(record), body, done)
        return await future

    def put(self, head: RecordHead, text: bytes, body: BytesLike, done: OnResult) -> None:
        """Queues a record whose head is already encoded as `text`; `done` is called with the result."""
        if self._closing or self.failed is not None:
            raise stopping()
        self._queue.append((entry(text, body), head, done))
        self._bytes += len(body)
        self._has_queued.set()

    def put_update(
        self, name: str, job: int, head: UpdateHead, more: bool, norms: list[float], body: BytesLike, done: OnResult
    ) -> None:
        """Queues the record of an update; `more`: the client gets its next job with the answer."""
        record, text = update_record(self._store.now(), name, job, head, more, norms)
        self.put(record, text, body, done)

    # -- to the disk ------------------------------------------------------------------------------------------------

    async def _write_all(self) -> None:
        while not self._closing or self._queue:
            await self._has_queued.wait()
            self._has_queued.clear()
            while self._queue:
                # The batch has no name in this frame: a variable would keep its bodies, which may be megabytes, in
                # memory until the next batch is on the disk.
                await self._write_some(self._next_batch())

    async def _write_some(self, batch: list[Submitted]) -> None:
        try:
            await self._write(batch)
        except JournalFull as error:
            self._refuse_disk_full(batch, error)
        except Exception as error:  # part of the batch may be on the disk: only a recovery can say which
            self._give_up(batch, error)

    def _next_batch(self) -> list[Submitted]:
        batch: list[Submitted] = []
        if len(self._queue) <= BATCH and self._bytes <= BATCH_BYTES:  # the usual case, without a loop over records
            batch += self._queue
            self._queue.clear()
            self._bytes = 0
            return batch
        size = 0
        while self._queue and len(batch) < BATCH and size < BATCH_BYTES:
            batch.append(self._queue.popleft())
            size += len(batch[-1][0].body)
        self._bytes -= size
        return batch

    async def _write(self, batch: list[Submitted]) -> None:
        if self.failed is not None:
            raise self.failed
        if self._store.snapshot_due:
            await self._snapshot()
        begun = time.perf_counter()
        await self._in_thread(self._store.write, [each for each, _, _ in batch])
        self.full = False
        self._durable += batch
        self._all_applied.clear()
        self._has_durable.set()
        _call(self._on_write, time.perf_counter() - begun, len(batch))

    def _refuse_disk_full(self, batch: list[Submitted], error: JournalFull) -> None:
        if not self.full:  # one line in the log, not one per batch
            log.error("%s", error)
        self.full = True
        self._refuse(batch, busy("disk-full", "the server's disk is full; nothing was taken", 5.0))

    # -- into the federation ----------------------------------------------------------------------------------------

    async def _apply_all(self) -> None:
        while True:
            await self._has_durable.wait()
            self._has_durable.clear()
            while self._durable:
                try:
                    self._apply_some(min(APPLY_AT_ONCE, len(self._durable)))
                except Exception as error:
                    self._give_up([], error)
                    self._refuse(self._durable, _must_restart())
                    self._durable.clear()
                # Lets the event loop read requests, and lets the tasks run whose futures were just set: a pull that got
                # no job must wait again before `on_applied` gives the free places to the pulls that wait.
                await asyncio.sleep(0)
                _call(self._on_applied)
            self._all_applied.set()

    def _apply_some(self, count: int) -> None:
        """Applies records, then writes the trace, then calls back: one kind of work at a time, and the trace first."""
        if self.failed is not None:
            raise self.failed
        results: list[tuple[OnResult, Any, Refused | None]] = []
        apply = self._store.applying.apply
        try:
            for _ in range(count):
                (_, body, _), head, done = self._durable.popleft()
                try:
                    results.append((done, apply(head, body), None))
                except Refused as why:
                    results.append((done, None, why))
                except BaseException:
                    results.append((done, None, _must_restart()))
                    raise
        finally:
            # Before the answers: an acknowledged update that the journal loses later must be in the trace, which is
            # the proof of the loss.
            self._store.write_trace()
            for done, result, refused in results:
                try:
                    done(result, refused)
                except Exception:
                    _log_failed_callback()

    def _refuse(self, batch: Iterable[Submitted], refusal: Refused) -> None:
        for _, _, done in batch:
            _call(done, None, refusal)

    def _give_up(self, batch: Iterable[Submitted], error: Exception) -> None:
        """Takes no record any more, because memory and journal may differ; the next start recovers from the journal."""
        if self.failed is None:
            log.error("%s", error, exc_info=None if isinstance(error, AflockError) else error)
            self.failed = error
        self._refuse(batch, _must_restart())

    # -- snapshots --------------------------------------------------------------------------------------------------

    async def _snapshot(self) -> None:
        """Saves the whole state; no record is written or applied meanwhile, but the event loop reads requests."""
        await self._all_applied.wait()  # the state must be that of the last record in the journal
        try:
            await self._in_thread(self._store.snapshot)
        except (OSError, JournalError) as error:
            log.error("the snapshot could not be written: %s; the journal holds everything since the last one", error)
        finally:
            self._thread.submit(self._delete_old)  # not awaited: the next batch need only wait for the snapshot

    def _delete_old(self) -> None:
        try:
            self._store.delete_old()
        except (OSError, JournalError) as error:
            log.error("old snapshots and segments could not be deleted: %s; the next snapshot tries again", error)
        except Exception:
            log.exception("old snapshots and segments could not be deleted")

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def close(self) -> None:
        """Takes no more records, writes and applies the queued ones, and saves a snapshot."""
        self._closing = True
        self._has_queued.set()
        await self._writer
        await self._all_applied.wait()
        self._applier.cancel()
        if self.failed is None:
            await self._snapshot()
        self._thread.shutdown()


def _call(callback: Callable[..., None], *arguments: Any) -> None:
    """Calls back; an error in one callback must not keep the others from being called."""
    try:
        callback(*arguments)
    except Exception:
        _log_failed_callback()


def _log_failed_callback() -> None:
    log.exception("the callback for a record that was applied or refused has failed")


def _must_restart() -> Refused:
    return busy("stopping", "the server has failed and takes no updates; it must be started again", 10.0)


def update_record(
    now: float, name: str, job: int, head: UpdateHead, more: bool, norms: list[float]
) -> tuple[RecordHead, bytes]:
    """The head of an update's record, as a mapping and encoded.

    It is written by hand because every update needs one, and this is several times as fast as `encoded`; both must give
    the same text. The record holds the norms of the update's vectors because a replay on another machine could compute
    other last bits, and then decide otherwise (federation/guard.py).
    """
    version, steps, examples, vectors, encoding = head
    names, following = '","'.join(vectors), int(more)  # JSON needs no escapes for the names of clients and vectors
    text = (
        f'{{"k":"update","t":{moment(now)},"name":"{name}","j":{job},"v":{version},"s":{steps},"e":{examples},'
        f'"n":["{names}"],"enc":"{encoding}","next":{following},"norm":[{",".join(map(repr, norms))}]}}'
    )
    record = {
        "k": "update", "t": now, "name": name, "j": job, "v": version, "s": steps, "e": examples,
        "n": vectors, "enc": encoding, "next": following, "norm": norms,
    }  # fmt: skip
    return record, text.encode()
