"""Tokens, URLs, proxies and TLS: what a client sends, to which server, and what it shows."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any

import pytest

from aflock.errors import AflockError, InputError, ParameterError
from aflock.net.client.client import Client, Session
from aflock.net.client.session import Unavailable, Untrusted, address, status
from aflock.net.identity import tls
from aflock.net.protocol.refusals import Refused
from aflock.net.protocol.urls import is_loopback
from tests.net.client.fake_server import SECRET, Refusal
from tests.net.client.helpers import made, one, plain

pytestmark = pytest.mark.timeout(60)


def test_the_token_is_never_shown(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.DEBUG)
    shown = []
    with plain() as server:
        client = made(server, give_up=0.3, timeout=0.2)
        server.faults["hello"] = ["drop before", "cut", "hang"]
        server.faults["job"] = [Refusal(302), "cut"]
        for _ in range(3):
            try:
                client.run_with(one, jobs=1)
            except AflockError as error:
                shown += [repr(error), str(error), repr(error.__cause__), str(error.__traceback__)]
        shown += [repr(client), repr(Session(server.url, server.token()))]
    with pytest.raises(ParameterError) as raised:
        Client(server.url, f"aflock1.alice.{SECRET}\u00e9")
    assert SECRET not in "".join([*shown, str(raised.value), caplog.text, *capfd.readouterr()])
    assert "alice" in repr(client)


def test_a_token_file_brings_the_token_and_the_authority(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "alice.token"
    with plain() as server:
        file.write_text(server.token() + "\n")
        file.chmod(0o644)
        assert Client(server.url, file, keep=False).run_with(one, jobs=1).jobs == 1
        assert Client(server.url, str(file), keep=False).name == "alice"
    assert "run chmod 600" in caplog.text
    with pytest.raises(InputError, match="does not exist; expected the one"):
        Client(server.url, "nobody.token")


@pytest.mark.parametrize(
    "url", ["", "host:8443", "ftp://host", "https://", "http://host:1", "https://user:word@host", "http://h/?q=1", "http://127.0.0.1:x"]
)  # fmt: skip
def test_an_address_must_be_one_and_keep_the_token_to_itself(url: str) -> None:
    with pytest.raises(ParameterError, match=r"URL|token unencrypted"):
        Client(url, f"aflock1.alice.{SECRET}")


def test_plain_http_is_for_this_machine_or_by_demand() -> None:
    for host in ("localhost", "127.0.0.1", "127.8.8.8", "[::1]"):
        address(f"http://{host}:80")
    assert address("http://example.org", insecure=True).hostname == "example.org"
    Client("http://example.org", f"aflock1.alice.{SECRET}", insecure=True)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True), ("LOCALHOST", True), ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True),
        ("[::1]", True), ("", False), ("[", False), ("0.0.0.0", False), ("::", False), ("10.0.0.1", False),
        ("localhost.example.org", False),
    ],
)  # fmt: skip
def test_this_machine_is_known_by_name_and_address(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_a_proxy_is_not_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    with plain() as proxy:  # it answers whatever server the request is for
        monkeypatch.setenv("http_proxy", proxy.url)
        away = Client("http://example.org", proxy.token(), insecure=True, keep=False)
        assert away.run_with(one, jobs=1).jobs == 1
        assert {headers["host"] for _, headers in proxy.asked} == {"example.org"}
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with plain() as server:
        assert made(server).run_with(one, jobs=1).jobs == 1


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tls.Certificates:
    return tls.prepare(tmp_path_factory.mktemp("fed"), ["127.0.0.1"])


def test_an_encrypted_line_to_a_server_that_proves_itself(certificates: tls.Certificates) -> None:
    assert certificates.ca is not None
    with plain(tls=tls.server_context(certificates)) as server:
        server.faults["update"] = ["drop after", "cut", "drop before"]
        for ca in (certificates.ca, certificates.ca.read_text()):
            assert made(server, ca=ca).run_with(one, jobs=2).jobs == 2
        with pytest.raises(Untrusted, match="check the URL, the ca"):
            made(server).run_with(one)


def test_a_client_without_the_certificate_it_needs_is_told(certificates: tls.Certificates, tmp_path: Path) -> None:
    assert certificates.ca is not None
    own = tls.issue_client(certificates.ca.parent.parent, "alice")
    pair: dict[str, Any] = {"certificate": tmp_path / "alice.pem", "key": tmp_path / "alice.key"}
    for file, content in zip(pair.values(), own, strict=True):
        file.write_bytes(content)
    with plain(tls=tls.server_context(certificates, certificates.ca)) as server:
        assert made(server, ca=certificates.ca, **pair).run_with(one, jobs=1).jobs == 1
        with pytest.raises(Unavailable, match="if the server requires client certificates, give certificate= and key="):
            made(server, ca=certificates.ca, give_up=0.1).run_with(one)


def test_https_to_a_server_without_it_is_told() -> None:
    with plain() as server, pytest.raises(Untrusted, match=r"WRONG_VERSION_NUMBER|wrong version"):
        Client(server.url.replace("http", "https"), server.token(), keep=False, give_up=0.5).run_with(one)


def test_http_to_a_server_with_tls_is_told(certificates: tls.Certificates) -> None:
    with plain(tls=tls.server_context(certificates)) as server:
        url = server.url.replace("https", "http")
        with pytest.raises(
            Unavailable, match="the connection broke; if the server uses TLS, write https:// in the URL"
        ):
            Client(url, server.token(), keep=False, give_up=0.1).run_with(one)
        with pytest.raises(Unavailable, match="if the server uses TLS, write https://"):
            status(url)
    with plain() as server:  # who has had an answer knows what is spoken
        server.faults["job"] = ["drop before"] * 1000
        with pytest.raises(Unavailable, match=r"the connection broke$"):
            made(server, give_up=0.1).run_with(one)


def test_the_status_says_whom_it_has_spoken_to(certificates: tls.Certificates) -> None:
    with plain() as server:
        assert status(server.url) == {"version": 0, "state": "running", "certificate": None, "verified": False}
        server.faults["status"] = [Refusal(401, "token", "send your token")]
        with pytest.raises(Refused, match="send your token"):
            status(server.url)
    with pytest.raises(Unavailable):
        status(server.url, timeout=1)
    shown = tls.fingerprint(certificates.certificate.read_bytes())
    with plain(tls=tls.server_context(certificates)) as server:
        assert status(server.url)["verified"] is False
        assert status(server.url)["certificate"] == shown
        assert status(server.url, ca=certificates.ca)["verified"] is True
        assert status(server.url, fingerprint=shown.replace(":", "").lower())["verified"] is True
        with pytest.raises(Untrusted, match="shows the certificate"):
            status(server.url, fingerprint="00" * 32)
        with pytest.raises(Untrusted, match="not signed by that authority"):
            status(server.url, ca=_other_authority())


def _other_authority() -> str:
    return ssl.DER_cert_to_PEM_cert(next(iter(_system_authorities())))


def _system_authorities() -> list[bytes]:
    context = ssl.create_default_context()
    return context.get_ca_certs(binary_form=True)
