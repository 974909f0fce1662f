"""What the server refuses, over real sockets: every row of docs/protocol.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.net.real_server import ONES, Peer, Server, Wire, invite, output, refusal, update_head, working

HOST = b"Host: x\r\n"


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/", (404, "path")),
        ("GET", "/v1", (404, "path")),
        ("GET", "/v1/jobs/1", (404, "path")),
        ("POST", "/v1/jobs/x/update", (404, "path")),
        ("POST", "/v1/jobs/-1/update", (404, "path")),
        ("POST", "/v1/jobs/1234567890123456789/update", (404, "path")),
        ("POST", "/v1/jobs/1/update/", (404, "path")),
        ("GET", "/v1/../healthz", (404, "path")),
        ("GET", "/v1/jobs/1/update", (405, "method")),
        ("DELETE", "/v1/jobs/1/decline", (405, "method")),
        ("GET", "/v1/hello", (405, "method")),
        ("POST", "/v1/job", (405, "method")),
        ("PUT", "/healthz", (405, "method")),
    ],
)
def test_what_does_not_exist(shared: Server, method: str, path: str, expected: tuple[int, str]) -> None:
    with _joined_once(shared, "walker") as peer:
        assert refusal(peer.request(method, path)) == expected
        assert peer.request("GET", "/healthz")[::2] == (200, b"ok\n")  # the connection is as good as before


def _joined_once(server: Server, name: str) -> Peer:
    """The same client for many tests."""
    file = output(server.folder, name)
    if not file.exists():
        file.write_text(invite(server.folder, name))
    peer = Peer(server, file.read_text())
    peer.hello()
    return peer


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"version": "x"}, (400, "malformed")),
        ({"version": "-1"}, (400, "malformed")),
        ({"steps": "1.5"}, (400, "malformed")),
        ({"examples": "9" * 19}, (400, "malformed")),
        ({"vectors": "gradient,gradient"}, (400, "malformed")),
        ({"vectors": "Gradient!"}, (400, "malformed")),
        ({"encoding": "float64"}, (400, "malformed")),
        ({"encoding": "float16"}, (422, "unusable")),
        ({"vectors": ""}, (422, "unusable")),
        ({"vectors": "model"}, (422, "unusable")),
        ({"vectors": "gradient,model"}, (422, "unusable")),
        ({"steps": "0"}, (422, "unusable")),
        ({"examples": "0"}, (422, "unusable")),
        ({"version": "999"}, (422, "unusable")),
    ],
)
def test_an_update_with_a_wrong_head(shared: Server, changed: dict[str, str], expected: tuple[int, str]) -> None:
    with _joined_once(shared, "clumsy") as peer:
        assert peer.pull()[0] == 200
        before = shared.status()["updates"]
        assert refusal(peer.push(ONES, changed=changed)) == expected
        assert shared.status()["updates"] == before
        assert peer.push(ONES)[0] == 200  # the job is still open, and a good update makes up for the bad one


@pytest.mark.parametrize(
    "vectors",
    [
        [np.full(8, np.nan)],
        [np.array([1, 1, 1, 1, 1, 1, 1, np.inf])],
        [np.array([-np.inf, 1, 1, 1, 1, 1, 1, 1])],
        [np.full(8, 1e30)],
        [np.full(8, 500.0)],
        [np.ones(7)],
        [np.ones(9)],
        [],
    ],
)
def test_an_update_no_rule_can_use(shared: Server, vectors: list[np.ndarray[Any, Any]]) -> None:
    with _joined_once(shared, "careless") as peer:
        assert peer.pull()[0] == 200
        before = shared.status()
        assert refusal(peer.push(*vectors)) == (422, "unusable")
        after = shared.status()
        assert after["updates"] == before["updates"]
        assert after["refused"]["unusable"] == before["refused"].get("unusable", 0) + 1
        assert peer.push(ONES)[0] == 200


def test_queries_and_bodies_that_are_none(shared: Server) -> None:
    with _joined_once(shared, "walker") as peer:
        for wait in ("x", "-1", "1.5", "9" * 19, "%00"):
            answer = peer.request("GET", f"/v1/job?wait={wait}")
            assert refusal(answer) == (400, "malformed"), wait
            assert b"the query parameter wait is not a number" in answer[2]
        assert refusal(peer.request("GET", "/v1/job?" + "&".join("a=1" for _ in range(9)))) == (400, "malformed")
        assert refusal(peer.request("POST", "/v1/hello", bytes(70_000))) == (413, "too-large")
    with _joined_once(shared, "walker") as peer:  # the connection was given up with that answer
        assert peer.request("POST", "/v1/hello", b"anything")[0] == 200
        assert peer.request("POST", "/v1/hello", b"anything", {"Content-Length": "8 \t"})[0] == 200
        assert peer.request("GET", "/v1/job?wait=0&other=%FF")[0] == 200
        assert peer.pull()[0] == 200
        assert refusal(peer.push(np.zeros(100))) == (413, "too-large")
        assert peer.request("GET", "/healthz")[0] == 200
        del peer.job["aflock-version"]
        path = f"/v1/jobs/{peer.job['aflock-job']}/update"
        assert refusal(peer.request("POST", path, b"x")) == (400, "malformed")


def test_a_body_must_say_how_long_it_is(shared: Server) -> None:
    with working(shared, "chunky") as chunky:
        path = f"/v1/jobs/{chunky.job['aflock-job']}/update"
        with Wire(shared) as wire_:
            head = update_head(chunky, 0).replace(b"Content-Length: 0\r\n", b"")
            wire_.send(head)
            assert refusal(wire_.answer()) == (411, "length")
            wire_.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert wire_.answer()[0] == 200
        for more in (b"5\r\nhello\r\n0\r\n\r\n", b"0\r\nX-Trailer: x\r\n\r\n", b"zz\r\n", b""):
            with Wire(shared) as wire_:
                wire_.send(f"POST {path} HTTP/1.1\r\n".encode() + HOST + b"Transfer-Encoding: chunked\r\n\r\n" + more)
                assert refusal(wire_.answer()) == (411, "length")
                assert wire_.rest() == b""
        assert chunky.push(ONES)[0] == 200
