"""`Session` without a run, and runs side by side."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aflock.errors import InputError
from aflock.net.client.client import JobReport, Session
from tests.net.client.fake_server import FakeServer
from tests.net.client.helpers import D, made, one, plain

pytestmark = pytest.mark.timeout(60)


def test_sessions_side_by_side() -> None:
    """As a benchmark uses them."""

    async def client(server: FakeServer, number: int) -> int:
        async with Session(server.url, server.token(f"c{number}")) as session:
            await session.hello()
            pulled, count = await session.pull(wait=1), 0
            while pulled is not None and count < 5:
                update = pulled.pack({"gradient": np.full(D, number, np.float32)}, steps=1, examples=1)
                answer = await session.push(update, next=True)
                pulled, count = answer.next, count + 1
            if pulled is not None:
                assert await session.heartbeat(pulled.id) == 60.0
                await session.decline(pulled.id)
            return count

    async def all_of(server: FakeServer) -> list[int]:
        return list(await asyncio.gather(*(client(server, k) for k in range(16))))

    with plain(clients=16) as server:
        assert asyncio.run(all_of(server)) == [5] * 16
        assert Counter(event.client for event in server.happened("arrival")) == dict.fromkeys(range(16), 5)
        assert len(server.happened("drop")) == 16


def test_a_session_says_hello_first_pulls_and_leaves() -> None:
    async def use(server: FakeServer) -> None:
        async with Session(server.url, server.token()) as session:
            with pytest.raises(InputError, match="call hello"):
                await session.pull()
            hello = await session.hello()
            assert (hello.number, hello.strategy, hello.length) == (0, "asgd", D)
            server.coordinator.suspend(0, time.monotonic())
            assert await session.pull(wait=0) is None
            await session.leave()
        with pytest.raises(InputError, match="the session is closed"):
            await session.hello()

    with plain() as server:
        asyncio.run(use(server))


def test_a_client_that_is_running_cannot_be_run_again() -> None:
    with plain() as server:
        client = made(server)
        errors: list[str] = []

        def again(progress: JobReport) -> None:
            thread = threading.Thread(target=lambda: _raises(errors, lambda: client.run_with(one)))
            thread.start()
            thread.join(10)

        client.run_with(one, jobs=1, progress=again)
        assert errors == ["this client is already running; make another Client, with a token of its own"]


def _raises(errors: list[str], call: Callable[[], Any]) -> None:
    try:
        call()
    except InputError as error:
        errors.append(str(error))
