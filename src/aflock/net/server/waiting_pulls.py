"""The clients that wait for a job: for how long, and which of them gets the next free place.

A place is one of the jobs that may be open at a time (`[federation] concurrency`, and a rule's cohort). Every pull goes
through here:

1. A free place is *reserved* for one of the clients that want a job, by the policy of `[federation] selection`
   (next_client.py).
2. The client's pull wakes up and submits its "pull" record.
3. When the record is applied, the client has a job and the reservation ends.

Why reservations: between 1 and 3 the record waits for the disk, and for the federation the place is still free. Without
a reservation the next pull would be offered the same place, and the client that has waited longest could lose it.

A client waits from its first pull that was not answered with a job until it gets one; if it pulls within PULL_GRACE
seconds after it reported, it waits from that report on. A pull that times out and is sent again keeps its position in
the order. Clients that pull again and again without waiting (`wait=0`) take part, too: a place that is reserved for one
of them stays reserved until PULL_GRACE seconds after its last pull.

The journal says which client got which job, so nothing of this is saved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..federation.federation import Federation
from .http.request import Disconnected
from .logs import fields, log
from .next_client import NextClient

PULL_GRACE = 1.0
"""Seconds within which a client that has reported, or whose pull has ended without a job, is expected to pull again."""
FORGOTTEN = 60.0
"""Seconds after which a client that does not pull again loses its position in the order."""
LONG = 60.0
"""Seconds of waiting after which a client appears in the log and in `clients_waiting_long`."""
_MAX_NAMES = 5
"""Most names of clients in one line of the log."""


class PullRequest(Protocol):
    """What is needed of a request here; tests have simpler ones than `http.request.Request`."""

    async def wait_for_disconnect(self) -> None:
        """Returns when the client's connection has ended."""


@dataclass(slots=True, eq=False)
class _Wait:
    """One client that wants a job, or has just reported and is expected to want one."""

    since: float
    """When the wait began."""
    last_seen: float
    """When the client reported, or its last pull ended."""
    woken: asyncio.Future[bool] | None = None
    """What the client's pull waits for, while it has one here: true means "try again", false "stop waiting"."""
    has_pulled: bool = False
    """Whether the client has pulled since it had a job; else it has only reported."""
    reserved: bool = False
    """Whether a place is reserved for the client."""
    disconnected: bool = False
    """Whether the connection of its pull ended while the pull waited."""
    warned: bool = False
    """Whether the log has a warning about this wait."""


class WaitingPulls:
    """The clients that wait for a job, and the places reserved for them.

    `App` asks it about pulls, `Updates` about updates that ask for the next job. `App` calls `grant_places` after every
    batch of applied records, and `check` once a second.
    """

    def __init__(
        self, federation: Federation, next_client: NextClient, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._federation, self._next, self._clock = federation, next_client, clock
        self._waits: dict[str, _Wait] = {}
        """By client, in the order of `since`: a new wait is inserted at the end, and begins last."""

    # -- pulls ------------------------------------------------------------------------------------------------------

    def has_place(self, name: str) -> bool:
        """Whether a place is reserved for the client: its "pull" record may be submitted."""
        wait = self._waits.get(name)
        return wait is not None and wait.reserved

    async def wait(self, request: PullRequest, name: str, seconds: float) -> bool:
        """Waits until there may be a job for the client; false if there was none in time, or a newer pull waits."""
        wait = self._wait_of(name)
        self._wake(wait, again=False)  # an older pull of the same client: the client does not wait for it any more
        loop = asyncio.get_running_loop()
        woken = wait.woken = loop.create_future()
        self.grant_places()  # may wake this very pull
        disconnect: asyncio.Task[None] | None = None
        try:
            if not woken.done() and seconds > 0:
                disconnect = loop.create_task(request.wait_for_disconnect())
                await asyncio.wait({woken, disconnect}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if wait.woken is woken:  # the pull was not woken: it timed out, or its client disconnected
                wait.woken, wait.last_seen = None, self._clock()
            disconnected = disconnect is not None and disconnect.done()
            if disconnect is not None:
                disconnect.cancel()
        replaced = woken.done() and not woken.result()
        if disconnected and not replaced:  # a newer pull of the client keeps the wait as it is
            self._disconnected(wait)
        if disconnected:
            raise Disconnected
        return woken.done() and woken.result()

    def _wait_of(self, name: str) -> _Wait:
        """The wait of a client that pulls: the one it has, or a new one that begins now."""
        wait, now = self._waits.get(name), self._clock()
        if wait is None or self._is_over(wait, now):
            self._waits.pop(name, None)
            wait = self._waits[name] = _Wait(now, now)
        wait.has_pulled, wait.disconnected = True, False
        return wait

    def _disconnected(self, wait: _Wait) -> None:
        """The client's connection ended while it waited: a place reserved for it becomes another client's.

        The client keeps its position in the order, in case it comes back.
        """
        wait.disconnected, wait.reserved = True, False
        self.grant_places()

    def pulled(self, name: str, *, given: bool) -> None:
        """The client's "pull" record was applied and gave it a job (`given`), or gave none or could not be written."""
        if given:
            self._next.served(name)
            self._end(name)
        elif (wait := self._waits.get(name)) is not None:
            wait.reserved = False

    # -- updates ----------------------------------------------------------------------------------------------------

    def may_have_next_job(self, name: str) -> bool:
        """Whether an update that asks for the next job may get one: whether the policy picks its client.

        `Updates` asks before it submits the update's record, and the record says the result. The place that the update
        frees counts as free. The places of other updates that are being written do not: each of their clients frees one
        place and wants one.
        """
        if self._has_place_for_all():
            return True
        free, now = self._free_places() + 1, self._clock()
        wanting = [other for other, wait in self._waits.items() if other != name and self._is_expected(wait, now)]
        wanting.append(name)  # last: its wait would begin now
        for _ in range(min(int(free), len(wanting))):
            picked = self._next.pick(wanting)
            if picked == name:
                return True
            wanting.remove(picked)
        return False

    def reported(self, name: str, *, given: bool) -> None:
        """An update of the client was applied; it got the next job (`given`), or is expected to pull for one."""
        if given:
            self._next.served(name)
            if name in self._waits:
                self._end(name)
        elif (wait := self._waits.get(name)) is None or wait.woken is None:
            # A new wait, at the end of the order. But if a pull of the client waits already (it was sent while the
            # update was being written), its wait stays.
            now = self._clock()
            self._waits.pop(name, None)
            self._waits[name] = _Wait(now, now)

    # -- places -----------------------------------------------------------------------------------------------------

    def grant_places(self) -> None:
        """Reserves the free places for clients that have pulled and could have a job now, and wakes their pulls."""
        if self._federation.ended:
            self.wake_all()
            return
        now = self._clock()
        self._end_unused_reservations(now)
        free = self._free_places()
        if free < 1 or not self._waits:
            return
        able = [name for name, wait in self._waits.items() if self._is_able(name, wait, now)]
        while free >= 1 and able:
            name = self._next.pick(able)
            able.remove(name)
            self._waits[name].reserved = True
            self._wake(self._waits[name])
            free -= 1

    def _end_unused_reservations(self, now: float) -> None:
        """Ends the reservations of clients that have not pulled again in time."""
        for wait in self._waits.values():
            if wait.reserved and wait.woken is None and not self._is_expected(wait, now):
                wait.reserved = False

    def _free_places(self) -> float:
        """Places that have no open job and are not reserved; infinity if the number of open jobs is not limited."""
        return self._federation.free_places - sum(wait.reserved for wait in self._waits.values())

    def _has_place_for_all(self) -> bool:
        """Whether all clients may have a job at the same time: then no client waits for the place of another."""
        coordinator, clients = self._federation.coordinator, len(self._federation.clients)
        places, cohort = coordinator.concurrency, coordinator.strategy.cohort if coordinator.in_rounds else None
        return (places is None or places >= clients) and (cohort is None or cohort >= clients)

    def _is_able(self, name: str, wait: _Wait, now: float) -> bool:
        """Whether a place may be reserved for the client now."""
        return not wait.reserved and wait.has_pulled and self._is_expected(wait, now) and self._could_work(name)

    def _could_work(self, name: str) -> bool:
        """Whether the client lacks nothing but a place: it does not wait for the end of a round, for example."""
        client = self._federation.clients.get(name)
        return client is not None and not client.suspended and self._federation.coordinator.is_idle(client.number)

    def _is_expected(self, wait: _Wait, now: float) -> bool:
        """Whether a pull of the client waits now, or is expected soon."""
        return wait.woken is not None or (not wait.disconnected and now < wait.last_seen + PULL_GRACE)

    def _is_over(self, wait: _Wait, now: float) -> bool:
        """Whether the client has not pulled for so long that its wait has ended."""
        return wait.woken is None and now >= wait.last_seen + (FORGOTTEN if wait.has_pulled else PULL_GRACE)

    # -- the end of a wait ------------------------------------------------------------------------------------------

    def forget(self, name: str) -> None:
        """The client has left, or was revoked or suspended: its pull, if one waits, wakes up and is refused."""
        self._next.forget(name)
        self._end(name)

    def _end(self, name: str) -> None:
        wait = self._waits.pop(name, None)
        if wait is not None:
            self._wake(wait)

    def wake_all(self) -> None:
        """Wakes all pulls that wait: the federation has ended, or the server stops."""
        for wait in self._waits.values():
            self._wake(wait)

    def _wake(self, wait: _Wait, *, again: bool = True) -> None:
        """Wakes the client's pull, if one waits: it tries again, or stops waiting."""
        if wait.woken is not None:
            if not wait.woken.done():
                wait.woken.set_result(again)
            # From here on the pull counts as ended: it is woken once, and has PULL_GRACE seconds to submit its record.
            wait.woken, wait.last_seen = None, self._clock()

    # -- status and log ---------------------------------------------------------------------------------------------

    def seconds(self) -> dict[str, float]:
        """For how many seconds each client that waits now has waited; the longest wait first."""
        if not self._federation.begun or self._federation.ended:
            return {}
        now = self._clock()
        return {
            name: now - wait.since for name, wait in self._waits.items() if wait.has_pulled and not wait.disconnected
        }

    def check(self) -> None:
        """Once a second: ends the waits of clients that do not pull any more, and logs long waits."""
        now, clients = self._clock(), self._federation.clients
        for name, wait in list(self._waits.items()):
            client = clients.get(name)
            if client is not None and client.suspended:
                self.forget(name)
            elif self._is_over(wait, now):
                self._end(name)
        self.grant_places()
        self._warn()

    def _warn(self) -> None:
        """Logs the clients that have waited long, each of them once per wait."""
        long = [name for name, seconds in self.seconds().items() if seconds > LONG and self._could_work(name)]
        new = [name for name in long if not self._waits[name].warned]
        if not new:
            return
        for name in new:
            self._waits[name].warned = True
        shown = ", ".join(new[:_MAX_NAMES]) + (f" and {len(new) - _MAX_NAMES} more" if len(new) > _MAX_NAMES else "")
        text = "%s: waiting for a job for over a minute (%d clients in all); [federation] concurrency may be too small"
        log.warning(text, shown, len(long), extra=fields(event="waiting", clients=new, count=len(long)))
