"""An update on its way in, from its head to its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from .federation import Answer
from .members import Member
from .refusals import Refused
from .replies import Reply
from .seats import Seat
from .wire import Buffer, UpdateHead

if TYPE_CHECKING:
    from .intake import Intake

Send = Callable[[Reply], None]


class Arrival:
    """On the short way: whoever reads from the network fills its body, once there is a place for it."""

    __slots__ = (
        "_early", "_intake", "_send", "body", "filled", "have", "head",
        "job", "length", "member", "more", "seat", "turn",
    )  # fmt: skip

    def __init__(
        self, intake: Intake, member: Member, seat: Seat, job: int, head: UpdateHead, length: int, more: bool,
        have: str | None, room: bool,
    ) -> None:  # fmt: skip
        """`room`: whether there is a place for its body now."""
        self._intake, self.member, self.seat, self.job, self.head = intake, member, seat, job, head
        self.length, self.filled, self.more, self.have = length, 0, more, have
        self.turn: asyncio.Future[None] | None = None
        """Done when there is a place; None if there is one."""
        bodies = intake.bodies
        if room:
            self.body = bodies.blank(length)
            bodies.place(length)
        else:
            self.turn, self._early = bodies.ask(length), b""
        intake.came(seat.name)

    def space(self) -> memoryview:
        """Where the next bytes go."""
        return self.body[self.filled :]

    def feed(self, chunk: Buffer) -> None:
        """The next bytes."""
        if self.turn is None:
            begin, self.filled = self.filled, self.filled + len(chunk)
            self.body[begin : self.filled] = chunk
        else:
            self._early += chunk

    def place(self) -> bytes:
        """There is a place now; what has come beyond the body is returned."""
        self.turn, self.body = None, self._intake.bodies.blank(self.length)
        early, self._early = self._early, b""
        self.feed(early[: self.length])
        return early[self.length :]

    def finish(self, send: Send) -> None:
        """All of it is here; `send` is called with the answer, once."""
        self._send = send
        self._intake.take(self)

    def answered(self, answer: Answer | None, refused: Refused | None) -> None:
        """It has happened, or will not."""
        self.abandon()
        self._send(self._intake.reply(self, answer, refused))

    def abandon(self) -> None:
        """The body is not needed any more."""
        self._intake.left(self.seat.name)
        if self.turn is None:
            self._intake.bodies.give_back(self.length)
        else:
            self._intake.bodies.withdraw(self.length, self.turn)
