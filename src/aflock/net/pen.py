"""The hand that writes the journal: a thread that never asks for the interpreter's lock.

One that runs Python waits for that lock after every call of the system, for as long as the loop is at work: several
milliseconds for a write that takes one. This one is compiled. What it is to write, and whether that is on the disk, are
numbers in memory; two counters of the kernel (eventfd) say that there are new ones.

What could not be written, it only says so: the same is then written once more in the ordinary way (journal.py), which
can tell why. What could not be synced is another thing: nobody knows what is on such a disk.
"""

from __future__ import annotations

import asyncio
import errno
import os
from ctypes import addressof, c_char
from struct import pack_into
from threading import Thread
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from ..compiled import compiled
from .logs import log
from .segment import IOV_MAX, Buffer, Writing

Numbers = npt.NDArray[np.int64]

types: Any = numba.types
carray: Any = numba.carray  # type: ignore[attr-defined]

_INT, _LONG = types.int32, types.int64
_read: Any = types.ExternalFunction("read", _LONG(_INT, _LONG, _LONG))
_write: Any = types.ExternalFunction("write", _LONG(_INT, _LONG, _LONG))
_pwritev: Any = types.ExternalFunction("pwritev", _LONG(_INT, _LONG, _INT, _LONG))
_fdatasync: Any = types.ExternalFunction("fdatasync", _INT(_INT))
_posix_fadvise: Any = types.ExternalFunction("posix_fadvise", _INT(_INT, _LONG, _LONG, _INT))
_error: Any = types.ExternalFunction("__errno_location", types.CPointer(_INT)())

_WORD = 8  # bytes of a counter, an address and a length
_DONTNEED = 4
_DESCRIPTOR, _PIECES, _COUNT, _PLACE, _BYTES, _KEPT, _LET_GO, _DONE, _FAILURE = range(9)
"""What an order says; the last two are the answer: whether it is on the disk, and why it could not be synced."""
_NO_FILE = -1
_INTERRUPTED = errno.EINTR
_POSSIBLE = hasattr(os, "eventfd") and not getattr(numba.config, "DISABLE_JIT", 0)


@compiled()
def _sync(order: Numbers, file: np.int32) -> None:
    while _fdatasync(file) != 0:
        order[_FAILURE] = carray(_error(), 1)[0]
        if order[_FAILURE] != _INTERRUPTED:
            return
    order[_DONE], order[_FAILURE] = 1, 0
    if order[_LET_GO] > 0:
        _posix_fadvise(file, order[_KEPT], order[_LET_GO], np.int32(_DONTNEED))


@compiled()
def _serve(order: Numbers, go: int, done: int) -> None:
    """Carries out one order after the other, until one has no file."""
    word = np.ones(1, np.int64)
    while True:
        while _read(np.int32(go), word.ctypes.data, _WORD) != _WORD:
            if carray(_error(), 1)[0] != _INTERRUPTED:
                return
        if order[_DESCRIPTOR] == _NO_FILE:
            return
        file = np.int32(order[_DESCRIPTOR])
        if _pwritev(file, order[_PIECES], np.int32(order[_COUNT]), order[_PLACE]) == order[_BYTES]:
            _sync(order, file)
        word[0] = 1
        _write(np.int32(done), word.ctypes.data, _WORD)


class Pen:
    """Writes for one loop, one order at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._order, self._pieces = np.zeros(_FAILURE + 1, np.int64), bytearray(IOV_MAX * 2 * _WORD)
        self._order[_PIECES] = _address(self._pieces)
        self._go, self._done = _counters()
        self._held: Any = None
        """Memory that is being written."""
        self._answer: asyncio.Future[bool] | None = None
        self._ended = False
        self._loop.add_reader(self._done, self._answered)
        self._thread = Thread(target=self._run, name="pen", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            _serve(self._order, self._go, self._done)
        except Exception:
            log.exception("the thread that writes the journal has ended; it is written in the ordinary way")
        finally:
            self._ended = True
            os.eventfd_write(self._done, 1)  # whoever waits hears of it

    async def write(self, writing: Writing) -> bool:
        """Whether all of it is on the disk; OSError if nobody knows."""
        if self._ended:
            return False
        self._lay_out(writing)
        order = self._order
        order[_DONE] = order[_FAILURE] = 0
        order[_DESCRIPTOR], order[_COUNT], order[_PLACE] = writing.descriptor, 2 * len(writing.heads), writing.place
        order[_BYTES], order[_KEPT], order[_LET_GO] = writing.end - writing.place, writing.kept, writing.let_go
        self._answer = self._loop.create_future()
        os.eventfd_write(self._go, 1)
        return await self._answer

    def _lay_out(self, writing: Writing) -> None:
        """A head, its body, the next head ..."""
        heads = bytearray().join(writing.heads)
        place, pieces = _address(heads), list[int]()
        for head, body in zip(writing.heads, writing.bodies, strict=True):
            pieces += (place, len(head), _address(body), len(body))
            place += len(head)
        pack_into(f"{len(pieces)}q", self._pieces, 0, *pieces)
        self._held = heads, writing.bodies

    def _answered(self) -> None:
        os.eventfd_read(self._done)
        answer, self._answer, self._held = self._answer, None, None
        if answer is None or answer.done():
            return
        failure = int(self._order[_FAILURE])
        if failure:
            answer.set_exception(OSError(failure, os.strerror(failure)))
        else:
            answer.set_result(bool(self._order[_DONE]))

    def close(self) -> None:
        """Lets the thread end, after what it is at."""
        self._order[_DESCRIPTOR] = _NO_FILE
        os.eventfd_write(self._go, 1)
        self._thread.join()
        self._loop.remove_reader(self._done)
        os.close(self._go)
        os.close(self._done)


def _address(body: Buffer) -> int:
    """Where it is in memory."""
    if not len(body):
        return 0
    try:
        return addressof(c_char.from_buffer(body))
    except TypeError:  # nobody may write to it
        return int(np.frombuffer(body, np.uint8).ctypes.data)


def _counters() -> tuple[int, int]:
    first = os.eventfd(0)
    try:
        return first, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    except OSError:
        os.close(first)
        raise


def pen() -> Pen | None:
    """One, on systems that can have it."""
    try:
        return Pen() if _POSSIBLE else None
    except OSError as error:
        log.warning("the journal is written in the ordinary way, which is slower: %s", error)
        return None


def warm() -> None:
    """Loads what is compiled from disk, or compiles it."""
    if _POSSIBLE:
        go = os.eventfd(1)
        _serve(np.full(_FAILURE + 1, _NO_FILE, np.int64), go, go)
        os.close(go)
