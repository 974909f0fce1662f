"""A federation's trace.jsonl: one line per event. Lines wait in memory while the disk is full; none is lost.

All lines are made from the journal. `TraceComparison` compares the two at a start, from the last snapshot on:
`TraceFile` then writes the lines that a crash has torn or that were never written. A line is written only after its
record is on the disk, so a line in the file that is not in the journal is something acknowledged that is lost: an
arrival is an update, any other line a join, a leave, a pull or the like.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...events import Event, trace_text

log = logging.getLogger("aflock.server")


_Line = tuple[str, float, int | None, int | None]
"""Kind, time, client and job of a line. Not its words: another version of aflock may have chosen others."""


class TraceComparison:
    """Compares the lines of the file from an offset on with the events that the journal causes; changes nothing.

    It reads the file while the caller applies the journal, and keeps in memory only what differs.
    """

    def __init__(self, file: Path, begin: int) -> None:
        self._file = open(file, "rb") if file.is_file() else None  # noqa: SIM115  # closed by `close`
        size = os.fstat(self._file.fileno()).st_size if self._file else 0
        if size < begin:
            log.warning(
                "trace.jsonl is shorter than at the last snapshot: lines are lost; new ones follow the last line"
            )
        self.equal_bytes = min(begin, size)
        """The beginning of the file, in bytes, that agrees with the journal; everything behind it is written anew."""
        if self._file:
            self._file.seek(self.equal_bytes)
        self._is_equal = True
        """Whether all lines so far were equal."""
        self.lines = bytearray()
        """The lines, made from the journal, to write behind the equal beginning."""
        self._only_in_file: dict[int, int] = {}
        """Arrivals behind the equal beginning that the journal has not caused yet: job -> client."""
        self._others: Counter[_Line] = Counter()
        """All other lines behind the equal beginning: how many more of them are in the file than in the journal."""
        self._only_in_journal: set[int] = set()
        """The jobs of arrivals in the journal whose lines have not been read yet."""
        self.next_job = 0
        """Greater than every job in the lines behind the equal beginning."""
        self._not_json = 0

    def compare(self, events: Iterable[Event]) -> None:
        """Compares the next events of the journal with the next lines of the file."""
        for event in events:
            line, text = self._line(), event.text().encode()
            if self._is_equal and line == text:
                self.equal_bytes += len(text)
                continue
            self._is_equal = False
            self.lines += text
            self._note(line)
            if event.kind == "arrival" and event.job is not None:
                was_read = self._only_in_file.pop(event.job, None) is not None
                if line and not was_read:  # without a line the file has ended: no line can follow for this job
                    self._only_in_journal.add(event.job)
            else:
                self._others[event.kind, event.time, event.client, event.job] -= 1

    def missing(self) -> dict[int, int]:
        """The arrivals that are only in the file, after all events were compared: job -> client."""
        while line := self._line():
            self._note(line)
        if self._not_json:
            log.warning("trace.jsonl is damaged: %d lines are not JSON; they are written again", self._not_json)
        return self._only_in_file

    def missing_others(self) -> Counter[str]:
        """What else is only in the file, by kind; call `missing` first."""
        found: Counter[str] = Counter()
        for (kind, *_), count in self._others.items():
            if count > 0:
                found[kind] += count
        return found

    def close(self) -> None:
        """Closes the file."""
        if self._file:
            self._file.close()

    def _line(self) -> bytes:
        """The next whole line; b"" at the end of the file, and for a last line that a crash has torn."""
        line = self._file.readline() if self._file else b""
        return line if line.endswith(b"\n") else b""

    def _note(self, line: bytes) -> None:
        """Remembers the job of a line that differs from the journal, and its arrival if the journal lacks it so far."""
        if not line:
            return
        try:
            fields: dict[str, Any] = json.loads(line)
            kind, client, job = fields["kind"], fields.get("client"), fields.get("job")
            if kind != "arrival":
                self._others[kind, fields["time"], client, job] += 1
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # a damaged line proves no loss
            self._not_json += 1
            return
        if type(job) is not int:
            return
        self.next_job = max(self.next_job, job + 1)
        if kind == "arrival" and type(client) is int and job not in self._only_in_journal:
            self._only_in_file[job] = client


class TraceFile:
    """The trace of a running server."""

    def __init__(self, file: Path, length: int, lines: bytearray, events: list[Event]) -> None:
        """Cuts the file off at `length` bytes; `lines` follow, then the lines of what the caller puts into `events`."""
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
        self.end = length
        """The length of the file in bytes."""
        os.ftruncate(self._descriptor, length)
        self._events = events
        self._waiting = lines
        """Lines that are not in the file yet."""
        self._full = False
        """Whether the last write failed."""

    def flush(self) -> None:
        """Writes the lines, without a sync; if that fails, they wait for the next call: the journal has them, too."""
        try:
            self._write()
        except OSError as error:
            if not self._full:  # one line in the log, not one per flush
                log.warning("trace.jsonl cannot be written: %s; its lines wait in memory", error.strerror)
            self._full = True

    def sync(self) -> None:
        """Writes all lines and makes them durable; raises if that fails."""
        self._write()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Writes the lines that can be written, and closes the file."""
        self.flush()
        os.close(self._descriptor)

    def _write(self) -> None:
        self._waiting += trace_text(self._events).encode()
        self._events.clear()
        while self._waiting:
            written = os.pwrite(self._descriptor, self._waiting, self.end)
            self.end += written
            del self._waiting[:written]
        self._full = False
