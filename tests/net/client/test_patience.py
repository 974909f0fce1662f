"""Slow uploads, leases that are shorter than an upload, and a server process that was stopped, over real sockets."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from pathlib import Path

import numpy as np

from tests.net.real_server import SMALL, Document, Peer, Wire, bearer, refusal, running, until, update_head, working

LENGTH = 11_250_000
"""Weights of an update of 45 MB: the server has memory for two of them."""
LARGE: Document = {**SMALL, "strategy": {"name": "asgd", "lr": 1.0}, "model": {"name": "vector", "length": LENGTH}}
RATE = 70_000
"""Bytes per second: a little more than the server requires."""


class Trickle(threading.Thread):
    """Sends a large update at `RATE`, as long as the server takes it."""

    def __init__(self, wire_: Wire, peer: Peer) -> None:
        super().__init__(daemon=True)
        self._wire, self._over = wire_, threading.Event()
        wire_.send(update_head(peer, 4 * LENGTH))

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while not self._over.wait(0.1):
                self._wire.send(bytes(RATE // 10))

    def stop(self) -> None:
        self._over.set()
        self.join()


def test_two_slow_uploads_of_one_client_leave_a_place_for_another(tmp_path: Path) -> None:
    with running(tmp_path / "fed", LARGE, orderly=False) as server, contextlib.ExitStack() as stack:
        greedy, honest = working(server, "greedy"), working(server, "honest")
        slow = list[Trickle]()
        wires = [stack.enter_context(Wire(server)) for _ in range(2)]
        for wire_ in wires:
            slow.append(Trickle(wire_, greedy))
            slow[-1].start()
            stack.callback(slow[-1].stop)
            time.sleep(0.3)
        begun = time.monotonic()
        assert honest.push(np.ones(LENGTH, np.float32))[0] == 200
        assert time.monotonic() - begun < 25  # it is one of the two at once; a body may wait for 30 s
        assert refusal(wires[0].answer()) == (503, "busy")  # the older one was given up for it
        assert slow[1].is_alive()
        assert "Traceback" not in server.errors


def test_a_lease_that_is_shorter_than_the_upload_does_not_run_out(tmp_path: Path) -> None:
    document = {**SMALL, "model": {"name": "vector", "length": 100_000}}
    with running(tmp_path / "fed", document, changes=["server.lease=1.0"]) as server:
        with working(server, "slow") as peer, Wire(server) as wire_:
            wire_.send(update_head(peer, 400_000))
            for _ in range(20):
                wire_.send(bytes(20_000))
                time.sleep(0.25)
            assert wire_.answer()[0] == 200
        assert server.status()["dropped"] == 0


def test_nobody_is_punished_for_the_time_in_which_the_server_stood_still(tmp_path: Path) -> None:
    """The server is stopped for longer than its lease and its deadlines for silent connections and slow bodies."""
    document = {**SMALL, "model": {"name": "vector", "length": 100_000}}
    changes = ["server.lease=3.0", "server.idle=3.0"]
    with running(tmp_path / "fed", document, changes=changes) as server, contextlib.ExitStack() as stack:
        idle, uploading = working(server, "idle"), working(server, "uploading")
        quiet, half, body = (stack.enter_context(Wire(server)) for _ in range(3))
        half.send(b"GET /healthz HTTP/1.1\r\n")
        body.send(update_head(uploading, 400_000) + bytes(1000))
        quiet.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert quiet.answer()[0] == 200
        time.sleep(0.7)
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(14)
        server.process.send_signal(signal.SIGCONT)
        time.sleep(1.2)  # the leases are looked at once a second
        half.send(b"Host: x\r\n\r\n")
        assert half.answer()[0] == 200
        quiet.send(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n" + bearer(idle) + b"\r\n")
        assert quiet.answer()[0] == 200
        body.send(bytes(399_000))
        assert body.answer()[0] == 200
        with Peer(server, idle.token, job=idle.job) as again:
            assert again.push(np.ones(100_000, np.float32))[0] == 200
        assert server.status()["dropped"] == 0
        with working(server, "late"):  # and leases still run out
            until(lambda: server.status()["dropped"] == 1)
