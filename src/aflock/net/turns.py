"""Who waits for a job: one request per client, woken when there may be one for it."""

from __future__ import annotations

import asyncio

from .bodies import Gone
from .federation import Federation
from .request import Request


class Turns:
    """Those who wait, longest first."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._waiting: dict[str, asyncio.Future[bool]] = {}

    async def wait(self, request: Request, name: str, seconds: float) -> bool:
        """Waits until there may be a job for the client; false if there was none in time."""
        if seconds <= 0:
            return False
        self.wake(name, again=False)  # an older request of the same client: it has been given up
        loop = asyncio.get_running_loop()
        turn = self._waiting[name] = loop.create_future()
        gone = loop.create_task(request.gone())
        try:
            await asyncio.wait({turn, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._waiting.get(name) is turn:
                del self._waiting[name]
            hung_up = gone.done()
            gone.cancel()
        if hung_up:
            self.wake_some()  # what it may have been woken for is another's
            raise Gone
        return turn.done() and turn.result()

    def wake(self, name: str, *, again: bool = True) -> None:
        """Whoever waits under that name looks again, or gives up."""
        turn = self._waiting.pop(name, None)
        if turn is not None and not turn.done():
            turn.set_result(again)

    def wake_all(self) -> None:
        """Everybody looks again."""
        for name in list(self._waiting):
            self.wake(name)

    def wake_some(self) -> None:
        """Those look again who have waited longest and could get a job now."""
        if not self._waiting:
            return
        if self._federation.ended:
            self.wake_all()
            return
        free = self._federation.free_places
        for name in list(self._waiting):
            if free < 1:
                return
            if self._federation.can_pull(name):
                self.wake(name)
                free -= 1
