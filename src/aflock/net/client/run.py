"""One run of a client: pulls jobs, trains on them and pushes the updates, until there is a reason to end.

    pull -> train (in the training thread) -> store the update on disk -> push -> accept or discard it
              heartbeats meanwhile                                       heartbeats, too, if it takes long

The answer to a push may bring the next job. `stop` ends the run at the next step: the open job is given back, and an
update that is being sent gets its answer first. A refusal that makes a job void costs that job and nothing else. A
client that the server does not know, or does not know any more, joins again with the settings of the new hello: the
federation may have dropped the client, or the server may serve another federation now. `client.py` starts the run.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from ...errors import AflockError
from ...system.words import counted
from ...types import Vector
from ..protocol.refusals import Refused
from .answers import Answer, Hello, Pulled
from .errors import ProtocolError, Unavailable, has_ended, is_unknown_client, is_void
from .membership import Membership
from .outgoing import memory_as_sent, requested_vectors
from .run_types import Cancelled, JobReport, Limits, Prepare, Summary, Why
from .session import Session, jittered
from .state import ClientState, EncodedUpdate
from .training_thread import TrainingThread, ignore_unretrieved

log = logging.getLogger("aflock.client")

T = TypeVar("T")

PULL_SECONDS = 30.0
"""How many seconds the server may hold a pull for which it has no job."""
STOP_GRACE = 2.0
"""Seconds that a stop waits for the answer to a pull, and to the request that gives a job back."""
MOST_REJOINS = 3
"""How often a client joins again before the server has taken an update; then the run ends with an error."""


class NotFinite(AflockError):
    """The result of training is not finite; the server would refuse it."""


class ClientRun:
    """From the first hello to the end; everything but the training happens in the event loop."""

    def __init__(
        self, session: Session, prepare: Prepare, open_state: Callable[[Hello], ClientState], limits: Limits
    ) -> None:
        self._session, self._prepare, self._open_state, self._limits = session, prepare, open_state, limits
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._thread = TrainingThread(self._loop)
        self._stopping = asyncio.Event()
        self._stopped = self._loop.create_task(self._stopping.wait())
        self._cancelled = threading.Event()
        self._member: Membership | None = None
        self._open: int | None = None
        """The number of the job to give back if the run ends now."""
        self._rejoins = 0
        """How often the client has joined again since the server last took an update."""
        self._jobs = self._version = 0
        self._last: Vector | None = None

    # -- from outside -----------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends the run after the current request."""
        self._stopping.set()
        self._cancelled.set()
        self._session.stop_retrying()

    def stop_threadsafe(self) -> None:
        """`stop`, for callers in other threads."""
        with suppress(RuntimeError):  # the loop is closed: the run has ended
            self._loop.call_soon_threadsafe(self.stop)

    def interrupt(self) -> None:
        """Handles a Ctrl-C: the first one stops the run, the second one cancels it."""
        if not self._stopping.is_set():
            log.info("stopping after the current request; press Ctrl-C again to end at once")
            self.stop()
        elif self._task is not None:
            self._task.cancel()

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def go(self) -> Summary:
        """Takes part until there is a reason to end."""
        try:
            why = await self._work()
            await self._give_back()
        except Exception:  # of the server, the disk or the user's code: training, batches, progress
            await self._give_back()
            raise
        finally:
            self._stopped.cancel()
            self._cancelled.set()
            self._thread.close()
            if self._member is not None:
                self._member.close()
        log.info("the run has ended (%s): %s, version %d", why, counted(self._jobs, "job"), self._version)
        return Summary(why, self._jobs, self._version, self._last)

    async def _work(self) -> Why:
        try:
            member = await self._join()
            pulled: Pulled | None = None
            while not self._stopping.is_set():
                if pulled is not None:
                    pulled = await self._do_job(member, pulled)
                elif member.state.pending is not None:
                    pulled = await self._push_pending(member)
                elif self._limits.reached(self._jobs):
                    return "jobs"
                else:
                    pulled = await self._pull(member)
        except Refused as refusal:
            if not has_ended(refusal):
                raise
            log.info("%s", refusal)
            return "ended"
        except Unavailable:
            if not self._stopping.is_set():
                raise
        return "stopped"

    async def _join(self) -> Membership:
        hello = await self._session.hello()
        self._log_hello(hello)
        try:
            self._member = Membership(hello, self._open_state, lambda hello: self._prepare(hello, self._cancelled))
        except Exception:
            if hello.number is None:  # the federation waits for clients, and must not wait for this one
                self._session.stop_retrying()
                with suppress(AflockError):
                    await self._session.leave()
            raise
        return self._member

    def _log_hello(self, hello: Hello) -> None:
        self._version = hello.version
        if hello.number is None:
            waiting = "%s takes part in federation %s, which waits for more clients: %s, version %d"
            log.info(waiting, hello.name, hello.federation, hello.strategy, hello.version)
            return
        log.info(
            "%s is client %s of federation %s, which is %s: %s, version %d", hello.name, hello.number, hello.federation,
            hello.state, hello.strategy, hello.version,
        )  # fmt: skip

    async def _pull(self, member: Membership) -> Pulled | None:
        """A job; None if there is none yet, if the run is stopping, or if the client had to join again."""
        begun = self._loop.time()
        try:
            pulled = await self._unless_stopped(self._session.pull(PULL_SECONDS))
        except Refused as refusal:
            if not is_unknown_client(refusal):
                raise
            await self._rejoin(member, refusal)
            return None
        if pulled is not None:
            self._open = pulled.id
            return await self._unless_federation_changed(member, pulled)
        if self._loop.time() - begun < 1.0:  # the server did not hold the pull: do not ask again at once
            await self._pause()
        return None

    async def _pause(self) -> None:
        """Waits for about a second, or until the run is stopped."""
        await asyncio.wait({self._stopped}, timeout=jittered(1.0))

    async def _unless_federation_changed(self, member: Membership, pulled: Pulled) -> Pulled | None:
        """The job; None if it came from another federation than before: the job is then given back.

        A client without a number says hello again when it gets its first job, so the hello may have changed here.
        """
        before, hello = member.hello, self._session.federation
        if hello.federation != before.federation:
            await self._give_back()
        member.follow(hello)
        return pulled if hello.federation == before.federation else None

    async def _rejoin(self, member: Membership, refusal: Refused) -> None:
        """Joins again, as a new client with the settings of the new hello: the server did not know this client."""
        self._rejoins += 1
        if self._rejoins > MOST_REJOINS:
            text = f"this client joined again {MOST_REJOINS} times in a row, and the server took no update ({refusal})"
            raise Refused(refusal.status, refusal.code, f"{text}; ask the operator of the federation")
        log.warning("the server does not know this client; the client joins again as a new one")
        before, hello = member.hello, await self._session.hello()
        if hello.federation == before.federation:
            member.state.forget()
        else:
            log.warning("the server now serves federation %s instead of %s", hello.federation, before.federation)
        self._log_hello(hello)
        member.follow(hello)

    async def _unless_stopped(self, request: Coroutine[Any, Any, T]) -> T | None:
        """The answer; None if the run was stopped and the answer did not come within `STOP_GRACE` seconds."""
        task = self._loop.create_task(request)
        try:
            await asyncio.wait({task, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=STOP_GRACE)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            await asyncio.wait({task})

    # -- one job ----------------------------------------------------------------------------------------------------

    async def _do_job(self, member: Membership, pulled: Pulled) -> Pulled | None:
        """Trains and pushes; returns the next job, if the answer brought one."""
        begun, self._open, self._last = self._loop.time(), pulled.id, pulled.job.model
        try:
            trained = await self._train_with_heartbeats(member, pulled)
        except NotFinite as error:
            log.warning("%s; the job is given back, and another one is pulled in about a second", error)
            await self._give_back()
            await self._pause()
            trained = False
        if not trained:
            member.state.discard_pending()
            return None
        assert member.state.pending is not None
        update, self._open = member.state.pending, None  # the server may get the update from here on
        last = self._limits.reached(self._jobs + 1) or self._stopping.is_set()
        answer = await self._push(member, next=not last)
        if answer is None:
            return None
        self._jobs += 1
        self._report(pulled, update, answer, self._loop.time() - begun)
        return answer.next

    async def _train_with_heartbeats(self, member: Membership, pulled: Pulled) -> bool:
        """Trains on a job in the training thread; false if the job became void or the run was stopped."""
        training = ignore_unretrieved(self._thread.submit(lambda: self._train_and_store(member, pulled)))
        lease = ignore_unretrieved(self._loop.create_task(self._keep_lease(pulled.id)))
        awaited: list[asyncio.Future[Any]] = [training, lease, self._stopped]
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            lease.cancel()
        if training.done() and not self._stopping.is_set():
            return training.result()
        self._cancelled.set()
        await self._give_back()
        await asyncio.wait([training])  # its result is not used, but it uses the user's model until it ends
        _log_late_error(pulled.id, training.exception())
        if not self._stopping.is_set():
            self._cancelled.clear()
            lease.result()  # raises the refusal that ended the heartbeats, if the client may not go on
        return False

    def _train_and_store(self, member: Membership, pulled: Pulled) -> bool:
        """Trains and stores the update on disk; called in the training thread; false if the run cancelled it."""
        job = pulled.job
        if not np.isfinite(job.model).all():
            raise ProtocolError(
                f"the model of version {job.version} is not finite; the federation's training has diverged"
            )
        trained = member.train(job, pulled.number, member.state.memory, float(pulled.delay))
        if self._cancelled.is_set():
            return False
        vectors = requested_vectors(trained, job, member.hello)
        if not all(np.isfinite(vector).all() for vector in vectors.values()):
            raise NotFinite(
                f"the update for job {pulled.id} is not finite: the model or the local training has diverged"
            )
        update = pulled.pack(vectors, int(trained.steps), self._limits.examples)
        member.state.store_pending(update, memory_as_sent(trained, update))
        return True

    async def _keep_lease(self, job: int) -> None:
        """Sends heartbeats; returns when the job is void, and raises any other refusal."""
        try:
            await self._send_heartbeats(job)
        except Refused as refusal:
            if not (is_void(refusal) or has_ended(refusal) or is_unknown_client(refusal)):
                raise
            log.warning("job %d is void: %s; its result is not sent", job, refusal)
            self._open = None

    async def _send_heartbeats(self, job: int) -> None:
        """Sends heartbeats, the first after a third of the lease, until one is refused."""
        pause = self._session.federation.lease / 3
        while True:
            await asyncio.sleep(pause)
            try:
                pause = await self._session.heartbeat(job, patient=False) / 3
            except Unavailable as error:
                log.info("a heartbeat for job %d got no answer: %s", job, error)
                pause = self._session.federation.lease / 12

    async def _push_pending(self, member: Membership) -> Pulled | None:
        """Sends the update that an earlier run got no answer for; returns the next job, if the answer brought one."""
        answer = await self._push(member, next=not self._limits.reached(self._jobs))
        return None if answer is None else answer.next

    async def _push(self, member: Membership, *, next: bool) -> Answer | None:
        """Sends the stored update and accepts or discards it by the answer; None if the update is void."""
        state, update = member.state, member.state.pending
        assert update is not None
        # The session has a second connection, so the heartbeats do not wait for the upload.
        heartbeats = ignore_unretrieved(self._loop.create_task(self._send_heartbeats(update.job)))
        try:
            answer = await self._session.push(update, next=next)
        except Refused as refusal:
            if refusal.status == 401 or refusal.code in ("revoked", "suspended"):
                raise  # the update stays on disk: with a new token the server may still take it
            if is_unknown_client(refusal):
                await self._rejoin(member, refusal)
                return None
            state.discard_pending()
            if is_void(refusal):
                log.warning("the update for job %d is void: %s", update.job, refusal)
                if refusal.status == 422:  # the next update may be refused as well: wait before the next pull
                    await self._pause()
                return None
            raise
        finally:
            heartbeats.cancel()  # a refused heartbeat is ignored: the answer to the push decides
        self._rejoins = 0
        if answer.receipt.rejected:
            state.discard_pending()
        else:
            state.accept_pending()
        self._version = answer.version
        self._open = None if answer.next is None else answer.next.id
        return answer

    def _report(self, pulled: Pulled, update: EncodedUpdate, answer: Answer, seconds: float) -> None:
        receipt = answer.receipt
        log.info(
            "job %d of version %d: %s, staleness %d, the server is at version %d%s", pulled.id, pulled.job.version,
            receipt.outcome, receipt.staleness, answer.version, f" ({receipt.reason})" if receipt.reason else "",
        )  # fmt: skip
        if self._limits.progress is not None:
            self._limits.progress(
                JobReport(
                    self._jobs,
                    pulled.id,
                    pulled.job.version,
                    answer.version,
                    receipt.staleness,
                    receipt.outcome,
                    update.steps,
                    seconds,
                )
            )

    async def _give_back(self) -> None:
        """Declines the open job, if the server answers within `STOP_GRACE` seconds."""
        job, self._open = self._open, None
        if job is None:
            return
        try:
            async with asyncio.timeout(STOP_GRACE):
                await self._session.decline(job, patient=False)
            log.info("job %d is given back", job)
        except (AflockError, TimeoutError) as error:
            log.info("job %d could not be given back (%s); its lease will run out", job, error or "no answer")


def _log_late_error(job: int, error: BaseException | None) -> None:
    """Logs an error of training on a job that was void or given back, which does not end the run."""
    if error is not None and not isinstance(error, Cancelled):
        log.error("training failed on job %d, whose result was no longer needed", job, exc_info=error)
