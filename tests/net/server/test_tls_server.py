"""A server that speaks TLS: its own authority, certificates of clients, certificates from elsewhere."""

from __future__ import annotations

import contextlib
import json
import ssl
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from aflock.net.identity import members, tls
from aflock.net.storage import model_file as weights
from tests.command_line import aflock
from tests.net.real_server import ONES, SMALL, Peer, Server, Wire, invite, refusal, served, until


def test_tls_and_the_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    folder.mkdir()
    code, _, err = aflock("invite", folder, "early", cwd=tmp_path)  # before the first start
    assert (code, err) == (0, "")
    early = members.read_token_file(tmp_path / "early.token")
    with served(folder, SMALL, tls=True) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert early.ca == server.ca
        with Peer(server, early.token, context=tls.client_context(early.ca)) as peer:
            assert peer.hello()["name"] == "early"
            assert peer.pull()[0] == 200
            assert peer.push(ONES, next=True)[0] == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            Peer(server, context=ssl.create_default_context()).request("GET", "/healthz")
        with Wire(server) as plain:
            plain.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" not in plain.rest()
        with contextlib.ExitStack() as stack:  # those who never finish their handshake
            for _ in range(50):
                stack.enter_context(Wire(server)).send(b"\x16\x03\x01")
            begun = time.monotonic()
            with Peer(server) as peer:
                assert peer.request("GET", "/healthz")[0] == 200
            assert time.monotonic() - begun < 3

        code, _, err = aflock("invite", folder, "early", "--out", tmp_path / "again.token")
        assert code == 2
        assert "--again" in err
        assert aflock("invite", folder, "bob", "--out", tmp_path / "early.token")[0] == 2  # it exists
        assert aflock("invite", folder, "bob", "--out", tmp_path / "bob.token")[0] == 0
        assert stat.S_IMODE((tmp_path / "bob.token").stat().st_mode) == 0o600
        bob = members.read_token_file(tmp_path / "bob.token")
        with Peer(server, bob.token) as peer:
            assert peer.hello()["name"] == "bob"
        code, out, err = aflock("status", folder, "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert (found["version"], len(found["clients"]), found["verified"]) == (1, 2, True)
        assert "early" in aflock("status", server.url, "--ca", folder / "tls" / "ca.pem")[1]
        assert aflock("revoke", folder, "bob")[0] == 0
        until(lambda: len(server.status()["clients"]) == 1)
        assert aflock("revoke", folder, "nobody")[0] == 2
        assert aflock("export", folder, "--out", tmp_path / "early.safetensors")[0] == 2  # nothing is saved yet
        assert server.stop() == 0
    code, out, _ = aflock("export", folder, "--out", tmp_path / "model.safetensors")
    assert code == 0
    assert "version 1, the one of the last snapshot (a server writes one when it stops); 8 weights" in out
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert np.allclose(weights.flat(tmp_path / "model.safetensors"), -0.1)
    _check_exports_that_cannot_be(folder)
    code, _, err = aflock("status", folder)
    says = f"the server of {folder} is not running (its last address was {server.url}); start it with aflock serve"
    assert (code, err) == (1, f"aflock: {says}\n")
    assert "not running" not in aflock("status", server.url)[2]  # who asks for a URL may not know of a folder


def _check_exports_that_cannot_be(folder: Path) -> None:
    """Each is refused in one line, and the server's own files stay as they are."""
    before = (folder / "model.safetensors").read_bytes()
    (folder.parent / "recipe.py").write_text("from torch import nn\n\nmodel, batches = nn.Linear(7, 1), []\n")
    recipe = ["--recipe", str(folder.parent / "recipe.py")]
    cases: list[tuple[str | Path, str | Path, list[str], str]] = [
        (".", "model.safetensors", [], "is in the federation's data folder"),
        (".", "model.pt", recipe, "is in the federation's data folder"),
        (folder, folder.parent / "no" / "model.pt", recipe, f"the folder {folder.parent / 'no'} does not exist"),
        (folder, folder.parent, [], "is a folder"),
        ("nofolder", folder.parent / "x", [], "the folder nofolder does not exist"),
    ]
    for where, out, more, says in cases:
        code, _, err = aflock("export", where, "--out", out, *more, cwd=folder)
        assert (code, err.count("\n"), says in err) == (2, 1, True), err
    assert (folder / "model.safetensors").read_bytes() == before
    assert aflock("export", folder, "--out", folder.parent / "model.pt", *recipe)[0] == 0
    assert torch.load(folder.parent / "model.pt")["bias"].tolist() == pytest.approx([-0.1])


def test_certificates_on_both_sides(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    folder.mkdir()
    assert aflock("invite", folder, "alice", "--mtls", cwd=tmp_path)[0] == 0
    alice = members.read_token_file(tmp_path / "alice.token")
    bob = invite(folder, "bob")
    shown = tls.client_context(alice.ca, certificate=tmp_path / "alice.pem", key=tmp_path / "alice.key")
    with running_with_client_ca(folder) as server:
        with Peer(server, alice.token, context=shown) as peer:
            assert peer.hello()["name"] == "alice"
        trust = ["--token-file", "alice.token", "--certificate", "alice.pem", "--key", "alice.key"]
        assert aflock("status", server.url, "--json", *trust, cwd=tmp_path)[0] == 0
        assert aflock("status", server.url, "--json", *trust[:2], cwd=tmp_path)[0] == 1
        with Peer(server, bob, context=shown) as peer:  # bob's token does not help who has alice's certificate
            assert refusal(peer.request("POST", "/v1/hello")) == (401, "token")
        trusting = tls.client_context(alice.ca)
        with pytest.raises((ssl.SSLError, ConnectionError)):  # no certificate, no answer
            Peer(server, alice.token, context=trusting).request("POST", "/v1/hello")


@contextlib.contextmanager
def running_with_client_ca(folder: Path) -> Iterator[Server]:
    """A server that asks for certificates cannot be asked whether it is ready; whoever has one can."""
    certificate, key = tls.issue_client(folder, "nobody")
    files = folder.parent / "nobody.pem", folder.parent / "nobody.key"
    for file, pem in zip(files, (certificate, key), strict=True):
        file.write_bytes(pem)
    context = tls.client_context(tls.ca_text(folder), certificate=files[0], key=files[1])
    options = ["--client-ca", str(folder / "tls" / "ca.pem")]
    with served(folder, SMALL, tls=True, options=options, context=context) as server:
        yield server


def test_certificates_from_elsewhere(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "fed"
    elsewhere.mkdir()
    theirs = tls.prepare(elsewhere, ["127.0.0.1"])
    options = ["--certificate", str(theirs.certificate), "--key", str(theirs.key)]
    context = tls.client_context(tls.ca_text(elsewhere))
    document = {**SMALL, "model": {"name": "vector", "length": 1_000_000}}
    with served(folder, document, tls=True, options=options, context=context, changes=["server.idle=1.0"]) as server:
        assert aflock("invite", folder, "alice", cwd=tmp_path)[0] == 0
        assert members.read_token_file(tmp_path / "alice.token").ca is None
        assert not (folder / "tls").exists()
        token = members.read_token_file(tmp_path / "alice.token").token
        for last in (b"", b"Connection: close\r\n"):  # whoever reads slowly gets all of it, the end included
            with Wire(server, receive_buffer=4096) as wire_:
                wire_.socket = context.wrap_socket(wire_.socket, server_hostname="127.0.0.1")
                wire_.send(f"GET /v1/model HTTP/1.1\r\nAuthorization: Bearer {token}\r\n".encode() + last + b"\r\n")
                assert len(wire_.answer(pause=0.006)[2]) == 4_000_000
