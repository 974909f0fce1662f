"""The upload of one update: from its checked head until its body is in memory."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from ..federation.client_record import ClientRecord
from ..identity.members import Member
from ..protocol.refusals import Refused, busy
from ..protocol.wire import UpdateHead
from .http.request import Request
from .http.uptime import Deadline

if TYPE_CHECKING:
    from .updates import Updates

PATIENCE = 30.0
"""Seconds an upload waits for memory while nothing moves: no memory is reserved, and no byte of any body arrives."""


class Upload:
    """Reserves memory for a body, waits for it if need be, and receives the body.

    `Updates` makes one for each update. The upload calls `Updates.body_received` when the body is there, and
    `Updates.upload_ended` when it will not arrive. The object stays with the update until its record is applied: the
    journal and the federation need the body until then.
    """

    memory_wait: asyncio.Future[None] | None = None
    """Done when the memory is reserved; None if the upload does not wait, or has ended."""
    body = memoryview(b"")
    _has_memory = False
    _wait_deadline: Deadline | None = None
    _progress = (0, 0)
    """`Updates.progress` when it was last looked at."""
    _seen = 0
    """Bytes that had arrived when the client's lease was last looked at."""

    def __init__(
        self,
        updates: Updates,
        request: Request,
        member: Member,
        client: ClientRecord,
        job: int,
        head: UpdateHead,
        wants_next: bool,
    ) -> None:
        """`wants_next`: whether the client asks for its next job with the answer."""
        self._updates, self.request, self.member, self.client = updates, request, member, client
        self.job, self.head, self.wants_next, self.length = job, head, wants_next, request.length

    def begin(self) -> None:
        """Reserves memory for the body, and receives it as soon as there is some."""
        wait = self._updates.bodies.reserve(self.length)
        if wait is None:
            self._receive()
            return
        self.memory_wait = wait
        self.request.on_lost(self.lost)  # until the body is received, nothing else tells that the connection has ended
        wait.add_done_callback(self._memory_reserved)
        self._progress = self._updates.progress()
        self._wait_deadline = Deadline(self._updates.clock, self._check_progress)
        self._wait_deadline.set(PATIENCE)

    def _memory_reserved(self, wait: asyncio.Future[None]) -> None:
        # The event loop calls this some time after the reservation: the upload may have ended in between.
        if self.memory_wait is not wait:
            return
        self._stop_waiting()
        self.memory_wait = None
        self._receive()

    def _receive(self) -> None:
        """Receives the body into the memory that is reserved for it."""
        self._has_memory = True
        try:
            self.body = self._updates.bodies.allocate(self.length)
        except Refused as refused:  # the memory is reserved, but the system may have none
            self.refuse(refused)
        else:
            self.request.receive(self.body, partial(self._updates.body_received, self), self.lost)

    def _check_progress(self) -> None:
        """Refuses the update if no other upload has made progress while this one waited; else it waits on."""
        progress = self._updates.progress()
        if progress == self._progress:
            self.refuse(busy("busy", "the server has no memory free for this update: too many uploads; try again"))
        else:
            assert self._wait_deadline is not None
            self._progress = progress
            self._wait_deadline.set(PATIENCE)

    def refuse(self, refused: Refused) -> None:
        """Ends the upload, answers at once, and closes the connection: the rest of the body is not waited for."""
        self.lost()
        self.request.keep_alive = False
        self._updates.refuse(self.request, refused)

    def lost(self) -> None:
        """The body will not arrive: the connection has ended, the client was too slow, or the upload is refused."""
        self._updates.upload_ended(self)
        self.release()

    def release(self) -> None:
        """Releases the memory of the body, or withdraws from the wait for it."""
        wait, self.memory_wait = self.memory_wait, None
        if self._wait_deadline is not None:
            self._stop_waiting()
        if self._has_memory:
            self._has_memory, self.body = False, Upload.body
            self._updates.bodies.release(self.length)
        elif wait is not None:
            self._updates.bodies.cancel(self.length, wait)

    def _stop_waiting(self) -> None:
        # The deadline refers to this object and this object to the deadline. Without breaking the cycle, the body would
        # stay in memory until the garbage collector runs, and that is rare (main.py).
        assert self._wait_deadline is not None
        self._wait_deadline.stop()
        self._wait_deadline = None

    @property
    def received(self) -> int:
        """Bytes of the body that have arrived, since there was memory for them."""
        return self.request.received if self._has_memory else 0

    def is_alive(self) -> bool:
        """Whether the client has sent bytes of the body since the last call, or has to wait for memory.

        `Leases` asks this when the client's lease is over.
        """
        seen, self._seen = self._seen, self.received
        return self.memory_wait is not None or self._seen > seen
