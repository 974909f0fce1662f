"""The log: one line per request, and nothing secret in it or in a file that others may read."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import numpy as np

from tests.net.real_server import SMALL, Peer, invite, output, served, until


def test_nothing_secret_is_logged_or_readable(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    folder.mkdir(mode=0o755)
    old = os.umask(0)  # as careless as can be
    try:
        document = {**SMALL, "model": {"name": "logistic"}, "data": {"name": "digits"}, "evaluation": {"every": 1}}
        with served(folder, document, level="debug", tls=True, options=["--log-json"]) as server:
            alice = Peer(server, invite(folder, "alice"))
            length = alice.hello()["length"]
            alice.pull()
            assert alice.push(np.ones(length), next=True)[0] == 200
            alice.request("GET", f"/{alice.token}?token={alice.token}", headers={"X-Token": str(alice.token)})
            alice.request("POST", f"/v1/jobs/{alice.token}/update")
            wrong = "aflock1.alice." + "x" * 43
            Peer(server, wrong).pull()
            until(lambda: (folder / "best.json").exists())
            assert server.stop() == 0
    finally:
        os.umask(old)
    secret = str(alice.token).rpartition(".")[2]
    written = [file for file in folder.rglob("*") if file.is_file()] + [output(folder, "err"), output(folder, "out")]
    for file in written:
        assert secret.encode() not in file.read_bytes(), file
        assert b"x" * 43 not in file.read_bytes(), file
    modes = {str(file.relative_to(folder)): stat.S_IMODE(file.stat().st_mode) for file in folder.rglob("*")}
    for name in ("federation.toml", "trace.jsonl", "address.json", "best.json", "best.safetensors", "members.json"):
        assert modes.pop(name) == 0o600, name
    assert all(not mode & 0o077 for mode in modes.values()), modes
    lines = [json.loads(line) for line in server.errors.splitlines()]
    assert all({"time", "level", "message"} <= set(line) for line in lines)
    told = [(line["client"], line["method"], line["what"], line["status"]) for line in lines if "what" in line]
    assert ("alice", "POST", "/v1/hello", 200) in told
    assert ("alice", "GET", "/v1/job", 200) in told
    assert ("alice", "POST", "/v1/jobs/0/update", 200) in told
    assert ("", "GET", "?", 404) in told
