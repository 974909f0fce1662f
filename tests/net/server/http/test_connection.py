"""A connection with small applications of its own: what an application can do with a request, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from aflock.net.server.http.limits import ConnectionLimits
from aflock.net.server.http.request import Request
from aflock.net.server.http.response import Response
from aflock.net.server.http.server import Server as HttpServer
from aflock.net.server.http.uptime import Uptime
from tests.net.real_server import Server, Wire, refusal, until

GET = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n"


class App:
    """Does with a request what its path says."""

    def __init__(self) -> None:
        self.codes: list[str] = []
        self.lost: list[str] = []
        self.ended: list[str] = []
        self.waiting: list[Request] = []
        self.closed_streams = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        """Of the server that has it."""

    def begin(self, request: Request) -> None:
        request.on_finished(lambda: self.ended.append(request.path))
        getattr(self, f"do_{request.path[1:]}")(request)

    def refused(self, code: str) -> None:
        self.codes.append(code)

    def do_now(self, request: Request) -> None:
        request.send(Response(200, "text/plain", [b"now"]))

    def do_later(self, request: Request) -> None:
        self.waiting.append(request)

    def do_echo(self, request: Request) -> None:
        body = memoryview(bytearray(request.length))
        send = lambda: request.send(Response(200, "text/plain", [body]))  # noqa: E731
        request.receive(body, send, lambda: self.lost.append(request.path))

    def do_skip(self, request: Request) -> None:
        request.skip(lambda: request.send(Response(200, "text/plain", [b"skipped"])))

    def do_twice(self, request: Request) -> None:
        request.send(Response(200, "text/plain", [b"once"]))
        request.send(Response(200, "text/plain", [b"twice"]))

    def do_stream(self, request: Request) -> None:
        request.send(Response(200, "text/event-stream", stream=self._parts()))

    def do_endless(self, request: Request) -> None:
        request.send(Response(200, "text/event-stream", stream=self._endless()))

    def do_broken(self, request: Request) -> None:
        request.send(Response(200, "text/event-stream", stream=self._broken()))

    async def _parts(self) -> AsyncIterator[bytes]:
        for k in range(3):
            yield b"part %d\n" % k
            yield b""
            await asyncio.sleep(0.05)

    async def _endless(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(50_000)
                await asyncio.sleep(0.001)
        finally:
            self.closed_streams += 1

    async def _broken(self) -> AsyncIterator[bytes]:
        yield b"half"
        raise RuntimeError("on purpose")


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def server(app: App) -> Iterator[Server]:
    """It runs in a thread."""
    started: queue.Queue[tuple[int, Callable[[], Any]]] = queue.Queue()

    async def serve() -> None:
        app.loop = loop = asyncio.get_running_loop()
        clock = Uptime(loop)
        made = HttpServer(app, ConnectionLimits(1.0, 50), clock)
        listening = socket.create_server(("127.0.0.1", 0))
        started.put((listening.getsockname()[1], lambda: loop.call_soon_threadsafe(made.stop)))
        await made.serve([listening])
        clock.stop()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    port, stop = started.get(timeout=10)
    yield Server(Path(), f"http://127.0.0.1:{port}", cast(Any, None))
    stop()
    thread.join(20)
    assert not thread.is_alive()


def answer(app: App, request: Request) -> None:
    """From another thread."""
    assert app.loop is not None
    app.loop.call_soon_threadsafe(request.send, Response(200, "text/plain", [b"at last"]))


def test_answers_come_in_the_order_of_the_requests(server: Server, app: App) -> None:
    with Wire(server) as wire_:
        wire_.send(
            GET % b"later" + GET % b"now" + b"POST /echo HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello" + GET % b"now"
        )
        until(lambda: app.waiting)
        time.sleep(0.1)
        assert app.ended == []
        answer(app, app.waiting[0])
        assert [wire_.answer()[2] for _ in range(4)] == [b"at last", b"now", b"hello", b"now"]
    assert app.ended == ["/later", "/now", "/echo", "/now"]


def test_a_request_is_answered_once(server: Server) -> None:
    with Wire(server) as wire_:
        wire_.send(GET % b"twice" + GET % b"now")
        assert [wire_.answer()[2] for _ in range(2)] == [b"once", b"now"]


def test_sixteen_may_wait(server: Server, app: App) -> None:
    """Small bodies that have come whole do not keep the next from being counted; whoever sends more is not heard."""
    post = b"POST /echo HTTP/1.1\r\nContent-Length: 2\r\n\r\nab"
    with Wire(server) as wire_:
        wire_.send(GET % b"later" + (post + GET % b"now") * 30)
        until(lambda: app.waiting)
        answer(app, app.waiting[0])
        come = wire_.rest()
    assert come.count(b"HTTP/1.1 200") == 16
    assert come.count(b"connection: close") == 1
    assert app.ended[1:5] == ["/echo", "/now"] * 2


def test_a_body_is_asked_for_once(server: Server) -> None:
    with Wire(server) as wire_:
        for path, answer in ((b"echo", b"hello"), (b"skip", b"skipped")):
            wire_.send(b"POST /%b HTTP/1.1\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n" % path)
            assert wire_.answer()[0] == 100
            wire_.send(b"hello")
            assert wire_.answer()[::2] == (200, answer)
        wire_.send(b"POST /now HTTP/1.1\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
        assert wire_.answer()[1]["connection"] == "close"
        assert wire_.rest() == b""


def test_a_body_that_is_cut_off_is_lost(server: Server, app: App) -> None:
    with Wire(server) as wire_:
        wire_.send(b"POST /echo HTTP/1.1\r\nContent-Length: 500\r\n\r\nhello")
    until(lambda: app.lost == ["/echo"])
    until(lambda: app.ended == ["/echo"])


# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_is_sent_in_chunks(server: Server) -> None:
    with Wire(server) as wire_:
        wire_.send(GET % b"stream" + GET % b"now")
        status, headers, _ = wire_.answer()
        assert (status, headers["transfer-encoding"], headers["content-type"]) == (200, "chunked", "text/event-stream")
        assert "content-length" not in headers
        while b"0\r\n\r\nHTTP" not in wire_._come:
            wire_._more()
        chunks, _, wire_._come = wire_._come.partition(b"0\r\n\r\n")
        assert chunks == b"".join(b"7\r\npart %d\n\r\n" % k for k in range(3))
        assert wire_.answer()[2] == b"now"


@pytest.mark.parametrize(
    "head", [b"GET /stream HTTP/1.0\r\n\r\n", b"GET /stream HTTP/1.1\r\nConnection: close\r\n\r\n"]
)
def test_a_stream_on_the_last_connection_ends_with_it(server: Server, head: bytes) -> None:
    with Wire(server) as wire_:
        wire_.send(head)
        _, headers, _ = wire_.answer()
        assert "transfer-encoding" not in headers
        assert wire_.rest() == b"part 0\npart 1\npart 2\n"


def test_a_stream_that_breaks_does_not_look_whole(server: Server) -> None:
    with Wire(server) as wire_:
        wire_.send(GET % b"broken")
        wire_.answer()
        assert not wire_.rest().endswith(b"0\r\n\r\n")


def test_a_stream_ends_when_nobody_reads_it_or_is_there(server: Server, app: App) -> None:
    with Wire(server) as gone:
        gone.send(GET % b"endless")
        assert gone.answer()[0] == 200
    until(lambda: app.closed_streams == 1)
    with Wire(server, receive_buffer=4096) as deaf:
        deaf.send(GET % b"endless")
        until(lambda: app.closed_streams == 2, 30.0)  # a second after it has begun not to read
        with contextlib.suppress(ConnectionError):
            deaf.rest()


def test_a_head_request_has_no_body(server: Server) -> None:
    with Wire(server) as wire_:
        wire_.send(b"HEAD /now HTTP/1.1\r\n\r\n" + GET % b"now")
        status, headers, _ = wire_.answer(bare=True)
        assert (status, headers["content-length"]) == (200, "3")
        assert wire_.answer()[2] == b"now"


def test_what_the_connection_refuses_is_counted(server: Server, app: App) -> None:
    with Wire(server) as wire_:
        wire_.send(b"nonsense\r\n\r\n")
        assert refusal(wire_.answer()) == (400, "malformed")
    until(lambda: app.codes == ["malformed"])
