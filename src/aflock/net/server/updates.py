"""What the server does with an update, from its head to its answer.

1. `begin` checks the head of the request: `App` calls it.
2. An `Upload` reserves memory for the body and receives the body into it (upload.py, bodies.py).
3. `_submit` checks the vectors and hands the update to the group commit, which writes its record to the journal.
4. `_settled` sends the answer after the record is on disk and was applied to the federation.

An update has no asyncio task of its own, to save the cost of one: the connection calls the methods of the `Upload`, and
the group commit calls `_settled`.

A client that got no answer sends its update again. Such a *resend* gets the receipt of the first one: at once if the
first one was applied, else when it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from functools import partial

from ..federation.federation import Federation, UpdateAnswer
from ..identity.members import Member
from ..protocol import wire
from ..protocol.refusals import Refused, busy, stopping, unknown_job
from ..protocol.wire import WireError
from ..storage.group_commit import GroupCommit
from .auth import Auth
from .bodies import Bodies
from .http.request import Request
from .http.response import Response
from .http.uptime import Uptime
from .leases import Leases
from .logs import fields, log
from .responses import Responses
from .upload import Upload
from .waiting_pulls import WaitingPulls

OnSettled = Callable[["UpdateAnswer | None", "Refused | None"], None]
"""Called with the answer to an update, or with the refusal."""


class Updates:
    """All updates that are being received or written, and what answers them."""

    def __init__(
        self,
        federation: Federation,
        commits: GroupCommit,
        leases: Leases,
        auth: Auth,
        clock: Uptime,
        waiting: WaitingPulls,
        *,
        memory: int,
        largest: int,
        refuse: Callable[[Request, Refused], None],
    ) -> None:
        """`memory`: bytes for bodies at a time; `largest`: bytes of the largest update; `refuse` refuses a request."""
        self._federation, self._commits, self._leases, self._auth = federation, commits, leases, auth
        self.clock, self.largest, self.refuse, self._waiting = clock, largest, refuse, waiting
        self.bodies = Bodies(memory)
        self.responses = Responses(federation, leases, self.bodies)
        self._uploads: defaultdict[str, list[Upload]] = defaultdict(list)
        """By client: the uploads whose bodies are arriving or wait for memory; at most two, the older one first."""
        self._complete: list[Upload] = []
        """The uploads whose bodies have arrived and that are not submitted yet."""
        self._being_written: dict[tuple[str, int], list[OnSettled]] = {}
        """By client and job: the updates that the group commit has and has not settled, with what answers resends."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Suspensions that are being written; the set keeps the tasks alive."""

    # -- the head ---------------------------------------------------------------------------------------------------

    def begin(self, request: Request, member: Member, job: int) -> None:
        """Checks the head of an update and begins its upload, or answers it if it is a resend."""
        if "content-length" not in request.headers:
            raise Refused(411, "length", "send a Content-Length")
        if request.length > self.largest:
            raise Refused(413, "too-large", f"an update may have at most {self.largest} bytes")
        if self._answers_resend(request, member.name, job):
            return
        try:
            self._begin_upload(request, member, job)
        except Exception as error:
            self._fail(request, member, as_refusal(error, f"an update of {member.name}"))

    def _begin_upload(self, request: Request, member: Member, job: int) -> None:
        """Refuses an update that its head shows to be of no use, before its body is read; else begins the upload."""
        client, head = self._federation.check_head(member.name, job, request.headers, request.length)
        upload = Upload(self, request, member, client, job, head, request.option("next") == "1")
        own = self._uploads[member.name]
        own.append(upload)
        if len(own) > 2:
            own[0].refuse(_superseded())
        upload.begin()
        if (upload.memory_wait is not None or len(own) > 1) and self.bodies.waiting:
            self._limit_to_one_each()

    def _limit_to_one_each(self) -> None:
        """Ends the older of two uploads of each client, because another upload waits for memory.

        A client begins a second upload when it believes the connection of the first to be dead. While no upload waits
        for memory it may have both: the server cannot know which of the two connections still works.
        """
        for own in [own for own in self._uploads.values() if len(own) > 1]:
            for older in own[:-1]:
                older.refuse(_superseded())

    def _answers_resend(self, request: Request, name: str, job: int) -> bool:
        """Answers an update that was applied before or is being written, now or later; false if it is a new one."""
        client, resends = self._federation.clients.get(name), self._being_written.get((name, job))
        if client is not None and client.answered == job:  # after the end of the federation, too
            self._answer_resend(request, name, UpdateAnswer(client.receipt, client.version), None)
        elif resends is not None:
            resends.append(partial(self._answer_resend, request, name))
        else:
            return False
        return True

    def _answer_resend(self, request: Request, name: str, answer: UpdateAnswer | None, refused: Refused | None) -> None:
        """Answers a resend with what answered the first one."""
        if answer is None:
            assert refused is not None
            self.refuse(request, refused)
        else:
            response = self.responses.to_update(name, answer, request.headers.get(wire.HAVE))
            send_after_body(request, partial(answer_request, request, response))

    # -- the body ---------------------------------------------------------------------------------------------------

    def upload_ended(self, upload: Upload) -> None:
        """The body of an upload is here, or will not arrive."""
        own = self._uploads[upload.member.name]
        if upload in own:
            own.remove(upload)

    def progress(self) -> tuple[int, int]:
        """Two numbers that change when any upload makes progress: reservations so far, and bytes that have arrived."""
        return self.bodies.reserved, sum(upload.received for own in self._uploads.values() for upload in own)

    def is_alive(self, name: str, job: int) -> bool:
        """Whether the client has sent bytes of the job's update since the last call, or has to wait for memory."""
        return any(upload.job == job and upload.is_alive() for upload in self._uploads.get(name, ()))

    def is_being_written(self, name: str, job: int) -> bool:
        """Whether the update for the job has arrived, and the group commit has not settled it."""
        return (name, job) in self._being_written or any(
            upload.job == job and upload.client.name == name for upload in self._complete
        )

    def stop(self) -> None:
        """Refuses the uploads that wait for memory, because the server stops."""
        for upload in [upload for own in self._uploads.values() for upload in own if upload.memory_wait is not None]:
            upload.refuse(stopping())

    # -- the record -------------------------------------------------------------------------------------------------

    def body_received(self, upload: Upload) -> None:
        """The whole update is here; it is submitted when the event loop has read from all sockets that are ready.

        All updates that have arrived by then are submitted one after the other. That takes a tenth less of the server's
        time than submitting each between two reads: the processor's caches then hold the code of one kind of work.
        """
        self.upload_ended(upload)
        if not self._complete:
            self.clock.loop.call_soon(self._submit_all)
        self._complete.append(upload)

    def _submit_all(self) -> None:
        """Submits or refuses the updates that have arrived whole, in the order of their last bytes."""
        complete, self._complete = self._complete, []
        for upload in complete:
            try:
                self._submit(upload)
            except Exception as error:
                upload.release()
                self._fail(upload.request, upload.member, as_refusal(error, f"an update of {upload.member.name}"))

    def _submit(self, upload: Upload) -> None:
        """Checks the vectors of an update and hands its record to the group commit."""
        client, job, head, body = upload.client, upload.job, upload.head, upload.body
        name = client.name
        norms = self._federation.check_vectors(client, head, body)
        # Much may have happened since the head was checked: the job was dropped, or the same update came twice at the
        # same time and the other one was faster.
        if not self._federation.holds(client, job) or (name, job) in self._being_written:
            if not self._answers_resend(upload.request, name, job):
                raise unknown_job()
            upload.release()
            return
        # Whether the client gets its next job with the answer is decided now and stands in the record: a replay has no
        # waiting clients to decide by.
        gets_next = upload.wants_next and self._waiting.may_have_next_job(name)
        self._commits.put_update(name, job, head, gets_next, norms, body, partial(self._settled, upload))
        self._being_written[name, job] = []
        self._leases.end(name)  # the job must not expire while the disk is slow

    def _settled(self, upload: Upload, answer: UpdateAnswer | None, refused: Refused | None) -> None:
        """The record was applied or refused: answers the update, and its resends."""
        request, member, client, job = upload.request, upload.member, upload.client, upload.job
        resends = self._being_written.pop((client.name, job))
        if refused is not None and self._federation.holds(client, job):  # the client keeps the job, and may try again
            self._leases.begin(client.name, job)
        upload.release()  # before the answer is sent, so that the next upload can begin
        if answer is not None:
            self._waiting.reported(client.name, given=answer.given is not None)
        for answer_resend in resends:  # without the next job: the client gets it once, with the first answer
            answer_resend(answer and UpdateAnswer(answer.receipt, answer.version), refused)
        if answer is None:
            assert refused is not None
            self._fail(request, member, refused)
            return
        self._auth.clear_strikes(member.name)
        request.about = (job, answer)
        answer_request(request, self.responses.to_update(member.name, answer, request.headers.get(wire.HAVE)))

    # -- refusals ---------------------------------------------------------------------------------------------------

    def _fail(self, request: Request, member: Member, refused: Refused) -> None:
        """Refuses an update; it may be a strike, and too many strikes in a row suspend the client."""
        if refused.code == "diverged":
            # The model has diverged, so the updates that were not finite were no fault of their clients.
            self._auth.clear_strikes(*self._federation.guard.not_finite)
        if refused.is_strike and self._auth.strike(member.name):
            # A suspension is a record of the journal and has to be waited for, which a callback cannot do: so a task.
            task = asyncio.get_running_loop().create_task(self._suspend(request, member, refused))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self.refuse(request, refused)

    async def _suspend(self, request: Request, member: Member, why: Refused) -> None:
        """Writes the suspension of a client to the journal, then refuses its last update."""
        name = member.name
        log.warning("%s is suspended: %s", name, why, extra=fields(event="suspend", client=name, why=str(why)))
        try:
            await self._commits.submit("suspend", name=name, gen=member.generation)
        except Exception as error:
            why = as_refusal(error, f"the suspension of {name}")
        else:
            self._leases.end(name)
            self._auth.clear_strikes(name)  # a client that is invited again begins without strikes
        self.refuse(request, why)


def as_refusal(error: Exception, what: str) -> Refused:
    """The refusal for a request that has failed with this error; an error of the server itself is logged."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, WireError):
        return Refused(400, "malformed", str(error))
    log.error("%s failed", what, exc_info=error)
    return Refused(500, "internal", "internal error of the server; its log says more")


def answer_request(request: Request, response: Response) -> None:
    """Sends the response to a request, and logs both for --log-level debug."""
    if log.isEnabledFor(logging.DEBUG):
        _log(request, response.status)
    request.send(response)


def _log(request: Request, status: int) -> None:
    method, what, client, code = request.method, request.what, request.client, request.code
    about = {"client": client, "method": method, "what": what, "status": status, "code": code}
    result = code
    if request.about is not None:
        job, (receipt, version, _) = request.about
        about |= {"job": job, "outcome": receipt.outcome, "staleness": receipt.staleness, "version": version}
        result = receipt.outcome
    log.debug("%s %s of %s: %d %s", method, what, client or "?", status, result, extra=fields(**about))


def send_after_body(request: Request, send: Callable[[], None]) -> None:
    """Calls `send`, which sends the response to a request whose body is not needed, when the body has been discarded.

    Many clients look at the response only after they have sent the whole body. A client that waits for "100 Continue"
    is answered at once, so that it need not send the body. The response is sent at once, too, if the connection ends
    with it, or if the body has begun to arrive in a buffer (its upload has ended).
    """
    if request.length and not request.expects and not request.received and request.keep_alive:
        request.skip(send)
    else:
        send()


def _superseded() -> Refused:
    return busy("busy", "this client has begun another upload since, so the server has ended this one")
