"""Data folders written by an earlier version: this one serves and replays them to the same bits.

`fixtures/NAME` is the folder of a server that was stopped once (a snapshot), started again and killed (records after
the snapshot). `expected.json` holds the version, the number of updates and the bytes of the model that the version
which wrote the folder ended with.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.net.real_server import Peer, invite, running

FOLDERS = sorted(path for path in (Path(__file__).parent / "fixtures").iterdir() if path.is_dir())


ENDED = sorted(path for path in (Path(__file__).parent / "ended_federations").iterdir() if path.is_dir())
"""Folders of federations that have ended: they can be replayed, and have nothing to serve."""


@pytest.fixture(params=FOLDERS, ids=lambda path: path.name)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(request.param, tmp_path / "fed"))


def expected(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    return found


def test_the_folder_replays_to_the_same_bits(folder: Path) -> None:
    from aflock.net.commands.replay import replay

    found, wanted = replay(folder / "trace.jsonl"), expected(folder)
    assert found["agrees"]
    assert (found["version"], found["updates"]) == (wanted["version"], wanted["updates"])
    assert found["model_sha256"] == hashlib.sha256(bytes.fromhex(wanted["model"])).hexdigest()


def test_the_folder_is_served_from_the_same_bits(folder: Path) -> None:
    document, wanted = tomllib.loads((folder / "federation.toml").read_text()), expected(folder)
    told = (folder / "trace.jsonl").read_bytes()
    with running(folder, document) as server:
        token = invite(folder, "alice", again=True)
        with Peer(server, token) as peer:
            assert peer.hello()["version"] == wanted["version"]
            _, _, body = peer.request("GET", "/v1/model")
            assert np.frombuffer(body, "<f4").tobytes().hex() == wanted["model"]
        assert server.status()["updates"] == wanted["updates"]
    assert (folder / "trace.jsonl").read_bytes().startswith(told)


@pytest.mark.parametrize("ended", ENDED, ids=lambda path: path.name)
def test_an_ended_federation_replays_to_the_same_bits(ended: Path, tmp_path: Path) -> None:
    """mr-asyncfl: earlier versions forgot the model before an aggregation when the next update came."""
    from aflock.net.commands.replay import replay

    folder = Path(shutil.copytree(ended, tmp_path / "fed"))
    found, wanted = replay(folder / "trace.jsonl"), expected(folder)
    assert found["agrees"]
    assert {name: found[name] for name in wanted} == wanted
