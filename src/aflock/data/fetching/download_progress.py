"""How far a download is: one bar on a terminal, a plain line now and then elsewhere, nothing when asked."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Advance = Callable[[int], None]
"""Takes the number of bytes that have come since it was last called."""

_SECONDS_BETWEEN_LINES = 5.0


class DownloadProgress:
    """Speaks to the terminal, or to `out`."""

    def __init__(self, *, quiet: bool = False, out: TextIO | None = None) -> None:
        self._quiet = quiet
        self._out = sys.stderr if out is None else out

    def say(self, text: str) -> None:
        """One line."""
        if not self._quiet:
            print(text, file=self._out, flush=True)

    @contextmanager
    def watch(self, what: str, done: int, total: int | None) -> Iterator[Advance]:
        """Shows how many bytes of `total` (if it is known) have come; `done` are there already."""
        if self._quiet:
            yield lambda more: None
        elif self._out.isatty():
            with self._bar(what, done, total) as advance:
                yield advance
        else:
            yield self._lines(what, done, total)

    def _lines(self, what: str, done: int, total: int | None) -> Advance:
        spoke = time.monotonic()

        def advance(more: int) -> None:
            nonlocal done, spoke
            done += more
            if time.monotonic() - spoke >= _SECONDS_BETWEEN_LINES:
                spoke = time.monotonic()
                self.say(f"{what}: {done / 1e6:.1f}{f' of {total / 1e6:.1f}' if total else ''} MB")

        return advance

    @contextmanager
    def _bar(self, what: str, done: int, total: int | None) -> Iterator[Advance]:
        from rich.console import Console  # imported here: nobody else should wait for it
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(file=self._out), transient=True) as bar:
            task = bar.add_task(what, total=total, completed=done)
            yield lambda more: bar.advance(task, more)
