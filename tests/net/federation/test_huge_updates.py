"""Updates that are finite and absurd: who sends them is refused, whoever else is there is not punished for it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aflock.net.commands.replay import replay
from aflock.net.federation.guard import SETTLED
from aflock.net.server.settings import EXAMPLE
from tests.net.real_server import ONES, SMALL, Peer, Server, Wire, invite, joined, refusal, running, until, update_head

pytestmark = pytest.mark.timeout(180)

HUGE = np.full(8, 3.4e38, np.float32)
NOT_FINITE = np.full(8, np.nan, np.float32)
TWO: dict[str, Any] = {**SMALL, "federation": {"clients": 2}}


def pushed(peer: Peer, vector: Any = ONES, **options: Any) -> tuple[int, str, str]:
    """Status, outcome (or code) and reason (or sentence) of an update for a new job."""
    assert peer.pull()[0] == 200
    status, headers, body = peer.push(vector, **options)
    if status == 200:
        return status, headers["aflock-outcome"], headers.get("aflock-reason", "")
    return *refusal((status, headers, body)), json.loads(body)["error"]


def model(server: Server, peer: Peer) -> Any:
    return np.frombuffer(Peer(server, peer.token).request("GET", "/v1/model")[2], np.float32)


def told(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


# --- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "honest", "times"), [("rolling-fedavg", 60, 1), ("twafl", 600, 20)])
def test_the_poison_pill_is_refused_before_its_body_is_read(rule: str, honest: int, times: int, tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    document = {**SMALL, "strategy": {"name": rule}, "federation": {"clients": 2, "strikes": 100}}
    with running(folder, document) as server:
        alice, mallory = joined(server, "alice"), joined(server, "mallory")
        assert pushed(alice, names="model", changed={"examples": str(honest)})[:2] == (200, "applied")
        for _ in range(times):
            said = pushed(mallory, names="model", changed={"examples": "999999999999999999"})
            sentence = (
                "the update claims 999999999999999999 examples; the limit is 1000000000 ([federation] max_examples)"
            )
            assert said == (422, "unusable", sentence)
        said = pushed(mallory, names="model", changed={"steps": "1000001"})
        assert said == (
            422,
            "unusable",
            "the update claims 1000001 steps; the limit is 1000000 ([federation] max_steps)",
        )
        assert pushed(mallory, names="model", changed={"examples": "1"})[:2] == (200, "applied")
        with Wire(server) as wire:  # the body never comes
            mallory.pull()
            head = update_head(mallory, 32, b"Aflock-Vectors: model\r\nExpect: 100-continue\r\n")
            wire.send(head.replace(b"Aflock-Examples: 1\r\n", b"Aflock-Examples: 1000000001\r\n").replace(
                b"Aflock-Vectors: gradient\r\n", b""))  # fmt: skip
            assert wire.answer()[0] == 422
        server.kill()
    with running(folder, document) as server:
        assert server.status()["updates"] == 2
    assert replay(folder / "trace.jsonl")["agrees"]


def test_the_bounds_of_counts_may_change_and_are_not_in_older_folders(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with running(folder, SMALL) as server:
        alice = joined(server, "alice")
        assert pushed(alice, changed={"examples": "1000"})[1] == "applied"
    file = folder / "federation.toml"
    kept = file.read_text()
    for key in ("max_examples", "max_steps", "norm_factor"):
        assert key in kept
        kept = "\n".join(line for line in kept.splitlines() if not line.startswith(f"{key} "))
    file.write_text(kept)  # as an older version has written it
    with running(folder, SMALL, changes=["federation.max_examples=999", "federation.max_steps=7"]) as server:
        alice = Peer(server, alice.token)
        assert pushed(alice, changed={"examples": "1000"})[1] == "unusable"
        assert pushed(alice, changed={"steps": "8"})[1] == "unusable"
        assert pushed(alice, changed={"examples": "999", "steps": "7"})[1] == "applied"


# --- norms ------------------------------------------------------------------------------------------------------------


def test_a_norm_beyond_all_before_is_refused_after_twenty_updates(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with running(folder, TWO) as server:
        alice, mallory = joined(server, "alice"), joined(server, "mallory")
        for k in range(SETTLED):
            assert pushed(alice, ONES * (k + 1))[1] == "applied"
        server.kill()  # the norms are in the journal
    with running(folder, TWO) as server:
        alice, mallory = Peer(server, alice.token), Peer(server, mallory.token)
        assert pushed(alice, ONES * 1999)[1] == "applied"
        assert pushed(alice, ONES * 199_800)[1] == "applied"
        before = model(server, alice).tobytes()
        for _ in range(4):
            status, code, sentence = pushed(mallory, HUGE)
            assert (status, code) == (422, "unusable")
            assert sentence == (
                "the vector gradient has the norm 9.617e+38; the limit is 100 times the largest so far, 5.651e+05 "
                "([federation] norm_factor)"
            )
        assert model(server, alice).tobytes() == before
        for _ in range(4):
            pushed(mallory, HUGE)
        assert states(server)["mallory"] != "suspended", "the model might have been the cause"
        assert server.status()["longest_vectors"]["gradient"]["client"] == "alice"
        assert pushed(alice)[1] == "applied"
    assert replay(folder / "trace.jsonl")["agrees"]


def test_the_factor_is_a_term_that_may_change(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with running(folder, SMALL, changes=["federation.norm_factor=0"]) as server:
        alice = joined(server, "alice")
        for _ in range(SETTLED):
            pushed(alice)
        assert pushed(alice, ONES * 1e6)[1] == "applied"
    with running(folder, SMALL, changes=["federation.norm_factor=2.0"]) as server:
        alice = Peer(server, alice.token)
        assert pushed(alice, ONES * 2.1e6)[1] == "unusable"
        assert pushed(alice, ONES * 1.9e6)[1] == "applied"
    assert replay(folder / "trace.jsonl")["agrees"]


def test_a_step_that_leaves_the_model_not_finite_is_undone_and_names_who_made_it(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    document = {**TWO, "strategy": {"name": "fedbuff", "buffer": 2, "lr": 2.0}}
    with running(folder, document) as server:
        alice, mallory = joined(server, "alice"), joined(server, "mallory")
        for peer in (alice, mallory):
            pushed(peer, names="delta")
        before = model(server, alice)
        assert pushed(mallory, HUGE, names="delta")[:2] == (200, "buffered")
    with running(folder, document) as server:  # a snapshot knows who has contributed
        alice = Peer(server, alice.token)
        status, outcome, reason = pushed(alice, HUGE / 10, names="delta")
        assert (status, outcome) == (200, "applied")
        assert reason.startswith(
            "the step to version 2 left numbers that are not finite and was undone; it was made from the updates of "
            "mallory, alice; the longest delta came from mallory"
        )
        assert model(server, alice).tobytes() == before.tobytes()
        found = server.status()
        assert (found["version"], found["undone"], found["diverged"]) == (2, 1, False)
        until(lambda: reason in server.errors)
        server.kill()
    with running(folder, document) as server:
        alice, mallory = Peer(server, alice.token), Peer(server, mallory.token)
        assert model(server, alice).tobytes() == before.tobytes()
        assert server.status()["undone"] == 1
        for peer in (alice, mallory):
            pushed(peer, names="delta")
        np.testing.assert_array_equal(model(server, alice), before + 2)
    assert [line["reason"] for line in told(folder, "undo")] == [reason]
    assert replay(folder / "trace.jsonl")["agrees"]


# --- strikes ----------------------------------------------------------------------------------------------------------


def test_nobody_is_struck_for_what_a_diverged_model_does(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with running(folder, TWO, changes=["federation.strikes=2"]) as server:
        alice, mallory = joined(server, "alice"), joined(server, "mallory")
        assert pushed(mallory, HUGE)[1] == "applied"
        assert server.status()["diverged"]
        for _ in range(5):
            status, code, sentence = pushed(alice, NOT_FINITE)
            assert (status, code) == (422, "diverged")
            assert sentence == (
                "the model of this job has diverged: the vector gradient holds numbers that are not finite"
            )
        until(lambda: "the model has diverged at version 1" in server.errors)
        alice.pull()
    with running(folder, TWO, changes=["federation.strikes=2"]) as server:
        alice = Peer(server, alice.token, job=alice.job)
        assert refusal(alice.push(NOT_FINITE)) == (422, "diverged"), "a snapshot knows which model its job is of"
        for _ in range(5):
            assert pushed(alice, NOT_FINITE)[1] == "diverged"
        assert {client["state"] for client in server.status()["clients"]} == {"working", "idle"}


def test_numbers_that_are_not_finite_are_a_strike_of_one_and_not_of_two(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with running(folder, TWO, changes=["federation.strikes=3"]) as server:
        alice, bob = joined(server, "alice"), joined(server, "bob")
        for _ in range(2):
            assert pushed(alice, NOT_FINITE)[1] == "unusable"
        assert pushed(bob, NOT_FINITE)[1] == "diverged", "two of them: it is the model"
        for peer in (alice, bob) * 3:
            assert pushed(peer, NOT_FINITE)[1] == "diverged"
        assert pushed(bob)[1] == "applied"
        for _ in range(3):
            assert pushed(alice, NOT_FINITE)[1] == "unusable"
        assert refusal(alice.pull()) == (403, "suspended")


def test_accepted_updates_of_whoever_spoils_the_model_do_not_make_honest_clients_guilty(tmp_path: Path) -> None:
    document = {**TWO, "federation": {"clients": 3, "strikes": 3}}
    with running(tmp_path / "fed", document) as server:
        alice, bob, mallory = (joined(server, name) for name in ("alice", "bob", "mallory"))
        for _ in range(6):
            for peer in (alice, bob):
                pushed(peer, NOT_FINITE)
                assert pushed(mallory, 0 * ONES)[1] == "applied"
        assert set(states(server).values()) <= {"working", "idle", "waiting"}


def test_a_model_that_grows_step_by_step_makes_no_honest_client_guilty(tmp_path: Path) -> None:
    """Each of mallory's updates is within the bound; then the honest ones are too long."""
    with running(tmp_path / "fed", TWO, changes=["federation.strikes=2"]) as server:
        alice, mallory = joined(server, "alice"), joined(server, "mallory")
        for _ in range(SETTLED):
            pushed(alice)
        assert pushed(mallory, ONES * 50)[1] == "applied"
        for _ in range(6):
            assert pushed(alice, ONES * 1e5)[1] == "unusable"
        assert states(server)["alice"] != "suspended"
        assert server.status()["longest_vectors"]["gradient"]["client"] == "mallory"


# --- the example, with real clients -----------------------------------------------------------------------------------

RECIPE = """
from aflock import data, models

digits = data.load("digits")
model = models.create("logistic", digits)
batches = [(digits.train_x[k : k + 32], digits.train_y[k : k + 32]) for k in range(0, 640, 32)]
"""


@contextlib.contextmanager
def honest(server: Server, *names: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """`aflock join` for each; what they say is in NAME.err."""
    folder = server.folder.parent
    (folder / "recipe.py").write_text(RECIPE)
    clients = []
    try:
        for name in names:
            token = folder / f"{name}.token"
            token.write_text(invite(server.folder, name))
            token.chmod(0o600)
            command = [sys.executable, "-m", "aflock", "join", server.url, "--token-file", str(token), "--recipe"]
            command += [str(folder / "recipe.py"), "--state-dir", str(folder / f"{name}.state")]
            with open(folder / f"{name}.err", "wb") as errors:
                clients.append(subprocess.Popen(command, stdout=errors, stderr=errors, env={**os.environ}))
        yield clients
    finally:
        for client in clients:
            client.kill()
            client.wait()


def states(server: Server) -> dict[str, str]:
    return {client["name"]: client["state"] for client in server.status()["clients"]}


def test_a_huge_update_to_the_example_among_the_first_twenty_suspends_nobody(tmp_path: Path) -> None:
    with running(tmp_path / "fed", tomllib.loads(EXAMPLE)) as server:
        mallory, other = joined(server, "mallory"), joined(server, "other")
        weights = np.full(server.status()["weights"], 3.4e38, np.float32)
        for k in range(4):  # a whole buffer
            assert pushed((mallory, other)[k % 2], weights, names="delta")[0] == 200
        assert server.status()["diverged"]
        with honest(server, "alice", "bob") as clients:
            said = [tmp_path / "alice.err", tmp_path / "bob.err"]
            until(lambda: all(file.read_text().count("not finite") >= 5 for file in said), 90)
            assert [client.poll() for client in clients] == [None, None]
            assert {states(server)[name] for name in ("alice", "bob")} <= {"idle", "working"}
            jobs = {client["name"]: client["jobs"] for client in server.status()["clients"]}
            assert max(jobs["alice"], jobs["bob"]) < 50, "they wait between two jobs"


def test_a_huge_update_to_the_example_after_twenty_is_refused_and_training_goes_on(tmp_path: Path) -> None:
    with running(tmp_path / "fed", tomllib.loads(EXAMPLE)) as server, honest(server, "alice", "bob") as clients:
        until(lambda: server.status()["updates"] >= SETTLED, 90)
        mallory = joined(server, "mallory")
        weights = np.full(server.status()["weights"], 3.4e38, np.float32)
        for _ in range(5):
            assert pushed(mallory, weights, names="delta")[:2] == (422, "unusable")
        version = server.status()["version"]
        until(lambda: server.status()["version"] > version + 5, 60)
        assert [client.poll() for client in clients] == [None, None]
        assert not server.status()["diverged"]
        assert {states(server)[name] for name in ("alice", "bob")} <= {"idle", "working"}
