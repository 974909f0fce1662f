"""Leases: whose job runs out, and what gives a client the whole lease again."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from aflock.net.server.http.uptime import Uptime
from aflock.net.server.leases import Leases


def test_a_job_begun_while_others_expire_keeps_its_lease() -> None:
    expired: list[tuple[str, int]] = []

    async def main() -> None:
        async def expire(name: str, job: int) -> None:
            expired.append((name, job))
            if name == "alice":
                leases.begin("bob", 3)  # he answered, and got another job, while hers was let go

        clock = Uptime(asyncio.get_running_loop())
        leases = Leases(expire, 0.01, clock, lambda name, job: False)
        leases.begin("alice", 1)
        leases.begin("bob", 2)
        await asyncio.sleep(0.02)
        await leases.check()
        assert expired == [("alice", 1)]
        await asyncio.sleep(0.02)
        await leases.check()
        clock.stop()

    asyncio.run(main())
    assert expired == [("alice", 1), ("bob", 3)]


def test_a_client_that_has_shown_itself_otherwise_has_the_whole_lease_again() -> None:
    expired: list[tuple[str, int]] = []

    async def main() -> None:
        async def expire(name: str, job: int) -> None:
            expired.append((name, job))

        clock, alive = Uptime(asyncio.get_running_loop()), [True, False]
        leases = Leases(expire, 0.05, clock, lambda name, job: alive.pop(0))
        leases.begin("alice", 1)
        await asyncio.sleep(0.06)
        await leases.check()
        await leases.check()  # the new lease is not over
        assert (expired, alive) == ([], [False])
        await asyncio.sleep(0.06)
        await leases.check()
        clock.stop()

    asyncio.run(main())
    assert expired == [("alice", 1)]


def test_a_lease_that_begins_anew_does_not_hide_those_that_are_over() -> None:
    """Leases are looked at in the order in which they end."""
    expired: list[tuple[str, int]] = []

    class Clock:
        time = 0.0

        def now(self) -> float:
            return self.time

    async def main() -> None:
        async def expire(name: str, job: int) -> None:
            expired.append((name, job))

        clock = Clock()
        leases = Leases(expire, 10.0, cast(Any, clock), lambda name, job: False)
        leases.begin("alice", 1)
        leases.begin("bob", 2)
        clock.time = 5.0
        leases.begin("alice", 1)  # a heartbeat
        clock.time = 10.0
        await leases.check()
        assert expired == [("bob", 2)]
        clock.time = 15.0
        await leases.check()

    asyncio.run(main())
    assert expired == [("bob", 2), ("alice", 1)]
