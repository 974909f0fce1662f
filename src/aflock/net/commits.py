"""Group commit: requests hand in records; one write makes all that are waiting durable; then they happen, in order.

Two tasks share the work. One takes what has gathered and hands it to the disk, in a thread of its own; meanwhile the
next batch gathers. The other lets durable records happen, a few at a time, so that requests are read in between. A
record's sender is told what came of it after the record is on disk and has been applied, never before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import AflockError
from .federation import Head
from .journal import JournalFull
from .pen import Pen
from .refusals import Refused, busy
from .segment import Entry, JournalError, entry
from .store import Store, encoded
from .wire import Buffer

log = logging.getLogger("aflock.server")

Done = Callable[[Any, Refused | None], None]
"""Is told what came of a record, or why nothing did."""

Waiting = tuple[Entry, Head, Done]

BATCH, BATCH_BYTES = 512, 4 << 20
"""Most records of one write, and bytes after which there are no more: large ones would wait for each other."""

AT_ONCE = 16
"""Records that happen before others get a turn."""

TOLD = 256
"""Events after which the trace is handed on, though there is more to do."""


class Commits:
    """The one way into a store."""

    def __init__(
        self,
        store: Store,
        *,
        on_write: Callable[[float, int], None],
        on_settled: Callable[[], None],
        pen: Pen | None = None,
    ) -> None:
        """`on_write` is told how long each write took and how many it held; with a pen they wait less."""
        self._store, self._on_write, self._on_settled, self._pen = store, on_write, on_settled, pen
        self._queue: deque[Waiting] = deque()
        self._durable: deque[Waiting] = deque()
        self._bytes = 0
        """Of the bodies in the queue: what they are bounded by is the room for bodies (bodies.py)."""
        self._wake, self._ready, self._quiet = asyncio.Event(), asyncio.Event(), asyncio.Event()
        """There is something to write; to let happen; nothing to let happen."""
        self._quiet.set()
        self._thread = ThreadPoolExecutor(1, "journal")
        self._closing = False
        self.full = False
        """Whether the last write found the disk full."""
        self.failed: Exception | None = None
        """Why nothing can be written any more, if so; a new start goes by what the journal says."""
        loop = asyncio.get_running_loop()
        self._writer, self._settler = loop.create_task(self._write_all()), loop.create_task(self._settle_all())

    async def submit(self, kind: str, body: Buffer = b"", **head: Any) -> Any:
        """What came of a record, once it is durable; Refused if it was not written, or means nothing by now."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def done(result: Any, refusal: Refused | None) -> None:
            if not future.done():  # else whoever waited has been given up
                future.set_result(result) if refusal is None else future.set_exception(refusal)

        record = {"k": kind, "t": self._store.now(), **head}
        self.put(record, encoded(record), body, done)
        return await future

    def put(self, head: Head, text: bytes, body: Buffer, done: Done) -> None:
        """The same without waiting, of a record that is encoded already: `done` is told."""
        if self._closing or self.failed is not None:
            raise busy("stopping", "the server is stopping; try again")
        self._queue.append((entry(text, body), head, done))
        self._bytes += len(body)
        self._wake.set()

    def now(self) -> float:
        """The time a record is given."""
        return self._store.now()

    # -- to the disk ------------------------------------------------------------------------------------------------

    async def _write_all(self) -> None:
        while not self._closing or self._queue:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                await self._write_some(self._next_batch())  # no name here keeps it alive

    async def _write_some(self, batch: list[Waiting]) -> None:
        try:
            await self._write(batch)
        except JournalFull as error:
            self._refuse_for_now(batch, error)
        except Exception as error:  # nobody but the journal knows any more what is true
            self._give_up(batch, error)

    def _next_batch(self) -> list[Waiting]:
        batch: list[Waiting] = []
        if len(self._queue) <= BATCH and self._bytes <= BATCH_BYTES:  # as nearly always
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

    async def _write(self, batch: list[Waiting]) -> None:
        if self.failed is not None:
            raise self.failed
        if self._store.snapshot_due:
            await self._snapshot()
        begun = time.perf_counter()
        await self._to_disk([each for each, _, _ in batch])
        self.full = False
        self._durable += batch
        self._quiet.clear()
        self._ready.set()
        _tell(self._on_write, time.perf_counter() - begun, len(batch))

    async def _to_disk(self, entries: list[Entry]) -> None:
        if self._pen is None or not await self._with_pen(self._pen, entries):
            await self._in_thread(self._store.write, entries)

    async def _with_pen(self, pen: Pen, entries: list[Entry]) -> bool:
        """Whether it is done; what is not, the ordinary way has to do, or to say why it cannot."""
        writing = self._store.plan(entries)
        try:
            if writing is None or not await pen.write(writing):
                return False
        except OSError as error:
            raise self._store.journal.failed(error) from error
        self._store.wrote(writing)
        return True

    def _refuse_for_now(self, batch: list[Waiting], error: JournalFull) -> None:
        if not self.full:
            log.error("%s", error)
        self.full = True
        self._refuse(batch, busy("disk-full", "the server's disk is full; nothing was taken", 5.0))

    # -- into the federation ----------------------------------------------------------------------------------------

    async def _settle_all(self) -> None:
        while True:
            await self._ready.wait()
            self._ready.clear()
            while self._durable:
                try:
                    self._settle(min(AT_ONCE, len(self._durable)))
                except Exception as error:
                    self._give_up([], error)
                    self._refuse(self._durable, _cannot_go_on())
                    self._durable.clear()
                await asyncio.sleep(0)  # the senders first: whoever got nothing waits by the time others are woken
                _tell(self._on_settled)
            self._quiet.set()

    def _settle(self, count: int) -> None:
        """Lets some records happen, one after the other, and then tells their senders: one kind of work at a time."""
        if self.failed is not None:
            raise self.failed
        told: list[tuple[Done, Any, Refused | None]] = []
        apply = self._store.federation.apply
        try:
            for _ in range(count):
                (_, body, _), head, done = self._durable.popleft()
                try:
                    told.append((done, apply(head, body), None))
                except Refused as why:
                    told.append((done, None, why))
                except BaseException:
                    told.append((done, None, _cannot_go_on()))
                    raise
        finally:
            self._store.tell(TOLD if self._durable else 1)
            for done, result, refused in told:
                try:
                    done(result, refused)
                except Exception:
                    _untold()

    def _refuse(self, batch: Iterable[Waiting], refusal: Refused) -> None:
        for _, _, done in batch:
            _tell(done, None, refusal)

    def _give_up(self, batch: Iterable[Waiting], error: Exception) -> None:
        """Takes nothing any more: a new start will find what is true in the journal."""
        if self.failed is None:
            log.error("%s", error, exc_info=None if isinstance(error, AflockError) else error)
            self.failed = error
        self._refuse(batch, _cannot_go_on())

    # -- the whole --------------------------------------------------------------------------------------------------

    async def _snapshot(self) -> None:
        """Saves everything; nothing happens meanwhile, but requests are still read."""
        await self._quiet.wait()  # what has happened is what the journal says
        try:
            await self._in_thread(self._store.snapshot)
        except (OSError, JournalError) as error:
            log.error("no snapshot could be made: %s; the journal goes on", error)
        finally:
            self._thread.submit(self._tidy)  # deleting takes longer than saving, and nobody waits for it

    def _tidy(self) -> None:
        try:
            self._store.tidy()
        except (OSError, JournalError) as error:
            log.error("what is older than the snapshots could not be deleted: %s; the next one tries again", error)
        except Exception:
            log.exception("what is older than the snapshots could not be deleted")

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def close(self) -> None:
        """Lets what was handed in happen, takes nothing more, and saves everything."""
        self._closing = True
        self._wake.set()
        await self._writer
        await self._quiet.wait()
        self._settler.cancel()
        if self.failed is None:
            await self._snapshot()
        self._thread.shutdown()
        if self._pen is not None:
            self._pen.close()


def _tell(whom: Callable[..., None], *what: Any) -> None:
    """One who cannot be told must not keep others from being told."""
    try:
        whom(*what)
    except Exception:
        _untold()


def _untold() -> None:
    log.exception("somebody could not be told what came of a record")


def _cannot_go_on() -> Refused:
    return busy("stopping", "the server cannot go on; it must be started again", 10.0)
