"""A federation's life: the first gradients, the end, a stop and a new start, a full disk."""

from __future__ import annotations

import json
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from aflock.net.protocol import wire
from tests.net.real_server import (
    ONES,
    SMALL,
    NotStarted,
    Peer,
    Wire,
    invite,
    joined,
    refusal,
    served,
    start,
    until,
    update_head,
    working,
)
from tests.net.server.waiting import waiting


def test_a_rule_that_asks_for_first_gradients(tmp_path: Path) -> None:
    document = {**SMALL, "strategy": {"name": "ace"}, "federation": {"clients": 2}, "budget": {"uploads": 4}}
    with served(tmp_path / "fed", document) as server:
        alice, bob = Peer(server, invite(server.folder, "alice")), Peer(server, invite(server.folder, "bob"))
        hello = alice.hello()
        assert (hello["state"], hello["number"]) == ("gathering", None)
        assert server.status()["waiting_for"] == 1
        assert alice.pull()[0] == 204
        with waiting(alice, 30) as woken:
            assert bob.hello()["state"] == "opening"
            assert woken().status == 200
        assert alice.job["aflock-first"] == "1"
        assert alice.job["aflock-vectors"] == "model"
        assert alice.push(ONES)[1]["aflock-outcome"] == "buffered"
        assert alice.pull()[0] == 204  # nobody goes on before all have begun
        assert bob.pull()[0] == 200
        assert bob.push(ONES)[1]["aflock-outcome"] == "applied"
        assert alice.hello()["state"] == "running"
        assert alice.pull()[1]["aflock-first"] == "0"
        carol = joined(server, "carol")  # comes later: her first job is one for a first gradient
        assert carol.pull()[1]["aflock-first"] == "1"
        assert carol.push(ONES)[0] == 200
        last = alice.push(ONES)
        assert last[0] == 200
        assert alice.hello()["state"] == "ended"
        assert server.status()["state"] == "ended"
        assert refusal(bob.pull(wait=30)) == (410, "ended")
        assert refusal(carol.request("POST", "/v1/jobs/7/heartbeat")) == (410, "ended")
        assert alice.push(ONES)[::2] == last[::2]  # who got no answer still gets it
        late = Peer(server, invite(server.folder, "late"))
        assert late.hello()["state"] == "ended"
        assert refusal(late.pull()) == (410, "ended")
        assert server.stop() == 0
    with served(tmp_path / "fed", document) as server:
        assert server.status()["state"] == "ended"
        again = Peer(server, alice.token, job=alice.job)
        assert again.push(ONES)[::2] == last[::2]


def test_the_end_wakes_those_who_wait(tmp_path: Path) -> None:
    changes = ["federation.concurrency=1", "budget.versions=1"]
    with served(tmp_path / "fed", SMALL, changes=changes) as server:
        alice, bob = working(server, "alice"), joined(server, "bob")
        with waiting(bob, 30) as woken:
            time.sleep(0.3)
            assert alice.push(ONES, next=True)[0] == 200
            assert (woken().status, woken().code) == (410, "ended")


@pytest.mark.parametrize("encoding", ["float16", "int8"])
def test_vectors_travel_in_fewer_bytes(tmp_path: Path, encoding: str) -> None:
    document = {**SMALL, "strategy": {"name": "asgd", "lr": 1.0}}
    with served(tmp_path / "fed", document, changes=[f"federation.encoding={encoding}"]) as server:
        alice = Peer(server, invite(server.folder, "alice"))
        assert alice.hello()["encoding"] == encoding
        _, _, body = alice.pull()
        assert len(body) == wire.size(encoding, 8)
        gradient = np.linspace(-1, 1, 8, dtype=np.float32)
        status, headers, body = alice.push(gradient, next=True)
        assert (status, headers["aflock-encoding"]) == (200, encoding)
        assert np.allclose(wire.decode(body, encoding, 8), -gradient, atol=0.02)
        status, headers, exact = alice.request("GET", "/v1/model")
        assert (headers["aflock-encoding"], len(exact)) == ("float32", 32)
        assert refusal(alice.push(gradient, changed={"encoding": "float32"})) == (422, "unusable")
        path = f"/v1/jobs/{alice.job['aflock-job']}/update"
        bad = {"float16": np.full(8, np.inf, "<f2").tobytes(), "int8": np.float32(np.inf).tobytes() + b"\1" * 8}
        headers = {f"Aflock-{name}": value for name, value in [("Version", "1"), ("Steps", "1"), ("Examples", "1")]}
        headers |= {"Aflock-Vectors": "gradient", "Aflock-Encoding": encoding}
        assert refusal(alice.request("POST", path, bad[encoding], headers)) == (422, "unusable")
        huge = {"float16": np.full(8, 65504.0), "int8": np.full(8, 3e38)}[encoding]
        for _ in range(3):  # the model leaves what the encoding can say; the server goes on answering
            assert alice.push(huge, next=True)[0] == 200
        assert "Traceback" not in server.errors
        assert "Warning" not in server.errors


def test_a_new_start_goes_on_where_the_old_one_was(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    changes = ["federation.concurrency=2", "federation.clients=3"]
    with served(folder, SMALL, changes=changes) as server:
        peers = [Peer(server, invite(folder, name)) for name in ("alice", "bob", "carol")]
        for peer in peers:
            peer.hello()
        alice, bob, carol = peers
        federation = alice.hello()["federation"]
        assert alice.pull()[0] == bob.pull()[0] == 200
        receipt = alice.push(ONES)
        assert alice.pull()[0] == 200
        with waiting(carol, 30) as woken:
            time.sleep(0.3)
            before = server.status()
            assert server.stop() == 0
            assert (woken().status, woken().code) == (503, "stopping")
    assert sorted(folder.glob("snapshot-*"))
    assert "stopped at version 1" in server.errors
    with served(folder, SMALL, changes=[*changes, "server.lease=5.0", "server.rate=100.0"]) as server:
        after = server.status()
        for key in ("federation", "version", "updates", "applied", "open_jobs", "dropped"):
            assert after[key] == before[key], key
        ours = Peer(server, alice.token, job=alice.job)
        hello = ours.hello()
        assert (hello["federation"], hello["lease"]) == (federation, 5.0)
        assert ours.push(ONES, job=0)[::2] == receipt[::2]  # remembered
        assert ours.push(ONES)[0] == 200  # the open job is still open
        assert Peer(server, bob.token, job=bob.job).push(ONES)[1]["aflock-staleness"] == "2"
        assert server.stop(signal.SIGINT) == 0
    with pytest.raises(NotStarted) as stopped:
        start(folder, {**SMALL, "strategy": {"name": "fedbuff"}}, changes=changes)
    assert stopped.value.code == 2
    last = stopped.value.errors.strip().splitlines()[-1]
    assert last.startswith("aflock: [strategy]")
    with served(folder, SMALL, changes=changes) as server:  # and nothing was spoilt by the attempt
        assert server.status()["updates"] == 3
        with pytest.raises(NotStarted, match="another server"):
            start(folder, SMALL, changes=changes)
        with Peer(server) as peer:
            assert peer.request("GET", "/readyz")[0] == 200


def test_a_stop_waits_for_what_was_begun(tmp_path: Path) -> None:
    with served(tmp_path / "fed") as server:
        alice = working(server, "alice")
        with Wire(server) as wire_:
            wire_.send(update_head(alice, 32) + bytes(16))
            time.sleep(0.2)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            wire_.send(bytes(16))
            status, headers, _ = wire_.answer()
            assert (status, headers["aflock-outcome"]) == (200, "applied")
        assert server.process.wait(20) == 0
        assert "Traceback" not in server.errors
    with served(tmp_path / "fed") as server:
        assert server.status()["updates"] == 1


def test_a_full_disk_passes(tmp_path: Path) -> None:
    with served(tmp_path / "fed", SMALL, largest_file=40_000) as server:
        alice = working(server, "alice")
        answered = alice.push(ONES, next=True)
        while answered[0] == 200:
            answered = alice.push(ONES, next=True)
        assert refusal(answered) == (503, "disk-full")
        updates = server.status()["updates"]
        assert updates > 20
        with Peer(server) as other:
            assert other.request("GET", "/healthz")[0] == 200
            status, headers, body = other.request("GET", "/readyz")
            assert (status, body, headers["retry-after"]) == (503, b"the disk is full\n", "2")
            assert b"aflock_disk_full 1\n" in other.request("GET", "/metrics")[2]
            for _ in range(5):
                assert refusal(alice.push(ONES)) == (503, "disk-full")
            assert server.status()["updates"] == updates
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            until(lambda: other.request("GET", "/readyz")[0] == 200)  # by itself: nobody has sent anything
        assert alice.push(ONES, next=True)[0] == 200
        assert server.status()["updates"] == updates + 1
        assert server.stop() == 0
    with served(tmp_path / "fed") as server:
        assert server.status()["updates"] == updates + 1
    lines = (tmp_path / "fed" / "trace.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["kind"] == "arrival" for line in lines) == updates + 1
