"""A federation's trace.jsonl: lines wait in memory until they are handed to the system, and a full disk loses none.

What stands in the file is made from the journal. A start cuts it back to where it was at a snapshot and writes the rest
again, so a line that a crash has torn, or that was never written, is whole afterwards.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ..events import Event

log = logging.getLogger("aflock.server")


class Trace:
    """The file, open for one server."""

    def __init__(self, file: Path, length: int, events: list[Event]) -> None:
        """Cuts the file back to so many bytes; the lines are those of the events that gather in the list."""
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
        self.end = min(length, os.fstat(self._descriptor).st_size)
        """How long the file is, up to the last line that was handed on."""
        if self.end < length:
            log.warning("trace.jsonl has lost lines that were in it at the last snapshot; it goes on with a gap")
        os.ftruncate(self._descriptor, self.end)
        self._events = events
        self._waiting = bytearray()
        self._full = False

    @property
    def waiting(self) -> int:
        """Bytes that the system has not taken yet."""
        return len(self._waiting)

    def flush(self) -> None:
        """Hands the lines to the system; what it does not take waits: the journal has it anyway."""
        try:
            self._hand_on()
        except OSError as error:
            if not self._full:
                log.warning("trace.jsonl cannot be written: %s", error.strerror)
            self._full = True

    def sync(self) -> None:
        """All lines are on the disk when it returns."""
        self._hand_on()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Hands on what can be."""
        self.flush()
        os.close(self._descriptor)

    def _hand_on(self) -> None:
        self._waiting += "".join([event.text() for event in self._events]).encode()
        self._events.clear()
        while self._waiting:
            written = os.pwrite(self._descriptor, self._waiting, self.end)
            self.end += written
            del self._waiting[:written]
        self._full = False
