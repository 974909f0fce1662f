"""`aflock.Client`: takes part in a federation as one member. It pulls a job, trains, pushes the update, and repeats.

    aflock.Client("https://host:8443", "alice.token").run(model, batches)

    run          trains a torch module, or an aflock model, on the user's batches
    run_with     calls a function of the user's for every job

Training runs in a thread of its own (`training_thread.py`), while the event loop sends heartbeats. Only updates leave
this process, never the data. An update is on disk before it is sent (`state.py`): a client that is killed, or whose
server is, continues where it was, and both agree on which updates were taken.

The first Ctrl-C gives the open job back and returns; the second one ends the run at once.
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

from ...errors import InputError, ParameterError
from ...local import LocalRule, Steps
from ..identity import members
from ..protocol.refusals import Refused
from ..protocol.urls import address, pem_text
from .answers import Answer, Hello, Pulled
from .batches import Batches
from .errors import ProtocolError, Unavailable, Untrusted
from .run import ClientRun
from .run_types import JobReport, Limits, Prepare, Summary, Train
from .session import Session
from .state import ClientState, EncodedUpdate, StateInUse
from .status import status
from .training import Buffers, Training

__all__ = [
    "Answer", "Client", "EncodedUpdate", "Hello", "JobReport", "ProtocolError", "Pulled", "Refused", "Session",
    "StateInUse", "Summary", "Train", "Unavailable", "Untrusted", "status",
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
        """Checks the arguments; nothing is sent before a run.

        token            the token itself, or the path of the token file of an invitation
        ca               the authority to trust: PEM text or its path; None: the token file's, else the system's
        state_dir        the folder of the client's state; None: ~/.local/state/aflock/FEDERATION/NAME
        insecure         whether the URL of another machine may be http://, which sends the token unencrypted
        timeout          seconds to wait for the server within one request
        certificate, key the client's own, for servers that ask for one (mTLS): paths
        give_up          seconds without an answer after which a run ends with an error; None: it tries for ever
        keep             False: the state is not written to disk; a killed client loses it
        """
        address(url, insecure=insecure)
        secret, found = _read_token(token)
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
        self._run: ClientRun | None = None

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
        progress: Callable[[JobReport], None] | None = None,
        loss: Callable[[Any, Any], Any] | None = None,
        buffers: Buffers = "refuse",
    ) -> Summary:
        """Takes part until the federation ends, `jobs` jobs are done, or another thread calls `stop`.

        model            a torch nn.Module, or an aflock model; afterwards a module holds the last model pulled
        batches          pairs (x, y): a list or loader that can be iterated over repeatedly, or a function that
                         returns an iterator
        local            the local rule: its name, {"name": ..., parameters}, or an object; None: as the server advises
        steps            K: a number, a function that returns one per job, or aflock.local.Epochs; None: as advised
        examples         how many examples the client has; None: the client counts them
        progress         called with a `JobReport` after every job
        loss, buffers    of a torch module: see aflock.models.torch_module
        """
        training = Training(model, batches, local=local, steps=steps, loss=loss, buffers=buffers)
        limits = Limits.checked(training.batches.examples if examples is None else examples, jobs, progress)
        with training.mode_restored():
            summary = self._run_coroutine(lambda: self._take_part(training.prepare, limits))
        if summary.model is not None:
            training.load_weights(summary.model)
        return summary

    def run_with(
        self,
        train: Train,
        *,
        examples: int = 1,
        jobs: int | None = None,
        progress: Callable[[JobReport], None] | None = None,
    ) -> Summary:
        """As `run`, with the user's own training function.

        The run calls `train` in its training thread; `train` must not change the memory it gets.
        """
        limits = Limits.checked(examples, jobs, progress)
        return self._run_coroutine(lambda: self._take_part(lambda hello, cancelled: train, limits))

    def stop(self) -> None:
        """Ends the run, or the next one if none is running; its open job is given back. Any thread may call it."""
        self._stop.set()
        if (run := self._run) is not None:
            run.stop_threadsafe()

    def leave(self) -> None:
        """Leaves the federation for good, and removes the client's state in it."""
        self._run_coroutine(self._leave)

    # -- private ----------------------------------------------------------------------------------------------------

    def _run_coroutine(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a coroutine to its end: in this thread, or in another if this one has an event loop (in a notebook)."""
        if not _in_event_loop():
            return _run_to_end(begin)
        with ThreadPoolExecutor(1) as thread:
            try:
                return thread.submit(_run_to_end, begin).result()
            except KeyboardInterrupt:
                self.stop()
                raise

    async def _take_part(self, prepare: Prepare, limits: Limits) -> Summary:
        if self._run is not None:
            raise InputError("this client is already running; make another Client, with a token of its own")
        async with self._connect() as session:
            run = self._run = ClientRun(session, prepare, self._open_state, limits)
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
            state = self._open_state(await session.hello())
            try:
                await session.leave()
                state.forget()
            finally:
                state.close()

    def _open_state(self, hello: Hello) -> ClientState:
        """This client's state in the federation of that hello."""
        if not self._keeps:
            return ClientState(None, hello.federation)
        return ClientState(self._state_dir or _state_home() / hello.federation / self.name, hello.federation)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_to_end(begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
    try:
        return asyncio.run(begin())
    except asyncio.CancelledError:  # the second Ctrl-C cancels the task
        raise KeyboardInterrupt from None


def _read_token(token: str | Path) -> tuple[str, str | None]:
    """The token, and the authority in its token file; errors do not quote text that may be a token."""
    if isinstance(token, str) and token.strip().startswith("aflock1."):
        _, name, *secret = token.strip().split(".")
        if len(secret) != 1 or not _SECRET.fullmatch(secret[0]):
            raise ParameterError("this is not a token; expected aflock1.<name>.<secret>, as `aflock invite` wrote it")
        members.checked_name(name)
        return token.strip(), None
    file = Path(token)
    found = members.read_token_file(file)
    if found.exposed:
        log.warning("other users of this machine may read %s; run chmod 600 on it", file)
    return found.token, found.ca


def _state_home() -> Path:
    given = os.environ.get("XDG_STATE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state") / "aflock"


@contextmanager
def _signals(run: ClientRun) -> Iterator[None]:
    """Within the block, Ctrl-C and SIGTERM stop the run; Python lets only the main thread handle signals."""
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
