"""A rule that raises while a record is applied that is in the journal already: the record is rejected, for good.

The rules are those of frail_rule.py, which change their arrays before they fail. The server, its next start after a
SIGKILL and `aflock replay` must agree on every bit, and the rule's state must be what it is without the bad records.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aflock import state
from aflock.net.storage.data_folder import snapshots
from tests.net.real_server import Answered, Peer, Server, invite, joined, refusal, running

pytestmark = pytest.mark.timeout(180)

SCRIPT = Path(__file__).with_name("frail_rule.py")
FRAIL: dict[str, Any] = {
    "strategy": {"name": "frail"},
    "model": {"name": "vector", "length": 4},
    "federation": {"clients": 2, "norm_factor": 0},
    "server": {"archive": True},
}
RECEIVE = 100
LEAVE, DROP, JOB, JOIN, FLUSH = range(200, 205)
REASONS = (
    "the rule failed: ZeroDivisionError: division by zero",
    "the rule failed: KeyError: 'a line\\nand another, '",
    "the rule failed: VectorError: an error that is usually the client's fault",
    "the rule failed: StateError: an error that is usually a file's fault",
    "the rule failed: OSError: [Errno 5] input or output",
    "the rule failed: StopIteration:",
    "the rule failed: RuntimeError: <object object at 0x>",
)


def document(**sections: Mapping[str, Any]) -> dict[str, Any]:
    return {**FRAIL, **{key: {**FRAIL.get(key, {}), **values} for key, values in sections.items()}}


def gradient(code: float) -> npt.NDArray[np.float32]:
    return np.array([code, 1.0, -2.0, 0.5], np.float32)


def sent(peer: Peer, code: float, *, next: bool = False) -> Answered:
    assert peer.pull()[0] == 200
    return peer.push(gradient(code), next=next)


def outcome(answered: Answered) -> tuple[int, str, str]:
    status, headers, body = answered
    return status, headers.get("aflock-outcome", ""), headers.get("aflock-reason", "") or body.decode("latin-1")


def model(server: Server, peer: Peer) -> bytes:
    status, _, body = Peer(server, peer.token).request("GET", "/v1/model")
    assert status == 200
    return body


def replayed(folder: Path) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), "replay", str(folder / "trace.jsonl"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env={**os.environ})
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rule_state(folder: Path) -> dict[str, Any]:
    """What the rule holds at the newest snapshot."""
    saved: dict[str, Any] = state.load(snapshots(folder)[0])["state"]["coordinator"]["strategy"]
    return saved


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype) and one.tobytes() == bytes(other.tobytes())
    return bool(one == other)


def told(folder: Path, **wanted: Any) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    return [line for line in lines if wanted.items() <= line.items()]


def test_what_a_rule_raises_at_an_update_rejects_it_in_server_recovery_and_replay(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with running(folder, FRAIL, program=[str(SCRIPT)]) as server:
        alice, bob = joined(server, "alice"), joined(server, "bob")
        for code, reason in enumerate(REASONS):
            assert outcome(sent(alice, 1.0))[:2] == (200, "applied")
            before = model(server, alice)
            assert outcome(sent(bob, RECEIVE + code, next=True)) == (200, "rejected", reason)
            assert outcome(bob.push(gradient(RECEIVE + code))) == (200, "rejected", reason), "the same again"
            assert model(server, alice) == before
        status = server.status()
        assert (status["applied"], status["rejected"], status["version"]) == (7, 7, 7)
        assert {client["state"] for client in status["clients"]} == {"idle"}
        assert server.errors.count("Traceback") == len(REASONS)
        server.kill()  # the last rejection is in no snapshot yet

    with running(folder, FRAIL, program=[str(SCRIPT)]) as server:
        status = server.status()
        assert (status["applied"], status["rejected"], status["version"]) == (7, 7, 7)
        assert server.errors.count("Traceback") == len(REASONS) + 1
        assert model(server, alice) == before
        again = Peer(server, bob.token, job=bob.job)
        assert outcome(again.push(gradient(RECEIVE + 6))) == (200, "rejected", REASONS[6])
        assert outcome(sent(again, 2.0))[:2] == (200, "applied")
        final = model(server, alice)
    assert [line["reason"] for line in told(folder, kind="arrival", outcome="rejected")] == list(REASONS)
    for kind, count in (("pull", 15), ("arrival", 15)):  # what was applied again is not told again
        assert [line["job"] for line in told(folder, kind=kind)] == list(range(count))
    found = replayed(folder)
    assert found["agrees"]
    assert (found["version"], found["updates"]) == (8, 15)

    twin = tmp_path / "twin"
    with running(twin, FRAIL, program=[str(SCRIPT)]) as server:
        alice, bob = joined(server, "alice"), joined(server, "bob")
        for _ in REASONS:
            sent(alice, 1.0)
        sent(bob, 2.0)
        assert model(server, alice) == final
    assert same(rule_state(folder), rule_state(twin))


TWO_AT_ONCE = """
import sys
from contextlib import closing
from pathlib import Path

import frail_rule
import numpy as np

from aflock.net.storage.segment import entry
from aflock.net.server.settings import Settings
from aflock.net.storage.data_folder import DataFolder, encoded

folder = Path(sys.argv[1])
settings = Settings.build({
    "strategy": {"name": "frail"}, "model": {"name": "vector", "length": 4}, "federation": {"clients": 3}})


def let(store, *records):
    pairs = [({"k": kind, "t": store.now(), **head}, body) for kind, head, body in records]
    store.write([entry(encoded(head), body) for head, body in pairs])
    return [store.applying.apply(head, body) for head, body in pairs]


def update(name, given, code):
    head = dict(name=name, j=given.id, v=given.job.version, s=1, e=1, n=["gradient"], enc="float32", next=0, norm=[1.0])
    return "update", head, np.array([code, 1, 2, 3], np.float32).tobytes()


with closing(DataFolder(folder, settings)) as store:
    names = ["alice", "bob", "carol"]
    let(store, *[("hello", {"name": name, "gen": 1}, b"") for name in names])
    jobs = let(store, *[("pull", {"name": name}, b"") for name in names])
    answers = let(store, *map(update, names, jobs, (100, 1, 101)))
    assert [answer.receipt.outcome for answer in answers] == ["rejected", "applied", "rejected"], answers
    assert store.snapshot_due
    assert store.federation.counts.rejected == 2
    for name, code in (("carol", frail_rule.DROP), ("alice", frail_rule.FLUSH)):
        (job,) = let(store, ("pull", {"name": name}, b""))
        let(store, update(name, job, code))
    let(store, ("pull", {"name": "bob"}, b""))
    let(store, ("suspend", {"name": "bob", "gen": 1}, b""), ("end", {"why": "enough"}, b""))
    before = store.federation.model.tobytes()
for again in range(2):
    with closing(DataFolder(folder, settings)) as store:
        federation = store.federation
        assert (federation.version, federation.counts.rejected, federation.ended) == (3, 2, "enough")
        assert federation.model.tobytes() == before
        assert federation.clients["bob"].suspended
        assert not federation.coordinator.open_jobs
        store.snapshot()
"""


def test_failures_without_a_snapshot_in_between(tmp_path: Path) -> None:
    """Records that were written together: going back for the second one must not fail at the first again.

    The rule also fails when somebody is suspended and when the federation ends.
    """
    command = [sys.executable, "-c", TWO_AT_ONCE, str(tmp_path / "fed")]
    path = os.pathsep.join([str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert replayed(tmp_path / "fed")["agrees"]
    assert len(told(tmp_path / "fed", kind="arrival")) == 5


def test_a_rule_that_fails_at_whoever_comes_goes_and_asks_for_jobs(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with running(folder, FRAIL, program=[str(SCRIPT)]) as server:
        alice, bob = joined(server, "alice"), joined(server, "bob")
        sent(alice, JOIN)
        with Peer(server, invite(folder, "carol")) as carol:
            assert refusal(carol.request("POST", "/v1/hello")) == (503, "rule-failed")
            sent(alice, DROP)
            assert carol.hello()["number"] == 2
        assert bob.pull()[0] == 200
        path = f"/v1/jobs/{bob.job['aflock-job']}/decline"
        assert bob.request("POST", path)[0] == 200, "the job is given back, though the rule did not hear of it"
        assert server.status()["open_jobs"] == 0
        sent(alice, LEAVE)
        assert bob.request("POST", "/v1/leave")[0] == 200
        assert [client["name"] for client in server.status()["clients"]] == ["alice", "carol"]
        sent(alice, JOB)
        assert refusal(alice.pull()) == (503, "rule-failed")
        assert server.status()["version"] == 4
        before = model(server, alice)
        server.kill()
    with running(folder, FRAIL, program=[str(SCRIPT)]) as server:
        assert [client["name"] for client in server.status()["clients"]] == ["alice", "carol"]
        assert refusal(Peer(server, alice.token).pull()) == (503, "rule-failed")
        assert model(server, alice) == before
    failed = "the rule failed: ZeroDivisionError: division by zero"
    assert [line["reason"] for line in told(folder, kind="leave")] == [failed]
    assert [line["reason"] for line in told(folder, kind="drop")] == [f"the client gave it back; {failed}"]
    assert len(told(folder, kind="refuse", reason=failed)) == 3
    assert replayed(folder)["agrees"]


def test_a_rule_that_fails_at_the_last_step_does_not_keep_the_federation_from_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with running(folder, document(budget={"uploads": 3}), program=[str(SCRIPT)]) as server:
        alice = joined(server, "alice")
        joined(server, "bob")
        sent(alice, 1.0)
        sent(alice, FLUSH)
        assert outcome(sent(alice, FLUSH))[:2] == (200, "rejected")
        status = server.status()
        assert (status["state"], status["updates"], status["version"]) == ("ended", 3, 2)
        before = model(server, alice)
        server.kill()
    with running(folder, document(budget={"uploads": 3}), program=[str(SCRIPT)]) as server:
        assert server.status()["state"] == "ended"
        assert model(server, alice) == before
    assert replayed(folder)["agrees"]


def test_a_rule_that_fails_at_a_first_gradient_is_given_another(tmp_path: Path) -> None:
    folder, rule = tmp_path / "fed", document(strategy={"name": "frail-first"})
    with running(folder, rule, program=[str(SCRIPT)]) as server:
        alice, bob = joined(server, "alice"), joined(server, "bob")
        assert outcome(sent(bob, RECEIVE)) == (200, "rejected", REASONS[0])
        server.kill()
    with running(folder, rule, program=[str(SCRIPT)]) as server:
        alice, bob = Peer(server, alice.token), Peer(server, bob.token)
        assert server.status()["state"] == "opening"
        assert outcome(sent(bob, 1.0))[:2] == (200, "buffered")
        assert alice.pull()[0] == 200
        assert alice.job["aflock-first"] == "1"
        assert outcome(alice.push(gradient(1.0)))[:2] == (200, "applied")
        late = joined(server, "late")
        assert outcome(sent(late, RECEIVE)) == (200, "rejected", REASONS[0])
        assert outcome(sent(late, 3.0))[:2] == (200, "buffered")
        assert server.status()["state"] == "running"
    assert replayed(folder)["agrees"]


def test_a_poisoned_folder_of_an_older_server_starts_again(tmp_path: Path) -> None:
    """The journal of the issue, as a server without caps has written it: its records are applied as they are."""
    folder = tmp_path / "fed"
    rule: dict[str, Any] = {
        "strategy": {"name": "rolling-fedavg"},
        "model": {"name": "vector", "length": 4},
        "federation": {"clients": 2},
    }
    with running(folder, rule, changes=["federation.max_examples=999999999999999999"]) as server:
        alice, mallory = joined(server, "alice"), joined(server, "mallory")
        for peer, examples in ((alice, 60), (mallory, 10**18 - 1), (mallory, 1)):
            assert peer.pull()[0] == 200
            answered = peer.push(gradient(examples == 60), names="model", changed={"examples": str(examples)})
            assert answered[0] == 200, answered
        server.kill()
    with running(folder, rule) as server:
        mean = np.frombuffer(model(server, alice), np.float32)
        expected = (60 * gradient(1.0).astype(np.float64) + gradient(0.0)) / 61
        np.testing.assert_allclose(mean, expected, rtol=1e-6)
        assert refusal_of_counts(server, alice) == (422, "unusable")


def refusal_of_counts(server: Server, alice: Peer) -> tuple[int, str]:
    peer = Peer(server, alice.token)
    assert peer.pull()[0] == 200
    return refusal(peer.push(gradient(1.0), names="model", changed={"examples": str(10**9 + 1)}))
