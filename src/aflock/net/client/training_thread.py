"""The thread in which a run trains, so that the event loop can send heartbeats meanwhile."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound="asyncio.Future[Any]")


class TrainingThread:
    """One thread that makes calls in the order they are submitted.

    It is a daemon, so that the process can end at the second Ctrl-C without waiting for the call in it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="aflock training", daemon=True).start()

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Makes the call in the thread; the future gets its result or its error."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        """Ends the thread after the calls that were submitted; does not wait for them."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            result: Any = None
            error: BaseException | None = None
            try:
                result = call()
            except StopIteration as raised:  # a future refuses StopIteration as its exception
                error = RuntimeError("training raised StopIteration")
                error.__cause__ = raised
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed: the run has ended
                self._loop.call_soon_threadsafe(_deliver, future, result, error)


def _deliver(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def ignore_unretrieved(future: F) -> F:
    """Marks the future's exception as retrieved: asyncio logs no error if the run ends without looking at it."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
