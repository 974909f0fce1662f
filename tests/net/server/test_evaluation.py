"""The server measures its model: targets, the best model, restarts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from aflock import data, models
from aflock.net.protocol import wire
from aflock.net.storage import model_file as weights
from tests.command_line import aflock
from tests.net.real_server import SMALL, Document, Peer, invite, refusal, served, until, working


def test_the_server_measures_and_ends_when_it_is_good_enough(tmp_path: Path) -> None:
    document: Document = {
        "strategy": {"name": "asgd", "lr": 0.5},
        "model": {"name": "logistic"},
        "data": {"name": "digits"},
        "federation": {"clients": 1},
        "evaluation": {"every": 2, "target": 0.8},
    }
    dataset = data.load("digits", seed=0)
    model = models.create("logistic", dataset)
    with served(tmp_path / "fed", document) as server:
        alice = working(server, "alice")
        body = alice.request("GET", "/v1/model")[2]
        for _ in range(400):
            gradient = _gradient(model, wire.decode(body, "float32", len(body) // 4), dataset)
            status, headers, body = alice.push(gradient, next=True)
            assert status in (200, 410)
            if status == 410 or "aflock-job" not in headers:
                break
        assert refusal(alice.pull()) == (410, "ended")
        found = server.status()
        assert "reaches the target" in found["ended"]
        assert found["evaluation"]["accuracy"] >= 0.8
        with Peer(server) as peer:
            assert "aflock_evaluation_accuracy" in peer.request("GET", "/metrics")[2].decode()
        assert "accuracy 0.8" in aflock("status", tmp_path / "fed")[1]
        assert server.stop() == 0
        assert "the federation has ended: accuracy 0.8" in server.errors
    best = json.loads((tmp_path / "fed" / "best.json").read_text())
    assert aflock("export", tmp_path / "fed", "--best", "--out", tmp_path / "best.safetensors")[0] == 0
    exported = weights.flat(tmp_path / "best.safetensors")
    assert model.evaluate(exported, dataset.test_inputs, dataset.test_y).accuracy == best["accuracy"] >= 0.8


def test_a_restart_does_not_put_off_the_next_measurement(tmp_path: Path) -> None:
    document: Document = {
        **SMALL, "model": {"name": "logistic"}, "data": {"name": "digits"}, "evaluation": {"every": 4},
    }  # fmt: skip
    (tmp_path / "fed").mkdir()
    token, zero = invite(tmp_path / "fed", "alice"), np.zeros(650, np.float32)
    for updates, expected in ((6, 4), (2, 8)):
        with served(tmp_path / "fed", document) as server, Peer(server, token) as alice:
            alice.hello()
            assert alice.pull()[0] == 200
            for _ in range(updates):
                assert alice.push(zero, next=True)[0] == 200
            until(lambda server=server: server.status()["evaluation"])  # type: ignore[misc]
            assert server.status()["evaluation"]["version"] == expected


def _gradient(model: Any, at: Any, dataset: Any) -> Any:
    out = np.empty_like(at)
    model.gradient(at, dataset.take(np.arange(len(dataset.train_y))), dataset.train_y, out)
    return out
