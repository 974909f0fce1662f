"""Group commit: requests hand in records; one write makes all that are waiting durable; then they happen, in order.

While a batch is on its way to the disk (in a thread of its own) the next one gathers. A record's sender is told what
came of it after the record is on disk and has been applied, never before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import AflockError
from .federation import Head
from .journal import JournalError, JournalFull
from .refusals import Refused, busy
from .store import Store, encoded
from .wire import Buffer

log = logging.getLogger("aflock.server")

Waiting = tuple[Head, Buffer, asyncio.Future[Any]]

BATCH = 512
"""Most records of one write."""


class Commits:
    """The one way into a store."""

    def __init__(self, store: Store, *, waiting: int, on_batch: Callable[[float, int], None]) -> None:
        """`waiting` bytes may be on their way; `on_batch` is told how long each write took and how many it held."""
        self._store, self._limit, self._on_batch = store, waiting, on_batch
        self._queue: deque[Waiting] = deque()
        self._bytes = 0
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "journal")
        self._closing = False
        self.full = False
        """Whether the last write found the disk full."""
        self.failed: Exception | None = None
        """Why nothing can be written any more, if so; a new start goes by what the journal says."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def submit(self, kind: str, body: Buffer = b"", **head: Any) -> Any:
        """What came of a record, once it is durable; Refused if it was not written, or means nothing by now."""
        if self._closing or self.failed is not None:
            raise busy("stopping", "the server is stopping; try again")
        if self._bytes + len(body) > self._limit:
            raise busy("busy", "too many updates are on their way; try again")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.append(({"k": kind, "t": self._store.now(), **head}, body, future))
        self._bytes += len(body)
        self._wake.set()
        return await future

    async def _run(self) -> None:
        while not self._closing or self._queue:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
                try:
                    await self._commit(batch)
                except JournalFull as error:
                    self._refuse_for_now(batch, error)
                except Exception as error:  # nobody but the journal knows any more what is true
                    self._give_up(batch, error)

    async def _commit(self, batch: list[Waiting]) -> None:
        begun = time.perf_counter()
        try:
            await self._write(batch)
        finally:
            self._bytes -= sum(len(body) for _, body, _ in batch)
        self.full = False
        for head, body, future in batch:
            self._settle(future, head, body)
        self._store.settle()
        await asyncio.sleep(0)  # the senders first: whoever got nothing waits by the time others are woken
        self._on_batch(time.perf_counter() - begun, len(batch))
        if self._store.snapshot_due:
            await self.snapshot()

    async def _write(self, batch: list[Waiting]) -> None:
        if self.failed is not None:
            raise self.failed
        await self._in_thread(self._store.write, [(encoded(head), body) for head, body, _ in batch])

    def _settle(self, future: asyncio.Future[Any], head: Head, body: Buffer) -> None:
        try:
            result = self._store.apply(head, body)
        except Refused as refusal:
            if not future.done():
                future.set_exception(refusal)
        else:
            if not future.done():
                future.set_result(result)

    def _refuse_for_now(self, batch: list[Waiting], error: JournalFull) -> None:
        if not self.full:
            log.error("%s", error)
        self.full = True
        _refuse(batch, busy("disk-full", "the server's disk is full; nothing was taken", 5.0))

    def _give_up(self, batch: list[Waiting], error: Exception) -> None:
        """Takes nothing any more: a new start will find what is true in the journal."""
        if self.failed is None:
            log.error("%s", error, exc_info=None if isinstance(error, AflockError) else error)
            self.failed = error
        _refuse(batch, busy("stopping", "the server cannot go on; it must be started again", 10.0))

    async def snapshot(self) -> None:
        """Saves everything; nothing happens meanwhile, but requests are still read."""
        try:
            await self._in_thread(self._store.snapshot)
        except (OSError, JournalError) as error:
            log.error("no snapshot could be made: %s; the journal goes on", error)

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def close(self) -> None:
        """Lets what was handed in happen, takes nothing more, and saves everything."""
        self._closing = True
        self._wake.set()
        await self._task
        if self.failed is None:
            await self.snapshot()
        self._thread.shutdown()


def _refuse(batch: list[Waiting], refusal: Refused) -> None:
    for _, _, future in batch:
        if not future.done():
            future.set_exception(refusal)
