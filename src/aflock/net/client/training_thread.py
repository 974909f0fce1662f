"""A thread for work that takes long, so that the event loop can go on with its own."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound="asyncio.Future[Any]")


class Worker:
    """The thread that trains; a daemon, so that the second Ctrl-C need not wait for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="aflock training", daemon=True).start()

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """What the call returns, once it has."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        """The thread ends with the call it is in."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            result: Any = None
            error: BaseException | None = None
            try:
                result = call()
            except StopIteration as raised:  # no future takes it
                error = RuntimeError("training raised StopIteration")
                error.__cause__ = raised
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(_deliver, future, result, error)


def _deliver(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def quiet(future: F) -> F:
    """If it fails and nobody asks any more, nobody is told."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
