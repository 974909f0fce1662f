"""The hand that writes the journal: a thread that never asks for the interpreter's lock.

One that runs Python waits for that lock after every call of the system, for as long as the loop is at work: several
milliseconds for a write that takes one. This one is compiled. What it is to write, and whether that is on the disk, are
numbers in memory; two counters of the kernel (eventfd) say that there are new ones.

Whatever goes wrong, it only says so. The same is then written once more in the ordinary way (journal.py), which can
tell what it was. That holds for a sync that fails, too: the pages are written anew, and it is the second sync that
vouches for them.
"""

from __future__ import annotations

import asyncio
import os
from ctypes import addressof, c_char
from struct import pack_into
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from ..compiled import compiled
from .segment import IOV_MAX, Buffer, Writing

Numbers = npt.NDArray[np.int64]

_INT, _LONG = types.int32, types.int64
_read: Any = types.ExternalFunction("read", _LONG(_INT, _LONG, _LONG))
_write: Any = types.ExternalFunction("write", _LONG(_INT, _LONG, _LONG))
_pwritev: Any = types.ExternalFunction("pwritev", _LONG(_INT, _LONG, _INT, _LONG))
_fdatasync: Any = types.ExternalFunction("fdatasync", _INT(_INT))
_posix_fadvise: Any = types.ExternalFunction("posix_fadvise", _INT(_INT, _LONG, _LONG, _INT))

_WORD = 8  # bytes of a counter, an address and a length
_DONTNEED = 4
_DESCRIPTOR, _PIECES, _COUNT, _PLACE, _BYTES, _KEPT, _LET_GO, _DONE = range(8)
"""What an order says; the last is the answer."""
_NO_FILE = -1
_POSSIBLE = hasattr(os, "eventfd")


@compiled()
def _serve(order: Numbers, go: int, done: int) -> None:
    """Carries out one order after the other, until one has no file."""
    word = np.ones(1, np.int64)
    while True:
        if _read(np.int32(go), word.ctypes.data, _WORD) != _WORD:
            continue  # a signal
        if order[_DESCRIPTOR] == _NO_FILE:
            return
        file = np.int32(order[_DESCRIPTOR])
        order[_DONE] = 0
        written = _pwritev(file, order[_PIECES], np.int32(order[_COUNT]), order[_PLACE])
        if written == order[_BYTES] and _fdatasync(file) == 0:
            order[_DONE] = 1
            if order[_LET_GO] > 0:
                _posix_fadvise(file, order[_KEPT], order[_LET_GO], np.int32(_DONTNEED))
        word[0] = 1
        _write(np.int32(done), word.ctypes.data, _WORD)


class Pen:
    """Writes for one loop, one order at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._order, self._pieces = np.zeros(_DONE + 1, np.int64), bytearray(IOV_MAX * 2 * _WORD)
        self._order[_PIECES] = _address(self._pieces)
        self._go, self._done = os.eventfd(0), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._held: Any = None
        """Memory that is being written."""
        self._answer: asyncio.Future[bool] | None = None
        self._loop.add_reader(self._done, self._answered)
        self._thread = Thread(target=_serve, args=(self._order, self._go, self._done), name="pen", daemon=True)
        self._thread.start()

    async def write(self, writing: Writing) -> bool:
        """Whether all of it is on the disk."""
        self._lay_out(writing)
        order = self._order
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
        if answer is not None and not answer.done():
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


def pen() -> Pen | None:
    """One, on systems that can have it."""
    return Pen() if _POSSIBLE else None


def warm() -> None:
    """Loads what is compiled from disk, or compiles it."""
    if _POSSIBLE:
        go = os.eventfd(1)
        _serve(np.full(_DONE + 1, _NO_FILE, np.int64), go, go)
        os.close(go)
