"""A server in a thread of this process, whose memory for bodies can be looked at, and large updates for it.

When all is quiet, as much memory must be free as there was: `inside` checks that at the end of its `with`."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import ssl
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import uvloop

from aflock.net.identity import tls
from aflock.net.identity.members import Members
from aflock.net.server.app import App
from aflock.net.server.http.limits import ConnectionLimits
from aflock.net.server.http.server import Server as HttpServer
from aflock.net.server.settings import Settings
from aflock.net.storage.data_folder import DataFolder
from tests.net.real_server import SMALL, Document, Peer, Server, Wire, invite, until, update_head

LENGTH = 1_200_000


SIZE = 4 * LENGTH
"""Bytes of a large update: there is memory for two, and a little more."""


BIG: Document = {**SMALL, "strategy": {"name": "asgd", "lr": 1.0}, "model": {"name": "vector", "length": LENGTH}}


HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


QUICK = 0.7
"""Seconds of grace, where a test waits until they are over."""


@dataclass
class Inside(Server):
    """One that runs in a thread."""

    app: App = field(kw_only=True)
    free: tuple[int, int] = (0, 0)
    """`body_memory` while no update is being received."""

    @property
    def body_memory(self) -> tuple[int, int]:
        """Bytes of memory for bodies that are free, and bodies that have reserved theirs."""
        held = self.app.updates.bodies
        return held.free, held.in_use

    @property
    def waiting(self) -> int:
        """Bodies that wait for memory."""
        return self.app.updates.bodies.waiting

    def quiet(self) -> None:
        """Waits until all memory for bodies is free again."""
        until(lambda: self.body_memory == self.free and not self.waiting, 3.0)


@contextlib.contextmanager
def inside(folder: Path, document: Document = SMALL, *, secure: bool = False, **server: Any) -> Iterator[Inside]:
    """A server in a thread; at the end, all its memory for bodies must be free."""
    invite(folder, "nobody")
    settings = Settings.build({**document, "server": {"idle": 5.0, "rate": 1e6, **server}})
    started: queue.Queue[Any] = queue.Queue()
    certificates = tls.prepare(folder, ["localhost", "127.0.0.1"]) if secure else None
    context = tls.server_context(certificates) if certificates else None
    thread = threading.Thread(target=_in_thread, args=(folder, settings, context, started))
    thread.start()
    port, app, stop, wrong = started.get(timeout=30)
    url = f"{'https' if secure else 'http'}://127.0.0.1:{port}"
    authority = (folder / "tls" / "ca.pem").read_text() if secure else None
    made = Inside(folder, url, cast(Any, None), authority, app=app)  # there is no process
    made.free = made.body_memory
    try:
        yield made
        made.quiet()
        assert not wrong
    finally:
        for peer in made.peers:
            peer.connection.close()
        stop()
        thread.join(30)
    assert not thread.is_alive()


def _in_thread(folder: Path, settings: Settings, context: ssl.SSLContext | None, started: queue.Queue[Any]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(folder, settings, context, started))


async def _serve(folder: Path, settings: Settings, context: ssl.SSLContext | None, started: queue.Queue[Any]) -> None:
    p, loop, wrong = settings.section("server"), asyncio.get_running_loop(), list[str]()
    loop.set_exception_handler(lambda _, context: wrong.append(repr(context)))
    app = App(DataFolder(folder, settings), Members(folder), settings)
    server = HttpServer(app, ConnectionLimits(p.idle, p.connections), app.clock, context)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def stop() -> None:
        app.stop()
        server.stop()

    checks = loop.create_task(app.check_every_second())
    started.put((listening.getsockname()[1], app, lambda: loop.call_soon_threadsafe(stop), wrong))
    try:
        await server.serve([listening])
    finally:
        checks.cancel()
        await app.close()


def connected(server: Server, receive_buffer: int | None = None) -> Wire:
    """A bare connection, as far as TLS lets it be one."""
    made = Wire(server, receive_buffer=receive_buffer)
    if server.ca is not None:
        made.socket = tls.client_context(server.ca).wrap_socket(made.socket, server_hostname="127.0.0.1")
    return made


def ones(value: float = 1.0) -> bytes:
    """A large update."""
    return np.full(LENGTH, value, np.float32).tobytes()


def begun(server: Server, peer: Peer, sent: int, stack: contextlib.ExitStack) -> Wire:
    """A large update of which so many bytes are on their way."""
    wire_ = stack.enter_context(connected(server))
    wire_.send(update_head(peer, SIZE) + bytes(sent))
    return wire_


def reset(wire_: Wire) -> None:
    """Ends a connection the hard way."""
    wire_.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire_.socket.close()


def outcome(answered: tuple[int, Mapping[str, str], bytes]) -> tuple[int, str | None]:
    return answered[0], answered[1].get("aflock-outcome")


TAKEN = (200, "applied")


def following(wire_: Wire, peer: Peer) -> None:
    """The answer to an update with `next`: the job in it is the client's."""
    status, headers, body = wire_.answer()
    assert (status, headers["aflock-outcome"], len(body)) == (200, "applied", 32)
    peer.job = headers


def with_next(head: bytes) -> bytes:
    return head.replace(b"/update ", b"/update?next=1 ")


def fail(*_: Any) -> None:
    raise MemoryError("on purpose")
