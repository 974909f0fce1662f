"""One run of a client: jobs are pulled, trained on and pushed until there is a reason to end.

    pull -> train, in the other thread -> hold on disk -> push -> settle; the answer to a push may be the next job
              heartbeats meanwhile

A stop ends it at the next step: the open job is given back, an update that is on its way is awaited. What was refused
as void costs the job and nothing else. A client whom the server does not know (any more) joins again, on the terms it
then finds: the federation may have let it go, or another one may have taken its place.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from ..errors import AflockError
from ..memory import counted
from ..types import Vector
from .answers import Answer, Hello, Pulled
from .keep import Keep, Parcel
from .membership import Membership
from .refusals import Refused
from .terms import Cancelled, Limits, Prepare, Progress, Summary, Why
from .transport import Session, jittered
from .trouble import Nonsense, Unavailable, is_end, is_stranger, is_void
from .updates import as_sent, wanted
from .worker import Worker, quiet

log = logging.getLogger("aflock.client")

T = TypeVar("T")

PULL_SECONDS = 30.0
"""How long the server may keep a pull that it has no job for."""
GRACE = 2.0
"""Seconds a stop waits for a pull, and for a job to be given back."""
MOST_REJOINS = 3
"""How often a client joins again in a row, without an update that was taken in between."""


class Run:
    """From the first hello to the end; everything here but the training happens in the event loop."""

    def __init__(self, session: Session, prepare: Prepare, opened: Callable[[Hello], Keep], limits: Limits) -> None:
        self._session, self._prepare, self._opened, self._limits = session, prepare, opened, limits
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._worker = Worker(self._loop)
        self._stopping = asyncio.Event()
        self._stopped = self._loop.create_task(self._stopping.wait())
        self._cancelled = threading.Event()
        self._member: Membership | None = None
        self._open: int | None = None
        """The job to give back if the run ends now."""
        self._rejoins = 0
        """How often it has joined again since an update was taken."""
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
            if self._member is not None:
                self._member.close()
        log.info("the run is over (%s): %s, version %d", why, counted(self._jobs, "job"), self._version)
        return Summary(why, self._jobs, self._version, self._last)

    async def _work(self) -> Why:
        try:
            member = await self._begin()
            pulled: Pulled | None = None
            while not self._stopping.is_set():
                if pulled is not None:
                    pulled = await self._job(member, pulled)
                elif member.keep.pending is not None:
                    pulled = await self._settle(member)
                elif self._limits.reached(self._jobs):
                    return "jobs"
                else:
                    pulled = await self._pull(member)
        except Refused as refusal:
            if not is_end(refusal):
                raise
            log.info("%s", refusal)
            return "ended"
        except Unavailable:
            if not self._stopping.is_set():
                raise
        return "stopped"

    async def _begin(self) -> Membership:
        hello = await self._session.hello()
        self._greeted(hello)
        try:
            self._member = Membership(hello, self._opened, lambda hello: self._prepare(hello, self._cancelled))
        except Exception:
            if hello.number is None:  # nothing has begun yet, and nobody is to wait for this one
                self._session.hurry()
                with suppress(AflockError):
                    await self._session.leave()
            raise
        return self._member

    def _greeted(self, hello: Hello) -> None:
        self._version = hello.version
        if hello.number is None:
            waits = "%s takes part in federation %s, which waits for more clients: %s, version %d"
            log.info(waits, hello.name, hello.federation, hello.strategy, hello.version)
            return
        log.info(
            "%s is client %s of federation %s, which is %s: %s, version %d", hello.name, hello.number, hello.federation,
            hello.state, hello.strategy, hello.version,
        )  # fmt: skip

    async def _pull(self, member: Membership) -> Pulled | None:
        """A job; None if there is none yet, or a stop came first."""
        begun = self._loop.time()
        try:
            pulled = await self._unless_stopped(self._session.pull(PULL_SECONDS))
        except Refused as refusal:
            if not is_stranger(refusal):
                raise
            await self._rejoin(member, refusal)
            return None
        if pulled is not None:
            self._open = pulled.id
            return await self._unless_changed(member, pulled)
        if self._loop.time() - begun < 1.0:  # a server that does not let us wait is not asked again at once
            await asyncio.wait({self._stopped}, timeout=jittered(1.0))
        return None

    async def _unless_changed(self, member: Membership, pulled: Pulled) -> Pulled | None:
        """The job; None if a hello on the way to it came from another federation, and it is given back."""
        before, hello = member.hello, self._session.federation
        if hello.federation != before.federation:
            await self._give_back()
        member.follow(hello)
        return pulled if hello.federation == before.federation else None

    async def _rejoin(self, member: Membership, refusal: Refused) -> None:
        """The server does not know the client: it joins again and begins as a new one, on the terms of that hello."""
        self._rejoins += 1
        if self._rejoins > MOST_REJOINS:
            text = f"joined again {MOST_REJOINS} times in a row, and no update was taken ({refusal})"
            raise Refused(refusal.status, refusal.code, f"{text}; ask whoever runs the federation")
        log.warning("the server does not know this client (any more); it joins again and begins anew")
        before, hello = member.hello, await self._session.hello()
        if hello.federation == before.federation:
            member.keep.forget()
        else:
            log.warning("federation %s has taken the place of %s", hello.federation, before.federation)
        self._greeted(hello)
        member.follow(hello)

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

    async def _job(self, member: Membership, pulled: Pulled) -> Pulled | None:
        """Trains and pushes; the next job, if the answer brought one."""
        begun, self._open, self._last = self._loop.time(), pulled.id, pulled.job.model
        if not await self._trained(member, pulled):
            member.keep.drop()
            return None
        assert member.keep.pending is not None
        parcel, self._open = member.keep.pending, None  # from here on the server may have it: it cannot be given back
        last = self._limits.reached(self._jobs + 1) or self._stopping.is_set()
        answer = await self._push(member, next=not last)
        if answer is None:
            return None
        self._jobs += 1
        self._tell(pulled, parcel, answer, self._loop.time() - begun)
        return answer.next

    async def _trained(self, member: Membership, pulled: Pulled) -> bool:
        """Works on a job in the other thread; false if it is void, or a stop came."""
        work = quiet(self._worker.submit(lambda: self._train(member, pulled)))
        beat = quiet(self._loop.create_task(self._heartbeats(pulled.id)))
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
        _lament(pulled.id, work.exception())
        if not self._stopping.is_set():
            self._cancelled.clear()
            beat.result()
        return False

    def _train(self, member: Membership, pulled: Pulled) -> bool:
        """What is done in the other thread: training, and writing down what came of it."""
        job = pulled.job
        if not np.isfinite(job.model).all():
            raise Nonsense(f"the model of version {job.version} is not finite; the federation's training has diverged")
        done = member.train(job, pulled.number, member.keep.memory, float(pulled.delay))
        if self._cancelled.is_set():
            return False
        parcel = pulled.pack(wanted(done, job, member.hello), int(done.steps), self._limits.examples)
        member.keep.hold(parcel, as_sent(done, parcel))
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
                if not (is_void(refusal) or is_end(refusal) or is_stranger(refusal)):
                    raise
                log.warning("job %d is void: %s", job, refusal)
                self._open = None
                return

    async def _settle(self, member: Membership) -> Pulled | None:
        """Sends what an earlier run could not see taken; the job that the answer brings."""
        answer = await self._push(member, next=not self._limits.reached(self._jobs))
        return None if answer is None else answer.next

    async def _push(self, member: Membership, *, next: bool) -> Answer | None:
        """Sends the update that is held and settles it; None if it is void."""
        keep, parcel = member.keep, member.keep.pending
        assert parcel is not None
        try:
            answer = await self._session.push(parcel, next=next)
        except Refused as refusal:
            if refusal.status == 401 or refusal.code in ("revoked", "suspended"):
                raise  # with a new token it may still be taken
            if is_stranger(refusal):
                await self._rejoin(member, refusal)
                return None
            keep.drop()
            if is_void(refusal):
                log.warning("the update for job %d is void: %s", parcel.job, refusal)
                return None
            raise
        self._rejoins = 0
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


def _lament(job: int, error: BaseException | None) -> None:
    """An error of training that comes too late to end the run is told all the same."""
    if error is not None and not isinstance(error, Cancelled):
        log.error("training failed on job %d, which nobody waited for any more", job, exc_info=error)
