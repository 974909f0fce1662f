"""Heads of requests: what is understood, in whatever pieces it comes, and what is refused."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aflock.net.protocol.refusals import Refused
from aflock.net.server.http.head import Head
from aflock.net.server.http.limits import HEADER_BYTES, HEADERS, URL_BYTES
from aflock.net.server.http.request import Request

FIRST = b"POST /v1/jobs/17/update?next=1 HTTP/1.1\r\n"


FIELDS = b"Host: x\r\nAUTHORIZATION: Bearer aflock1.Ann.Se:cret\r\nContent-Length:   4\r\nx-empty:\r\n"


HEAD = FIRST + FIELDS + b"\r\n"


def read(data: bytes, pieces: list[bytes] | None = None) -> tuple[Request | None, bytes]:
    """The request whose head the data begin with, and what is left of them, as a connection reads them."""
    head, rest = Head(), b""
    for piece in [data] if pieces is None else pieces:
        rest += piece
        while rest:
            used, request = head.feed(rest)
            assert used > 0
            rest = rest[used:]
            if request is not None:
                return request, data[head.size :]
    return None, rest


def understood(data: bytes) -> Request:
    request, _ = read(data)
    assert request is not None
    return request


def refused(data: bytes) -> tuple[int, str]:
    with pytest.raises(Refused) as raised:
        read(data)
    return raised.value.status, raised.value.code


def test_a_plain_head() -> None:
    request, rest = read(HEAD + b"body")
    assert request is not None
    assert (request.method, request.path, request.query) == ("POST", "/v1/jobs/17/update", b"next=1")
    assert (request.length, request.keep_alive, request.upgrades, rest) == (4, True, False, b"body")
    assert request.headers == {
        "host": "x", "authorization": "Bearer aflock1.Ann.Se:cret", "content-length": "4", "x-empty": "",
    }  # fmt: skip
    assert request.option("next") == "1"
    assert request.option("other") == ""


def test_a_head_in_two_pieces_is_the_same() -> None:
    data = b"\r\n\r\n" + HEAD + b"body"
    whole = understood(data)
    for cut in range(1, len(data)):
        request, rest = read(data, [data[:cut], data[cut:]])
        assert request is not None
        assert (request.path, request.headers, rest) == (whole.path, whole.headers, b"body")


def test_a_head_byte_by_byte_is_the_same() -> None:
    request, _ = read(HEAD, [bytes([byte]) for byte in HEAD])
    assert request is not None
    assert request.headers == understood(HEAD).headers


def test_a_head_that_has_not_come_whole_is_none() -> None:
    assert all(read(HEAD[:length])[0] is None for length in range(len(HEAD)))


@pytest.mark.parametrize(
    ("other", "keep_alive"),
    [
        (HEAD.replace(b"HTTP/1.1", b"HTTP/1.0"), False),
        (HEAD.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Host: x", b"Connection: keep-alive"), False),
        (HEAD.replace(b"Host: x", b"Connection: close"), False),
        (HEAD.replace(b"Host: x", b"Connection: TE, Close"), False),
        (HEAD.replace(b"Host: x", b"Connection: keep-alive"), True),
        (b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n", False),
    ],
)
def test_whether_another_request_may_follow(other: bytes, keep_alive: bool) -> None:
    assert understood(other).keep_alive is keep_alive


def test_another_protocol_is_offered() -> None:
    request = understood(HEAD.replace(b"Host: x", b"Connection: Upgrade\r\nUpgrade: h2c"))
    assert (request.upgrades, request.keep_alive) == (True, False)


@pytest.mark.parametrize(
    ("other", "value"),
    [
        (HEAD.replace(b"Host: x", b"Host: x  "), "x"),
        (HEAD.replace(b"Host: x", b"Host: \tx\t"), "x"),
        (HEAD.replace(b"Host: x", b"Host: \xe4"), "\xe4"),
        (HEAD.replace(b"Host: x", b"host: y\r\nHost: x"), "x"),
    ],
)
def test_values_of_headers(other: bytes, value: str) -> None:
    assert understood(other).headers["host"] == value


@pytest.mark.parametrize(
    "other",
    [
        HEAD.replace(b"POST", b"post"),
        HEAD.replace(b"HTTP/1.1", b"HTTP/9.9"),
        HEAD.replace(b"\r\n", b"\n"),
        HEAD.replace(b"Host: x\r\n", b"Host: x\n"),
        HEAD.replace(b"Host: x", b"Host : x"),
        HEAD.replace(b"Host: x", b"Host"),
        HEAD.replace(b"Host: x", b": x"),
        HEAD.replace(b"Host: x", b"Host: x\r\n y"),
        HEAD.replace(b"Host: x", b"Host: \x00x"),
        HEAD.replace(b"Host: x", b"H\xe4st: x"),
        HEAD.replace(b"Host: x", b"Content-Length: 5"),
        HEAD.replace(b"Content-Length:   4", b"Content-Length: -4"),
        HEAD.replace(b"Content-Length:   4", b"Content-Length: 4x"),
        HEAD.replace(b"Content-Length:   4", b"Content-Length: " + b"1" * 19),
        HEAD.replace(b"Content-Length:   4", b"Content-Length: " + b"0" * 5000),
        HEAD.replace(b"Host: x", b"Transfer-Encoding: chunked"),  # beside a Content-Length
        HEAD.replace(b"/v1", b"http://v1").replace(b"/jobs/17/update", b""),
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
)
def test_what_is_not_http(other: bytes) -> None:
    assert other != HEAD
    assert refused(other) == (400, "malformed")


def fields(count: int, size: int = 1) -> bytes:
    return b"".join(b"x-%d: %b\r\n" % (k, b"y" * size) for k in range(count))


@pytest.mark.parametrize(
    ("within", "beyond"),
    [
        (FIRST + fields(HEADERS) + b"\r\n", FIRST + fields(HEADERS + 1) + b"\r\n"),
        (b"GET /" + b"a" * (URL_BYTES - 1) + b" HTTP/1.1\r\n\r\n", b"GET /" + b"a" * URL_BYTES + b" HTTP/1.1\r\n\r\n"),
        (FIRST + fields(16, 1000) + b"\r\n", FIRST + fields(17, 1000) + b"\r\n"),
        (HEAD + b"body", b"GET / HTTP/1.1\r\nX: " + b"y" * HEADER_BYTES),
        (b"\r\n" * 1000 + HEAD, b"\r\n" * 9000),
        (FIRST + b"X: 1\r\n" * HEADERS + b"\r\n", FIRST + b"X: 1\r\n" * (HEADERS + 1) + b"\r\n"),
    ],
)
def test_limits(within: bytes, beyond: bytes) -> None:
    understood(within)
    assert refused(beyond) == (431, "headers")


@given(st.binary(max_size=300), st.integers(0, len(HEAD)), st.integers(1, 400))
def test_what_is_understood_is_what_was_sent(noise: bytes, offset: int, cut: int) -> None:
    data = HEAD[:offset] + noise + HEAD[offset:]
    try:
        request, rest = read(data)
    except Refused:
        with pytest.raises(Refused):  # however it is cut
            read(data, [data[:cut], data[cut:]])
        return
    if request is None:
        return
    head = data[: len(data) - len(rest)]
    assert head.endswith(b"\r\n\r\n")
    lines = head.decode("latin-1").lstrip("\r\n").split("\r\n")
    sent = dict(line.split(":", 1) for line in lines[1:-2])
    assert request.headers == {name.lower(): value.strip(" \t") for name, value in sent.items()}
    again, _ = read(data, [data[:cut], data[cut:]])
    assert again is not None
    assert again.headers == request.headers


def test_a_head_leaves_nothing_to_the_garbage_collector() -> None:
    """A cycle in every request would cost more than the parser."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(100):
            read(HEAD)
        assert gc.collect() < 100
    finally:
        gc.enable()
