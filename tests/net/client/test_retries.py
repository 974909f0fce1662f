"""A client's requests to a server that is slow, away, restarted, wrong, or that refuses."""

from __future__ import annotations

import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aflock import strategies
from aflock.local import Memory, Trained
from aflock.net.client import session as transport
from aflock.net.client.client import Client, JobReport
from aflock.net.client.session import ProtocolError, Unavailable, jittered
from aflock.net.protocol.refusals import Refused
from aflock.types import Job, Vector
from tests.net.client.fake_server import Refusal, serving
from tests.net.client.helpers import ZERO, D, changing, made, one, plain, remembered, remembering

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that the client would have made between attempts; it makes none."""
    asked: list[float] = []

    def none(pause: float) -> float:
        asked.append(jittered(pause))
        return 0.0

    monkeypatch.setattr(transport, "jittered", none)
    return asked


def test_what_is_sent_again_counts_once(tmp_path: Path) -> None:
    with remembering() as server:
        server.faults["hello"] = ["drop before", "hang", "cut"]
        server.faults["job"] = ["cut", "drop after", Refusal(429, "too-fast", after=0.01)]
        server.faults["update"] = [
            "drop after", "drop after", "", "drop before", "cut", "", Refusal(503), Refusal(500),
            Refusal(408, "slow"), "", "hang",
        ]  # fmt: skip
        summary = made(server, tmp_path, timeout=0.3).run_with(changing(), jobs=8)
        assert summary.jobs == 8
        assert len(server.taken) == 8
        assert set(server.taken.values()) == {1}
        np.testing.assert_allclose(server.strategy.total, remembered(tmp_path)["told gradient"], atol=1e-9)


def test_the_server_goes_away_and_comes_back(tmp_path: Path) -> None:
    with remembering() as server:

        def restart(progress: JobReport) -> None:
            if progress.jobs in (3, 6):
                server.stop()
                threading.Timer(0.2, server.start).start()

        summary = made(server, tmp_path).run_with(changing(), jobs=9, progress=restart)
        assert summary.jobs == 9
        assert set(server.taken.values()) == {1}
        np.testing.assert_allclose(server.strategy.total, remembered(tmp_path)["told gradient"], atol=1e-9)


def test_pauses_are_what_the_server_says_or_grow(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "FIRST_WAIT", 0.5)
    monkeypatch.setattr(transport, "LONGEST_WAIT", 3.0)
    with plain() as server:
        server.faults["hello"] = [Refusal(503)] * 5 + [Refusal(429, after=7), Refusal(503, after=1e9)]
        made(server).run_with(one, jobs=0)
    expected = [0.5, 1, 2, 3, 3, 7, 3600]
    assert len(pauses) == len(expected)
    assert all(base <= pause <= 1.5 * base for base, pause in zip(expected, pauses, strict=True))
    assert len({jittered(1.0) for _ in range(9)}) > 1


def test_a_client_may_give_up() -> None:
    with plain() as server:
        url, token = server.url, server.token()
    begun = Client(url, token, keep=False, give_up=0.1)
    with pytest.raises(Unavailable, match="no answer from http"):
        begun.run_with(one)


def test_a_job_that_is_no_longer_the_clients_is_void(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with remembering() as server:
        server.faults["update"] = [
            "",
            Refusal(409, "unknown-job", "gone"),
            "",
            Refusal(422, "unusable", "too long"),
            "",
        ]
        summary = made(server, tmp_path).run_with(changing(), jobs=3)
        assert (summary.jobs, server.taken.total(), len(server.happened("pull"))) == (3, 3, 5)
        np.testing.assert_allclose(server.strategy.total, remembered(tmp_path)["told gradient"], atol=1e-9)
        assert not (tmp_path / "pending.safetensors").exists()
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert ["gone" in said[0], "too long" in said[1]] == [True, True]


def test_what_was_rejected_is_not_remembered(tmp_path: Path) -> None:
    strategy: Any = strategies.create("ace", clients=2, memory="client")
    with serving(strategy, ZERO, max_staleness=0) as server:
        begun, slow = threading.Event(), threading.Event()

        def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
            if (job.client, number) == (1, 1):
                begun.set()
                slow.wait(10)
            elif (job.client, number) == (0, 1):
                begun.wait(10)
            return changing()(job, number, memory, delay)

        other = threading.Thread(target=lambda: made(server, tmp_path / "c1", "c1").run_with(train, jobs=3))
        other.start()
        made(server, tmp_path / "c0", "c0").run_with(train, jobs=4)
        slow.set()
        other.join(20)
        assert [event.outcome for event in server.happened("arrival") if event.client == 1][1] == "rejected"
        told = sum(remembered(tmp_path / name)["told gradient"] for name in ("c0", "c1"))
        np.testing.assert_allclose(strategy.total, told, atol=1e-9)


def test_the_end_of_the_federation_ends_the_run() -> None:
    with plain(uploads=3) as server:
        assert made(server).run_with(one).why == "ended"
        assert made(server).run_with(one).jobs == 0
        assert server.taken.total() == 3


@pytest.mark.parametrize(
    ("kind", "refusal", "says"),
    [
        ("hello", Refusal(401, "token", "the token is not valid"), "the token is not valid"),
        ("job", Refusal(403, "suspended", "you are\x1b[31m suspended"), r"you are \[31m suspended"),
        ("update", Refusal(403, "revoked", "your invitation was revoked"), "was revoked"),
        ("update", Refusal(413, "too-large", "at most 20 bytes"), "at most 20 bytes"),
        ("job", Refusal(404, "path", "there is no such path"), "no such path"),
        ("heartbeat", Refusal(403, "suspended", "you are suspended"), "you are suspended"),
    ],
)
def test_refusals_are_told_at_once_in_the_servers_words(kind: str, refusal: Refusal, says: str, tmp_path: Path) -> None:
    def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
        if kind == "heartbeat":
            while "heartbeat" not in server.kinds():
                time.sleep(0.01)
            time.sleep(0.3)
        return one(job, number, memory, delay)

    with plain(lease=0.1) as server:
        server.faults[kind] = [refusal]
        with pytest.raises(Refused, match=says) as raised:
            made(server, tmp_path).run_with(train, jobs=2)
        assert raised.value.status == refusal.status
        assert server.kinds().count(kind) == 1
    assert (tmp_path / "pending.safetensors").exists() == (refusal.code == "revoked")


def test_who_was_let_go_joins_again_and_begins_anew(tmp_path: Path) -> None:
    with remembering() as server:

        def forgotten(progress: JobReport) -> None:
            if progress.jobs == 2:
                server.forget("alice")

        summary = made(server, tmp_path).run_with(changing(), jobs=4, progress=forgotten)
        assert summary.jobs == 4
        assert server.kinds().count("hello") == 2
        assert [event.first for event in server.happened("arrival")] == [True, False, True, False]


def test_large_bodies_go_through_in_pieces(tmp_path: Path) -> None:
    d = 700_000
    w0 = np.arange(d, dtype=np.float32)
    with serving(strategies.create("fedasync", clients=1), w0) as server:
        server.faults["update"] = ["drop after", "", "cut"]
        seen: list[Vector] = []

        def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
            seen.append(job.model)
            assert not job.model.flags.writeable
            return Trained({"model": job.model + 1}, 1)

        made(server, tmp_path).run_with(train, jobs=3)
        assert set(server.taken.values()) == {1}
        assert seen[0].tobytes() == w0.tobytes()
        assert "100-continue" in {headers.get("expect") for kind, headers in server.asked if kind == "update"}
        assert not any("transfer-encoding" in headers for _, headers in server.asked)


def test_a_version_is_not_sent_twice() -> None:
    with serving(strategies.create("masfl", clients=1, buffer=3, beta=0.5), ZERO) as server:
        extras: list[Any] = []

        def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
            extras.append((job.version, job.first, {name: vector.tobytes() for name, vector in job.extras.items()}))
            return Trained({"gradient": np.full(D, number + 1, np.float32)}, 1)

        made(server).run_with(train, jobs=8)
        have = [headers.get("aflock-have") for kind, headers in server.asked if kind in ("job", "update")]
    assert [(version, first) for version, first, _ in extras] == [(0, True)] + [(k // 3, False) for k in range(7)]
    assert extras[0][2] == {}
    assert len({extras[k][2]["momentum"] for k in (1, 2, 3)}) == 1
    assert extras[4][2] != extras[3][2]
    assert have[:2] == [None, None]  # the first job brought the model alone
    assert have[2:6] == ["0", "0", "0", "1"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"protocol": 2}, "uses protocol 2, this client 1"),
        ({"length": D + 1}, "the body has 20 bytes instead of 24"),
        ({"length": -1}, "`length` is not an integer of at least 1"),
        ({"length": True}, "`length` is not an integer of at least 1"),
        ({"federation": "../../etc"}, "`federation` is not a valid name"),
        ({"needs": []}, "`needs` is empty, or `changes`"),
        ({"changes": ["delta"]}, "`needs` is empty, or `changes`"),
        ({"needs": ["Gradient!"]}, "not a list of names"),
        ({"encoding": "pickle"}, "`encoding` is none of"),
        ({"lease": 0}, "`lease` is not a positive number"),
        ({"lease": None}, "`lease` is not a positive number"),
        ({"local": {"eta_l": 1}}, "`local` does not name a local rule"),
        ({"state": 3}, "`state` is not a string"),
    ],
)
def test_an_answer_that_breaks_the_protocol_is_an_error_in_one_sentence(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with plain() as server:
        server.greeting |= change
        with pytest.raises(ProtocolError, match=says):
            made(server, tmp_path).run_with(one)


def test_a_client_without_a_number_is_told_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aflock.client")
    with plain() as server:
        made(server).run_with(one, jobs=1)
        assert "alice is client 0 of federation" in caplog.text
        assert "(jobs): 1 job, version 1" in caplog.text
        server.greeting |= {"number": None, "state": "gathering"}
        made(server, name="bob").run_with(one, jobs=0)
    assert re.search("bob takes part in federation .*, which waits for more clients: asgd, version 1", caplog.text)
    assert "None" not in caplog.text


def test_a_model_that_is_not_finite_is_not_trained() -> None:
    with serving(strategies.create("asgd", clients=1), ZERO) as server:
        server.strategy.w.high[0] = np.nan
        with pytest.raises(ProtocolError, match="has diverged"):
            made(server).run_with(one)
        assert server.kinds()[-1] == "decline"
