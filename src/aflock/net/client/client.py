"""A client of a federation: pulls a job, trains, pushes what came of it, and again.

    aflock.Client("https://host:8443", "alice.token").run(model, batches)

    run          trains a torch module, or an aflock model, on batches of one's own
    run_with     hands every job to a function of one's own

Training has a thread of its own; beside it the event loop tells the server that the job is being worked on. The model
goes out of this process in updates only, and an update is on disk before it is on its way (`keep.py`): a client that
was killed, or whose server was, goes on where it was, and both agree on what was taken.

The first Ctrl-C gives the open job back and returns; the second one ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import InputError, ParameterError
from ..local import LocalRule, Steps
from . import members
from .answers import Answer, Hello, Pulled
from .feed import Batches
from .glance import status
from .keep import Keep, Occupied, Parcel
from .refusals import Refused
from .run import Run
from .terms import Limits, Prepare, Progress, Summary, Train
from .training import Buffers, Training
from .transport import Session
from .trouble import Nonsense, Unavailable, Untrusted
from .updates import as_sent
from .urls import address, pem_text

__all__ = [
    "Answer", "Client", "Hello", "Nonsense", "Occupied", "Parcel", "Progress", "Pulled", "Refused", "Session",
    "Summary", "Train", "Unavailable", "Untrusted", "as_sent", "status",
]  # fmt: skip

log = logging.getLogger("aflock.client")

T = TypeVar("T")

_SECRET = re.compile(r"[A-Za-z0-9_-]+")


class Client:
    """One member of one federation."""

    def __init__(
        self,
        url: str,
        token: str | Path,
        *,
        ca: str | Path | None = None,
        state_dir: str | Path | None = None,
        insecure: bool = False,
        timeout: float = 60.0,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        give_up: float | None = None,
        keep: bool = True,
    ) -> None:
        """A client of the server at `url`; nothing is sent before a run.

        token            the token itself, or the path of the token file of an invitation
        ca               whom to trust: PEM text or its path; None: what the token file says, else the system
        state_dir        where the client remembers; None: ~/.local/state/aflock/FEDERATION/NAME
        insecure         whether an http:// URL may lead to another machine
        timeout          seconds the server may be silent
        certificate, key the client's own, for servers that ask for one: paths
        give_up          seconds without an answer that end a run with an error; None: it waits for ever
        keep             False: nothing is written to disk; what a killed client knew is lost
        """
        address(url, insecure=insecure)
        secret, found = _token(token)
        self.url, self.name = url, secret.split(".")[1]
        self._connect = partial(
            Session,
            url,
            secret,
            ca=pem_text(ca) or found,
            certificate=certificate,
            key=key,
            insecure=insecure,
            timeout=timeout,
            give_up=give_up,
        )
        self._state_dir = None if state_dir is None else Path(state_dir)
        self._keeps = keep
        self._stop = threading.Event()
        self._run: Run | None = None

    def __repr__(self) -> str:
        return f"Client({self.url!r}, name={self.name!r})"

    def run(
        self,
        model: Any,
        batches: Batches,
        *,
        local: str | Mapping[str, Any] | LocalRule | None = None,
        steps: int | Callable[[], int] | Steps | None = None,
        examples: int | None = None,
        jobs: int | None = None,
        progress: Callable[[Progress], None] | None = None,
        loss: Callable[[Any, Any], Any] | None = None,
        buffers: Buffers = "refuse",
    ) -> Summary:
        """Takes part until the federation ends, `jobs` jobs are done, or `stop` is called.

        model            a torch nn.Module, or an aflock model; a module holds the last model pulled afterwards
        batches          pairs (x, y): something to iterate over again and again, or a function that gives an iterator
        local            the client's rule: its name, {"name": ..., parameters}, or itself; None: as the server advises
        steps            K: a number, a function that gives one for every job, or aflock.local.Epochs; None: as advised
        examples         how many there are; None: they are counted
        progress         called after every job
        loss, buffers    of a torch module: see aflock.models.torch_module
        """
        training = Training(model, batches, local=local, steps=steps, loss=loss, buffers=buffers)
        limits = Limits.checked(training.feed.examples if examples is None else examples, jobs, progress)
        with training.mode_put_back():
            summary = self._drive(lambda: self._go(training.prepare, limits))
        if summary.model is not None:
            training.leave_with(summary.model)
        return summary

    def run_with(
        self,
        train: Train,
        *,
        examples: int = 1,
        jobs: int | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Summary:
        """As `run`, with training of one's own; it is called in one other thread and must leave the memory as it is."""
        limits = Limits.checked(examples, jobs, progress)
        return self._drive(lambda: self._go(lambda hello, cancelled: train, limits))

    def stop(self) -> None:
        """Ends the run, or the next one: its open job is given back. From any thread."""
        self._stop.set()
        if (run := self._run) is not None:
            run.stop_from_elsewhere()

    def leave(self) -> None:
        """Leaves the federation for good; what the client remembers of it is removed."""
        self._drive(self._leave)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _drive(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs it here; in a notebook, which has an event loop of its own, in a thread."""
        if not _in_event_loop():
            return _completed(begin)
        with ThreadPoolExecutor(1) as thread:
            try:
                return thread.submit(_completed, begin).result()
            except KeyboardInterrupt:
                self.stop()
                raise

    async def _go(self, prepare: Prepare, limits: Limits) -> Summary:
        if self._run is not None:
            raise InputError("this client is running already; make another one, with a token of its own")
        async with self._connect() as session:
            run = self._run = Run(session, prepare, self._opened, limits)
            try:
                if self._stop.is_set():
                    run.stop()
                with _signals(run):
                    return await run.go()
            finally:
                self._run = None
                self._stop.clear()

    async def _leave(self) -> None:
        async with self._connect() as session:
            keep = self._opened(await session.hello())
            try:
                await session.leave()
                keep.forget()
            finally:
                keep.close()

    def _opened(self, hello: Hello) -> Keep:
        """What this client remembers of that federation."""
        if not self._keeps:
            return Keep(None, hello.federation)
        return Keep(self._state_dir or _state_home() / hello.federation / self.name, hello.federation)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _completed(begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
    try:
        return asyncio.run(begin())
    except asyncio.CancelledError:  # by the second Ctrl-C
        raise KeyboardInterrupt from None


def _token(token: str | Path) -> tuple[str, str | None]:
    """A token, and the authority that came with it; errors do not quote what may be one."""
    if isinstance(token, str) and token.strip().startswith("aflock1."):
        _, name, *secret = token.strip().split(".")
        if len(secret) != 1 or not _SECRET.fullmatch(secret[0]):
            raise ParameterError("this is no token; expected aflock1.<name>.<secret> as it was handed out")
        members.checked_name(name)
        return token.strip(), None
    file = Path(token)
    found = members.read_token_file(file)
    if found.exposed:
        log.warning("others on this machine may read %s; run chmod 600 on it", file)
    return found.token, found.ca


def _state_home() -> Path:
    given = os.environ.get("XDG_STATE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state") / "aflock"


@contextmanager
def _signals(run: Run) -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM stop the run; only the main thread may touch signals."""
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield
        return
    loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, run.interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            if handler is not None:
                signal.signal(number, handler)
