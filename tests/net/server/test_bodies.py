"""Memory for bodies (bodies.py): how much there is, who gets it next, and when it is used again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aflock.net.server.bodies import LARGE, MOST_KEPT, Bodies

HUGE = 1 << 40
"""Bytes for which there is memory only while no body has any."""


def test_all_memory_is_free_again_after_any_order_of_calls() -> None:
    async def main(seed: int) -> None:
        chance, held = random.Random(seed), Bodies(100)
        reserved: list[int] = []
        waiting: list[tuple[int, asyncio.Future[None]]] = []
        models: list[memoryview] = []
        for _ in range(500):
            what = chance.randrange(6)
            if what < 2:
                length = chance.choice((1, 10, 49, 60, 150))
                reservation = held.reserve(length)
                reserved.append(length) if reservation is None else waiting.append((length, reservation))
            elif what == 2 and reserved:
                held.release(reserved.pop(chance.randrange(len(reserved))))
            elif what == 3 and waiting:
                held.cancel(*waiting.pop(chance.randrange(len(waiting))))
            elif what == 4:
                model = np.zeros(chance.randrange(1, 80), np.uint8).data
                held.count_old_model(model)
                models.append(model)
                del model
            elif models:
                models.pop(chance.randrange(len(models)))
            reserved += [length for length, reservation in waiting if reservation.done()]
            waiting = [(length, reservation) for length, reservation in waiting if not reservation.done()]
            assert held.waiting == len(waiting)
            assert held.in_use == len(reserved)
            assert held.free == 100 - sum(reserved) - sum(model.nbytes for model in models)
            assert reserved or not waiting  # there is always memory for one
            assert len(reserved) < 2 or sum(reserved) <= 100
        models.clear()
        while reserved or waiting:
            for length in reserved:
                held.release(length)
            reserved = [length for length, reservation in waiting if reservation.done()]
            waiting = [(length, reservation) for length, reservation in waiting if not reservation.done()]
        assert (held.free, held.in_use) == (100, 0)

    for seed in range(10):
        asyncio.run(main(seed))


def test_memory_that_is_not_awaited_any_more_goes_to_the_next() -> None:
    async def main() -> None:
        held = Bodies(10)
        assert held.reserve(10) is None
        one, two = held.reserve(10), held.reserve(10)
        assert one is not None
        assert two is not None
        held.release(10)  # to the first, who is given up in the same moment
        assert one.done()
        held.cancel(10, one)
        assert two.done()
        held.release(10)
        assert (held.free, held.in_use) == (10, 0)

    asyncio.run(main())


@pytest.mark.parametrize(
    "use",
    [
        lambda body: body,
        lambda body: body[5:],
        lambda body: body.cast("B"),
        lambda body: body.toreadonly(),
        lambda body: np.frombuffer(body, "<f4"),
        lambda body: np.frombuffer(body, "<f4").astype(np.float32, copy=False)[3:9],
        lambda body: {"gradient": np.frombuffer(body, np.uint8).reshape(2, -1).T},
    ],
)
def test_memory_is_used_again_when_nobody_sees_it_and_not_before(use: Callable[[memoryview], Any]) -> None:
    held, addresses = Bodies(10 * LARGE), set[int]()

    def address(body: memoryview) -> int:
        return int(np.frombuffer(body, np.uint8).__array_interface__["data"][0])

    for _ in range(5):  # one at a time: always the same memory
        addresses.add(address(held.allocate(LARGE)))
    assert len(addresses) == 1
    used = use(held.allocate(LARGE))
    for _ in range(5):
        other, another = held.allocate(LARGE), held.allocate(LARGE)
        assert len({address(other), address(another)} | addresses) == 3
        del other, another
    del used
    assert len({address(held.allocate(LARGE)) for _ in range(5)}) <= MOST_KEPT
