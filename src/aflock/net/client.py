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
import queue
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from .. import local as rules
from ..errors import AflockError, CountError, InputError, MissingVector, ParameterError, StateError, VectorError
from ..local import LocalRule, Memory, Steps, Task, Trained
from ..models.base import Model
from ..types import Job, Outcome, Vector
from . import members, wire
from .keep import Keep, Occupied, Parcel
from .refusals import Refused
from .transport import (
    Answer,
    Hello,
    Nonsense,
    Pulled,
    Session,
    Unavailable,
    Untrusted,
    address,
    is_end,
    is_void,
    jittered,
    pem_text,
    status,
)

__all__ = [
    "Answer", "Client", "Hello", "Nonsense", "Occupied", "Parcel", "Progress", "Pulled", "Refused", "Session",
    "Summary", "Unavailable", "Untrusted", "status",
]  # fmt: skip

log = logging.getLogger("aflock.client")

T = TypeVar("T")
Train = Callable[[Job, int, Memory, float], Trained]
"""(job, how many the client had before, what it remembers, staleness of its last update) -> what came of it."""

Batch = tuple[Any, Any]
Batches = Iterable[Batch] | Callable[[], Iterator[Batch]]

PULL_SECONDS = 30.0
"""How long the server may keep a pull that it has no job for."""
GRACE = 2.0
"""Seconds a stop waits for a pull, and for a job to be given back."""
MOST_COUNTED = 100_000
"""Batches of a function that are counted before it counts as endless."""

_STRANGER = "not-a-member"
_SECRET = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Progress:
    """One more job is done: what became of it, and how long it took from pull to receipt."""

    jobs: int
    job: int
    version: int
    server: int
    staleness: int
    outcome: Outcome
    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended: the federation has `ended`, the `jobs` asked for are done, or it was `stopped`."""

    why: Literal["ended", "jobs", "stopped"]
    jobs: int
    version: int
    model: Vector | None
    """The last model that was pulled."""


@dataclass(frozen=True)
class _Limits:
    """What a run is asked for."""

    examples: int
    jobs: int | None
    progress: Callable[[Progress], None] | None


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
        self._token, found = _token(token)
        self.url, self.name = url, self._token.split(".")[1]
        self._options: dict[str, Any] = {
            "ca": pem_text(ca) or found,
            "certificate": certificate,
            "key": key,
            "insecure": insecure,
            "timeout": timeout,
            "give_up": give_up,
        }
        self._state_dir = None if state_dir is None else Path(state_dir)
        self._keeps = keep
        self._stop = threading.Event()
        self._run: _Run | None = None

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
        buffers: Literal["refuse", "local", "average"] = "refuse",
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
        feed, made = _Feed(batches), list[Model]()
        limits = _limits(feed.examples if examples is None else examples, jobs, progress)

        def prepare(hello: Hello, cancelled: threading.Event) -> Train:
            rule = _rule(local, hello)
            made.append(_model(model, rule, loss, buffers))
            _check_fit(made[0], rule, hello)
            return _Trainer(made[0], rule, feed, _steps(steps, hello, feed.count), hello, cancelled)

        with _mode_put_back(model):
            summary = self._drive(lambda: self._go(prepare, limits))
        if summary.model is not None and made[0].weights is not None:
            np.copyto(made[0].weights, summary.model)
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
        limits = _limits(examples, jobs, progress)
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
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return _completed(begin)
        with ThreadPoolExecutor(1) as thread:
            try:
                return thread.submit(_completed, begin).result()
            except KeyboardInterrupt:
                self.stop()
                raise

    async def _go(self, prepare: Callable[[Hello, threading.Event], Train], limits: _Limits) -> Summary:
        if self._run is not None:
            raise InputError("this client is running already; make another one, with a token of its own")
        async with Session(self.url, self._token, **self._options) as session:
            run = self._run = _Run(session, prepare, self._opened, limits)
            try:
                if self._stop.is_set():
                    run.stop()
                with _signals(run):
                    return await run.go()
            finally:
                self._run = None
                self._stop.clear()

    async def _leave(self) -> None:
        async with Session(self.url, self._token, **self._options) as session:
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


def _limits(examples: int, jobs: int | None, progress: Callable[[Progress], None] | None) -> _Limits:
    if isinstance(examples, bool) or not isinstance(examples, int | np.integer) or examples < 1:
        raise CountError(f"examples is {examples!r}; expected an integer of at least 1")
    if jobs is not None and (isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 0):
        raise CountError(f"jobs is {jobs!r}; expected an integer of at least 0, or None")
    return _Limits(int(examples), jobs, progress)


# --- one run ---------------------------------------------------------------------------------------------------------


class _Run:
    """From the first hello to the end; everything here but the training happens in the event loop."""

    def __init__(
        self,
        session: Session,
        prepare: Callable[[Hello, threading.Event], Train],
        opened: Callable[[Hello], Keep],
        limits: _Limits,
    ) -> None:
        self._session, self._prepare, self._opened, self._limits = session, prepare, opened, limits
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._worker = _Worker(self._loop)
        self._stopping = asyncio.Event()
        self._stopped = self._loop.create_task(self._stopping.wait())
        self._cancelled = threading.Event()
        self._keep: Keep | None = None
        self._open: int | None = None
        """The job to give back if the run ends now."""
        self._rejoined = False
        """Whether it has no job since it joined again: once is enough."""
        self._jobs = self._version = 0
        self._last: Vector | None = None

    # -- from outside -----------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """The current request is the last one."""
        self._stopping.set()
        self._cancelled.set()
        self._session.hurry()

    def stop_from_elsewhere(self) -> None:
        """`stop`, from another thread."""
        with suppress(RuntimeError):  # the loop is closed: there is nothing to stop any more
            self._loop.call_soon_threadsafe(self.stop)

    def interrupt(self) -> None:
        """A Ctrl-C: the first stops, the second does not wait for anything."""
        if not self._stopping.is_set():
            log.info("stopping; once more to end at once")
            self.stop()
        elif self._task is not None:
            self._task.cancel()

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def go(self) -> Summary:
        """Works until there is a reason to end."""
        try:
            why = await self._work()
            await self._give_back()
        except Exception:  # the server's, the disk's, or that of code which is not ours: training, batches, progress
            await self._give_back()
            raise
        finally:
            self._stopped.cancel()
            self._cancelled.set()
            self._worker.close()
            if self._keep is not None:
                self._keep.close()
        log.info("the run is over (%s): %d jobs, version %d", why, self._jobs, self._version)
        return Summary(why, self._jobs, self._version, self._last)

    async def _work(self) -> Literal["ended", "jobs", "stopped"]:
        try:
            keep, train = await self._begin()
            pulled = await self._settle(keep) if keep.pending is not None else None
            while not self._stopping.is_set():
                if self._limits.jobs is not None and self._jobs >= self._limits.jobs:
                    return "jobs"
                pulled = pulled or await self._pull(keep)
                if pulled is not None and not self._stopping.is_set():
                    pulled = await self._job(keep, train, pulled)
        except Refused as refusal:
            if not is_end(refusal):
                raise
            log.info("%s", refusal)
            return "ended"
        except Unavailable:
            if not self._stopping.is_set():
                raise
        return "stopped"

    async def _begin(self) -> tuple[Keep, Train]:
        hello = await self._session.hello()
        self._version = hello.version
        log.info(
            "%s is client %s of federation %s, which is %s: %s, version %d", hello.name, hello.number, hello.federation,
            hello.state, hello.strategy, hello.version,
        )  # fmt: skip
        self._keep = self._opened(hello)
        return self._keep, self._prepare(hello, self._cancelled)

    async def _pull(self, keep: Keep) -> Pulled | None:
        """A job; None if there is none yet, or a stop came first."""
        begun = self._loop.time()
        try:
            pulled = await self._unless_stopped(self._session.pull(PULL_SECONDS))
        except Refused as refusal:
            if refusal.code != _STRANGER or self._rejoined:
                raise
            await self._rejoin(keep)
            return None
        if pulled is not None:
            self._open, self._rejoined = pulled.id, False
        elif self._loop.time() - begun < 1.0:  # a server that does not let us wait is not asked again at once
            await asyncio.wait({self._stopped}, timeout=jittered(1.0))
        return pulled

    async def _rejoin(self, keep: Keep) -> None:
        """The server has let the client go: what it remembers is of no use, and it begins as a new one."""
        before = self._session.federation.federation
        log.warning("the federation no longer knows this client; it joins again and begins anew")
        if (await self._session.hello()).federation != before:
            raise StateError("another federation has taken the place of this one; start the client again")
        keep.forget()
        self._rejoined = True

    async def _unless_stopped(self, request: Coroutine[Any, Any, T]) -> T | None:
        """The answer; None if a stop came and the answer not soon after."""
        task = self._loop.create_task(request)
        try:
            await asyncio.wait({task, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=GRACE)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            await asyncio.wait({task})

    # -- one job ----------------------------------------------------------------------------------------------------

    async def _job(self, keep: Keep, train: Train, pulled: Pulled) -> Pulled | None:
        """Trains and pushes; the next job, if the answer brought one."""
        begun, self._open, self._last = self._loop.time(), pulled.id, pulled.job.model
        if not await self._trained(keep, train, pulled):
            keep.drop()
            return None
        assert keep.pending is not None
        parcel, self._open = keep.pending, None  # from here on the server may have it: it cannot be given back
        last = self._limits.jobs is not None and self._jobs + 1 >= self._limits.jobs
        answer = await self._push(keep, next=not last and not self._stopping.is_set())
        if answer is None:
            return None
        self._jobs += 1
        self._tell(pulled, parcel, answer, self._loop.time() - begun)
        return answer.next

    async def _trained(self, keep: Keep, train: Train, pulled: Pulled) -> bool:
        """Works on a job in the other thread; false if it is void, or a stop came."""
        work = _quiet(self._worker.submit(lambda: self._train(keep, train, pulled)))
        beat = _quiet(self._loop.create_task(self._heartbeats(pulled.id)))
        awaited: list[asyncio.Future[Any]] = [work, beat, self._stopped]
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            beat.cancel()
        if work.done() and not self._stopping.is_set():
            return work.result()
        self._cancelled.set()
        await self._give_back()
        await asyncio.wait([work])  # nobody needs what comes of it, but it works with the model
        if not self._stopping.is_set():
            self._cancelled.clear()
            beat.result()
        return False

    def _train(self, keep: Keep, train: Train, pulled: Pulled) -> bool:
        """What is done in the other thread: training, and writing down what came of it."""
        job = pulled.job
        if not np.isfinite(job.model).all():
            raise Nonsense(f"the model of version {job.version} is not finite; the federation's training has diverged")
        done = train(job, pulled.number, keep.memory, float(pulled.delay))
        if self._cancelled.is_set():
            return False
        parcel = pulled.pack(_wanted(done, job, self._session.federation), int(done.steps), self._limits.examples)
        keep.hold(parcel, as_sent(done, parcel))
        return True

    async def _heartbeats(self, job: int) -> None:
        """Keeps the lease alive; returns when the job is void."""
        pause = self._session.federation.lease / 3
        while True:
            await asyncio.sleep(pause)
            try:
                pause = await self._session.heartbeat(job, patient=False) / 3
            except Unavailable as trouble:
                log.info("no heartbeat for job %d: %s", job, trouble)
                pause = self._session.federation.lease / 12
            except Refused as refusal:
                if not (is_void(refusal) or is_end(refusal) or refusal.code == _STRANGER):
                    raise
                log.warning("job %d is void: %s", job, refusal)
                self._open = None
                return

    async def _settle(self, keep: Keep) -> Pulled | None:
        """Sends what an earlier run could not see taken; the job that the answer brings."""
        answer = await self._push(keep, next=self._limits.jobs != 0)
        return None if answer is None else answer.next

    async def _push(self, keep: Keep, *, next: bool) -> Answer | None:
        """Sends the update that is held and settles it; None if it is void."""
        parcel = keep.pending
        assert parcel is not None
        try:
            answer = await self._session.push(parcel, next=next)
        except Refused as refusal:
            if refusal.status == 401 or refusal.code in ("revoked", "suspended"):
                raise  # with a new token it may still be taken
            keep.drop()
            if is_void(refusal):
                log.warning("the update for job %d is void: %s", parcel.job, refusal)
                return None
            if refusal.code == _STRANGER:
                await self._rejoin(keep)
                return None
            raise
        if answer.receipt.rejected:
            keep.drop()
        else:
            keep.take()
        self._version = answer.version
        self._open = None if answer.next is None else answer.next.id
        return answer

    def _tell(self, pulled: Pulled, parcel: Parcel, answer: Answer, seconds: float) -> None:
        receipt = answer.receipt
        log.info(
            "job %d of version %d: %s, staleness %d, version %d now%s", pulled.id, pulled.job.version, receipt.outcome,
            receipt.staleness, answer.version, f" ({receipt.reason})" if receipt.reason else "",
        )  # fmt: skip
        if self._limits.progress is not None:
            self._limits.progress(
                Progress(
                    self._jobs,
                    pulled.id,
                    pulled.job.version,
                    answer.version,
                    receipt.staleness,
                    receipt.outcome,
                    parcel.steps,
                    seconds,
                )
            )

    async def _give_back(self) -> None:
        """Declines the open job, if that can be done soon."""
        job, self._open = self._open, None
        if job is None:
            return
        try:
            async with asyncio.timeout(GRACE):
                await self._session.decline(job, patient=False)
            log.info("job %d is given back", job)
        except (AflockError, TimeoutError) as error:
            log.info("job %d could not be given back (%s); its lease will run out", job, error or "no answer")


def _wanted(done: Trained, job: Job, hello: Hello) -> dict[str, Vector]:
    """The vectors the server asks for, and no others: it would refuse them."""
    names = ("gradient",) if job.first else hello.needs
    for name in names:
        if name not in done.vectors:
            raise MissingVector(f"training gave no vector {name!r}; {hello.strategy} needs {', '.join(names)}")
        if np.shape(done.vectors[name]) != (hello.length,):
            shape = np.shape(done.vectors[name])
            raise VectorError(f"training gave a {name} of shape {shape}; expected ({hello.length},)")
    return {name: done.vectors[name] for name in names}


def as_sent(done: Trained, parcel: Parcel) -> dict[str, npt.NDArray[Any]]:
    """What the client may remember: where the encoding rounds, it has told the server the rounded vector.

    What is remembered of a vector is either the vector or a sum of it; in both cases it is off by what was rounded.
    """
    memory = dict(done.memory)
    if parcel.encoding == "float32":
        return memory
    for name, sent in parcel.vectors.items():
        vector = done.vectors[name]
        rounded = wire.decode(sent, parcel.encoding, vector.size) - vector
        for kept in (name, f"told {name}"):
            if kept in memory:
                memory[kept] = memory[kept] + rounded
    return memory


class _Worker:
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
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(_deliver, future, result, error)


F = TypeVar("F", bound="asyncio.Future[Any]")


def _quiet(future: F) -> F:
    """If it fails and nobody asks any more, nobody is told."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _deliver(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


@contextmanager
def _signals(run: _Run) -> Iterator[None]:
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


# --- training --------------------------------------------------------------------------------------------------------


class _Cancelled(Exception):
    """Nobody waits for this job any more."""


class _Trainer:
    """What `run` does with a job: K steps of the rule on the client's own batches."""

    def __init__(
        self,
        model: Model,
        rule: LocalRule,
        feed: _Feed,
        steps: Callable[[], int],
        hello: Hello,
        cancelled: threading.Event,
    ) -> None:
        self._model, self._rule, self._batches, self._steps = model, rule, feed.endless(), steps
        self._needs, self._changes, self._cancelled = hello.needs, hello.changes, cancelled
        self._scratch: Vector = np.empty(model.length, np.float32)
        room = np.empty_like(self._scratch) if model.weights is None else model.weights
        delta = np.empty_like(self._scratch)
        descend = None if model.weights is None else self._descend  # others trust what they are given
        self._task = Task(self._gradient, feed.count, None, descend, room, delta)
        self._buffers = model.get_buffers()

    def __call__(self, job: Job, number: int, memory: Memory, delay: float) -> Trained:
        model = self._model
        if model.buffers:
            model.set_buffers(memory.get("buffers", self._buffers))
        try:
            done = self._rule.train(
                job, self._task, self._steps(), needs=self._needs, changes=self._changes, memory=memory, delay=delay
            )
        except MissingVector as error:
            if memory or any(name not in job.extras for name in self._rule.extras):
                raise
            raise StateError(
                f"what this client remembered of the federation is gone ({error}); "
                "put its state_dir back, or call leave() and begin anew"
            ) from None
        if model.buffers:
            done.memory["buffers"] = model.get_buffers()
        return done

    def _gradient(self, x: Vector, k: int) -> Vector:
        inputs, targets = self._batch()
        self._model.gradient(x, inputs, targets, self._scratch)
        return self._scratch

    def _descend(self, x: Vector, k: int, rate: float) -> None:
        inputs, targets = self._batch()
        self._model.descend(x, inputs, targets, rate, self._scratch)

    def _batch(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        if self._cancelled.is_set():
            raise _Cancelled
        return next(self._batches)


class _Feed:
    """Batches without end, as arrays, from something that can be iterated over again and again."""

    def __init__(self, batches: Batches) -> None:
        if callable(batches):
            self._begin: Callable[[], Iterator[Batch]] = batches
        elif isinstance(batches, Iterable) and iter(batches) is not batches:
            self._begin = batches.__iter__
        else:
            raise ParameterError(
                f"batches is a {type(batches).__name__}; expected a list or loader of pairs (x, y) that can be gone "
                "through again and again, or a function that returns an iterator"
            )
        self._batches: Any = batches
        self._counted: tuple[int, int] | None = None

    @property
    def examples(self) -> int:
        """How many examples there are."""
        with suppress(AttributeError, TypeError):  # no loader, or one of a stream
            return len(self._batches.dataset)
        return self._count()[1]

    @property
    def count(self) -> int:
        """How many batches make an epoch; 1 where only counting them could tell."""
        with suppress(TypeError):  # it has no length, or (a loader of a stream) cannot tell
            return max(1, len(self._batches))
        return 1 if self._counted is None else self._counted[0]

    def endless(self) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """One epoch after the other."""
        while True:
            empty = True
            for batch in self._begin():
                empty = False
                yield _arrays(batch)
            if empty:
                raise ParameterError("batches gives no batch; expected at least one pair (x, y)")

    def _count(self) -> tuple[int, int]:
        if self._counted is None:
            batches = examples = 0
            for x, _ in map(_pair, self._begin()):
                batches, examples = batches + 1, examples + len(x)
                if batches > MOST_COUNTED:
                    raise ParameterError("batches does not end; say how many examples there are with examples=")
            self._counted = batches, examples
        return self._counted


def _pair(batch: Any) -> Batch:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ParameterError(f"a batch is a {type(batch).__name__}; expected a pair (x, y)")
    return batch[0], batch[1]


def _arrays(batch: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    x, y = _pair(batch)
    return _array(x), _array(y)


def _array(values: Any) -> npt.NDArray[Any]:
    """A torch tensor's own memory, if it lies where NumPy can see it."""
    return np.asarray(values.detach().cpu().numpy() if hasattr(values, "detach") else values)


# --- what a run is made of -------------------------------------------------------------------------------------------


def _rule(local: str | Mapping[str, Any] | LocalRule | None, hello: Hello) -> LocalRule:
    """The client's rule; parameters that are not given are those the server advises for the same rule."""
    if isinstance(local, LocalRule):
        return local
    wanted = {"name": local} if isinstance(local, str) else dict(hello.local if local is None else local)
    if not isinstance(wanted.get("name"), str):
        raise ParameterError(f"local is {local!r}; expected a rule's name, or a dictionary with its name")
    full = dict(hello.local) | wanted if wanted["name"] == hello.local["name"] else wanted
    return rules.create(full.pop("name"), **full)


def _steps(steps: int | Callable[[], int] | Steps | None, hello: Hello, batches: int) -> Callable[[], int]:
    if steps is None:
        return lambda: hello.steps
    if isinstance(steps, int):
        fixed = rules.Fixed(steps)
        return lambda: fixed.steps
    if callable(steps):
        return steps
    if not hasattr(steps, "draw"):
        raise ParameterError(f"steps is {steps!r}; expected a number, or a function that gives one")
    drawn = steps
    return lambda: drawn.draw(random.random(), batches)


def _is_module(model: Any) -> bool:
    torch = sys.modules.get("torch")  # whoever has a module has imported it
    return torch is not None and isinstance(model, torch.nn.Module)


def _model(model: Any, rule: LocalRule, loss: Any, buffers: Literal["refuse", "local", "average"]) -> Model:
    if isinstance(model, Model):
        if loss is not None:
            raise ParameterError("loss is for torch modules; this model has its own")
        return model
    if not _is_module(model):
        raise ParameterError(f"model is a {type(model).__name__}; expected a torch nn.Module or an aflock model")
    from ..models.torch_module import TorchModule

    rate = rule.eta_l if buffers == "average" else None
    return TorchModule(model, buffers=buffers, rate=rate, **({} if loss is None else {"loss": loss}))


def _check_fit(model: Model, rule: LocalRule, hello: Hello) -> None:
    """The model must be the federation's, and the rule one that gives what the server needs."""
    if model.length != hello.length:
        raise ParameterError(f"the model has {model.length} weights, the federation's {hello.length}; build the same")
    missing = [name for name in hello.needs if name not in rule.gives]
    if missing:
        raise ParameterError(f"{rule.name} sends no {missing[0]!r}, which {hello.strategy} needs; leave local out")
    rate = getattr(model, "rate", None)
    if rate is not None and not (rule.follows and rule.eta_l == rate):
        raise ParameterError(f"buffers 'average' need plain sgd with eta_l = {rate}; {rule.name} is another rule")


@contextmanager
def _mode_put_back(model: Any) -> Iterator[None]:
    """Training mode or not: a module is afterwards as it was before."""
    mode = model.training if _is_module(model) else None
    try:
        yield
    finally:
        if mode is not None:
            model.train(mode)
