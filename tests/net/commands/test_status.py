"""`aflock status`: tokens, certificates, fingerprints, and how long an answer may be."""

from __future__ import annotations

import contextlib
import io
import json
import ssl
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aflock import cli, strategies
from aflock.errors import ParameterError
from aflock.net.client import status as status_request
from aflock.net.client.errors import ProtocolError, Untrusted
from aflock.net.client.status import status
from aflock.net.identity import members, tls
from tests.net.client.fake_server import FakeServer, serving
from tests.net.real_server import output, running

pytestmark = pytest.mark.timeout(120)


def plain(**options: Any) -> Any:
    return serving(strategies.create("asgd", clients=1), np.zeros(5, np.float32), **options)


def _aflock(*arguments: str | Path) -> tuple[int, str, str]:
    """The command line: exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([*map(str, arguments)])
    return code, out.getvalue(), err.getvalue()


def _invited(folder: Path, name: str, *more: str) -> Path:
    file = folder.parent / f"{name}{len(more)}.token"
    assert _aflock("invite", folder, name, "--out", file, *more)[0] == 0
    return file


# --- a real server ---------------------------------------------------------------------------------------------------


def test_a_closed_status_is_shown_to_who_brings_a_token(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    folder.mkdir()
    alice = _invited(folder, "alice")
    with running(folder, tls=True, changes=["server.status=token"], orderly=False) as server:
        for where in (server.url, folder):
            code, out, err = _aflock("status", where, "--json")
            assert (code, out, err.count("\n")) == (1, "", 1)
            assert "--token-file" in err
            code, out, err = _aflock("status", where, "--token-file", alice, "--json")
            assert (code, err) == (0, "")
            assert json.loads(out)["verified"] is True
        assert "asgd" in _aflock("status", server.url, "--token-file", alice)[1]

        bare = tmp_path / "bare.token"
        members.write_new(bare, members.token_text(members.read_token_file(alice).token, None))
        code, _, err = _aflock("status", server.url, "--token-file", bare)
        assert code == 1
        assert "the token is not sent to" in err
        assert _aflock("status", server.url, "--token-file", bare, "--ca", folder / "tls" / "ca.pem")[0] == 0

        newer = _invited(folder, "alice", "--again")
        assert _aflock("status", server.url, "--token-file", newer)[0] == 0
        code, _, err = _aflock("status", server.url, "--token-file", alice)
        assert (code, err) == (1, "aflock: the token is not valid\n")


def test_serve_prints_the_fingerprint_that_an_unverified_status_shows(tmp_path: Path) -> None:
    with running(tmp_path / "fed", tls=True, orderly=False) as server:
        certificate, authority = _printed(server.folder)
        assert authority == tls.fingerprint(str(server.ca).encode())
        code, out, err = _aflock("status", server.url, "--json")
        assert (code, json.loads(out)["certificate"], json.loads(out)["verified"]) == (0, certificate, False)
        assert certificate in err
        assert status(server.url, fingerprint=certificate)["verified"] is True


def test_the_certificate_of_somebody_else_has_a_fingerprint_too(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    theirs = tls.prepare(elsewhere, ["127.0.0.1"])
    options = ["--certificate", str(theirs.certificate), "--key", str(theirs.key)]
    context = tls.client_context(tls.ca_text(elsewhere))
    with running(tmp_path / "fed", tls=True, options=options, context=context, orderly=False) as server:
        assert _printed(server.folder) == [status(server.url)["certificate"]]


def _printed(folder: Path) -> list[str]:
    """The fingerprints `aflock serve` has printed."""
    lines = output(folder, "out").read_text().splitlines()
    return [line.split("sha256: ")[1] for line in lines if "sha256: " in line]


# --- a server that can be anything -----------------------------------------------------------------------------------


def test_a_token_does_not_go_to_who_cannot_be_trusted(tmp_path: Path) -> None:
    certificates = tls.prepare(tmp_path, ["127.0.0.1"])
    shown = tls.fingerprint(certificates.certificate.read_bytes())
    with plain(tls=tls.server_context(certificates)) as server:
        token = server.token()
        with pytest.raises(Untrusted, match="the token is not sent to"):
            status(server.url, token=token)
        with pytest.raises(Untrusted, match="not signed by that authority"):
            status(server.url, token=token, ca=_other_authority())
        with pytest.raises(Untrusted, match="shows the certificate"):
            status(server.url, token=token, fingerprint="00" * 32)
        assert _tokens(server) == []
        status(server.url, token=token, ca=certificates.ca)
        status(server.url, token=token, fingerprint=shown)
        status(server.url)
        assert _tokens(server) == [f"Bearer {token}", f"Bearer {token}", None]
    with pytest.raises(ParameterError, match="would send the token unencrypted"):
        status("http://example.org", token=token)


def _tokens(server: FakeServer) -> list[str | None]:
    return [headers.get("authorization") for _, headers in server.asked]


def _other_authority() -> str:
    return ssl.DER_cert_to_PEM_cert(ssl.create_default_context().get_ca_certs(binary_form=True)[0])


def test_plain_http_has_no_certificate_to_complain_about() -> None:
    with plain() as server:
        assert _aflock("status", server.url, "--json")[::2] == (0, "")


@pytest.mark.parametrize(("number", "says"), [(1, "waits for 1 more client\n"), (2, "waits for 2 more clients\n")])
def test_one_is_not_many(number: int, says: str, tmp_path: Path) -> None:
    with running(tmp_path / "fed", changes=[f"federation.clients={number}"], orderly=False) as server:
        assert says in _aflock("status", server.url)[1]


def test_a_status_of_ten_thousand_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = [{"name": f"{number:064}", "number": number, "what": "x" * 150} for number in range(10_000)]
    assert len(json.dumps(crowd)) > 2 << 20
    with plain() as server:
        server.more = {"clients": crowd}
        assert status(server.url)["clients"] == crowd
        monkeypatch.setattr(status_request, "LONGEST_STATUS", 1 << 20)
        with pytest.raises(ProtocolError, match="the status is longer than"):
            status(server.url)
