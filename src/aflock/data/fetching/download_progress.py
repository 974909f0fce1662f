"""Shows the progress of a download: a bar on a terminal, a line every few seconds elsewhere, nothing if `quiet`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Advance = Callable[[int], None]
"""Takes the number of bytes received since the last call."""

_SECONDS_BETWEEN_LINES = 5.0


class DownloadProgress:
    """Writes to standard error, or to `out`."""

    def __init__(self, *, quiet: bool = False, out: TextIO | None = None) -> None:
        self._quiet = quiet
        self._out = sys.stderr if out is None else out

    def say(self, text: str) -> None:
        """Prints one line."""
        if not self._quiet:
            print(text, file=self._out, flush=True)

    @contextmanager
    def watch(self, what: str, done: int, total: int | None) -> Iterator[Advance]:
        """Shows how many bytes of `total` (None: not known) were received; `done` were there already."""
        if self._quiet:
            yield lambda more: None
        elif self._out.isatty():
            with self._bar(what, done, total) as advance:
                yield advance
        else:
            yield self._lines(what, done, total)

    def _lines(self, what: str, done: int, total: int | None) -> Advance:
        printed = time.monotonic()

        def advance(more: int) -> None:
            nonlocal done, printed
            done += more
            if time.monotonic() - printed >= _SECONDS_BETWEEN_LINES:
                printed = time.monotonic()
                self.say(f"{what}: {done / 1e6:.1f}{f' of {total / 1e6:.1f}' if total else ''} MB")

        return advance

    @contextmanager
    def _bar(self, what: str, done: int, total: int | None) -> Iterator[Advance]:
        from rich.console import Console  # imported here: it is slow, and only a terminal needs it
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(file=self._out), transient=True) as bar:
            task = bar.add_task(what, total=total, completed=done)
            yield lambda more: bar.advance(task, more)
