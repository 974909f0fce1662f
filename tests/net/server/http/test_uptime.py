"""A clock that leaves out the time in which the process stood still, and deadlines by it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from aflock.net.server.http import uptime
from aflock.net.server.http.uptime import Deadline, Uptime


def test_time_passes_while_the_loop_runs() -> None:
    async def main() -> float:
        clock = Uptime(asyncio.get_running_loop())
        begun = clock.now()
        await asyncio.sleep(1.5)
        clock.stop()
        return clock.now() - begun

    assert 1.4 < asyncio.run(main()) < 2.5


def test_time_in_which_the_loop_was_blocked_does_not_count() -> None:
    async def main() -> float:
        clock = Uptime(asyncio.get_running_loop())
        begun = clock.now()
        time.sleep(3.0)
        await asyncio.sleep(0)
        clock.stop()
        return clock.now() - begun

    assert asyncio.run(main()) < 1.5


def test_a_gap_counts_as_one_check_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[float]:
        now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: now)
        clock = Uptime(asyncio.get_running_loop())
        begun, seen = clock.now(), list[float]()
        for step in (0.5, 0.9, 3600.0, 0.5, 2.0):
            now += step
            seen.append(round(clock.now() - begun, 6))
        clock.stop()
        return seen

    interval = uptime.CHECK_INTERVAL
    assert asyncio.run(main()) == [0.5, 1.4, 1.4 + interval, 1.9 + interval, 1.9 + 2 * interval]


# --- deadlines -------------------------------------------------------------------------------------------------------


def late_after(work: Callable[[Deadline], None], seconds: float) -> list[float]:
    """When a deadline that was treated so was reached, in seconds, within so many."""

    async def wait() -> list[float]:
        loop, reached = asyncio.get_running_loop(), list[float]()
        begun, clock = loop.time(), Uptime(loop)
        deadline = Deadline(clock, lambda: reached.append(loop.time() - begun))
        work(deadline)
        await asyncio.sleep(seconds)
        deadline.stop()
        clock.stop()
        return reached

    return asyncio.run(wait())


def test_a_deadline_is_reached_once() -> None:
    [reached] = late_after(lambda deadline: deadline.set(0.05), 0.3)
    assert reached >= 0.05


def test_a_deadline_is_moved_back_and_forth() -> None:
    def work(deadline: Deadline) -> None:
        deadline.set(0.05)
        deadline.set(60.0)
        deadline.set(0.1)

    [reached] = late_after(work, 0.4)
    assert reached >= 0.1


@pytest.mark.parametrize("end", [Deadline.clear, Deadline.stop])
def test_a_deadline_that_does_not_count_any_more(end: Callable[[Deadline], None]) -> None:
    def work(deadline: Deadline) -> None:
        deadline.set(0.05)
        end(deadline)

    assert late_after(work, 0.2) == []


def test_a_deadline_that_was_cleared_can_be_set_again() -> None:
    def work(deadline: Deadline) -> None:
        deadline.set(0.05)
        deadline.clear()
        deadline.set(0.1)

    [reached] = late_after(work, 0.4)
    assert reached >= 0.1


def test_a_deadline_is_put_off_by_a_blocked_loop() -> None:
    def work(deadline: Deadline) -> None:
        deadline.set(2.0)
        time.sleep(2.5)

    assert late_after(work, 1.0) == []
