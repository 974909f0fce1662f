"""Clients that wait for a job: who gets the next one, and who is told of the others."""

from __future__ import annotations

import asyncio
import io
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aflock import config
from aflock.config import ConfigError
from aflock.net.commands import status_table
from aflock.net.commands.replay import replay
from aflock.net.server import metrics
from aflock.net.server.http.request import Disconnected
from aflock.net.server.metrics import ServerCounters
from aflock.net.server.next_client import NextClient
from aflock.net.server.settings import Settings
from aflock.net.server.waiting_pulls import FORGOTTEN, LONG, PULL_GRACE, WaitingPulls
from aflock.net.storage.data_folder import DataFolder
from tests.net.real_server import (
    ONES,
    NotStarted,
    Peer,
    Server,
    Wire,
    joined,
    running,
    served,
    start,
    until,
    update_head,
)

pytestmark = pytest.mark.timeout(180)

JOBS = 600


def document(clients: int, places: int | None, rule: str = "asgd", **keys: Any) -> dict[str, dict[str, Any]]:
    federation = {"clients": clients} | ({} if places is None else {"concurrency": places}) | keys
    name, _, cohort = rule.partition("/")
    return {
        "strategy": {"name": name} | ({"buffer": int(cohort)} if cohort else {}),
        "model": {"name": "vector", "length": 8},
        "federation": federation,
        "budget": {"uploads": JOBS},
        "server": {"rate": 1e5},
    }


# --- shares ----------------------------------------------------------------------------------------------------------


def work(peer: Peer, kind: str, needs: list[str], seconds: float) -> int:
    """Works until the federation ends, and says how many updates were taken.

    N asks for the next job with its update; P pulls after it; S does not wait when it pulls; C pulls on another
    connection while its update is on its way.
    """
    count, has_job = 0, False
    while True:
        while not has_job:
            status = peer.pull(0 if kind == "S" else 30)[0]
            if status not in (200, 204):
                return count
            has_job = status == 200
            if kind == "S" and not has_job:
                time.sleep(0.005)
        time.sleep(seconds)
        names = ["gradient"] if peer.job["aflock-first"] == "1" else needs
        if kind == "C":
            with Wire(peer.server) as other:
                other.send(update_head(peer, ONES.nbytes) + ONES.tobytes())
                has_job = peer.pull(30)[0] == 200
                status = other.answer()[0]
        else:
            status, headers, _ = peer.push(*[ONES] * len(names), next=kind in "NS", names=",".join(names))
            has_job = "aflock-job" in headers
        if status == 410:
            return count
        assert status == 200 or (kind, status) == ("C", 409), status  # its pull may come before its update
        count += status == 200


def shares(server: Server, kinds: str, seconds: float = 0.0) -> list[int]:
    """How many updates each of as many clients had taken, all at work at the same time."""
    peers = [joined(server, f"client{k}") for k in range(len(kinds))]
    needs, counts = peers[0].hello()["needs"], [0] * len(kinds)

    def one(k: int) -> None:
        counts[k] = work(peers[k], kinds[k], needs, seconds)

    threads = [threading.Thread(target=one, args=(k,)) for k in range(len(kinds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == JOBS
    return counts


@pytest.mark.parametrize(
    ("selection", "kinds", "places", "rule", "seconds"),
    [
        *(("waiting", "NNNN", places, "asgd", 0.0) for places in (1, 2)),
        *(("waiting", "NNNN", places, "asgd", 0.005) for places in (2, 3)),
        ("waiting", "PPPP", 1, "asgd", 0.0),
        ("waiting", "PPPP", 3, "asgd", 0.005),
        *(("waiting", "NPNP", places, "asgd", 0.005) for places in (1, 2, 3)),
        ("waiting", "NPP", 2, "asgd", 0.005),
        ("waiting", "SSNN", 2, "asgd", 0.005),
        ("waiting", "NNNN", None, "fedavg/2", 0.0),
        ("waiting", "NPNP", 2, "fedavg/3", 0.002),
        ("waiting", "NNNN", 1, "ace", 0.0),
        ("waiting", "NPNP", 3, "ace", 0.002),
        *(("fair", "NPNP", places, "asgd", 0.005) for places in (1, 2, 3)),
        ("fair", "NNNN", 1, "asgd", 0.0),
        ("fair", "NPNP", None, "fedavg/2", 0.0),
        ("fair", "NNNN", 2, "ace", 0.0),
    ],
)
def test_equally_fast_clients_get_equal_shares(
    tmp_path: Path, selection: str, kinds: str, places: int | None, rule: str, seconds: float
) -> None:
    # A client whose thread a busy machine holds up is not as fast as the others. A policy that prefers a client does so
    # in every attempt; a machine does not.
    for attempt in range(3):
        folder = tmp_path / f"fed{attempt}"
        with running(folder, document(len(kinds), places, rule, selection=selection)) as server:
            counts = shares(server, kinds, seconds)
            assert server.stop() == 0
        assert replay(folder / "trace.jsonl")["agrees"]
        if min(counts) >= 0.8 * max(counts):
            return
    pytest.fail(f"unequal shares in three attempts, the last: {counts}")


@pytest.mark.parametrize("selection", ["waiting", "fair"])
@pytest.mark.parametrize("places", [4, 6, None])
def test_with_a_place_for_everybody_each_update_brings_the_next_job(
    tmp_path: Path, selection: str, places: int | None
) -> None:
    # How often a client reports is then up to the client, so there are no shares to compare.
    with served(tmp_path / "fed", document(4, places, selection=selection)) as server:
        peers = [joined(server, f"client{k}") for k in range(4)]
        assert [peer.pull()[0] for peer in peers] == [200] * 4
        for _ in range(10):
            assert all("aflock-job" in peer.push(ONES, next=True)[1] for peer in peers)


def test_a_pull_beside_ones_own_update_overtakes_nobody(tmp_path: Path) -> None:
    with served(tmp_path / "fed", document(4, 1)) as server:
        first, *others = shares(server, "CPPP")
    assert 0 < first <= 1.1 * max(others), (first, others)  # fewer, where its pull came before its update
    assert min(others) >= 0.8 * max(others), others


def test_biased_shares_follow_the_probabilities(tmp_path: Path) -> None:
    weights = {"client0": 6, "client1": 3, "client2": 1}
    given = document(3, 1, selection="biased", probabilities=weights)
    with served(tmp_path / "fed", given) as server:
        counts = shares(server, "NNN")
    # of 600 jobs 360, 180 and 60 are expected: four standard deviations are 48, 45 and 29
    assert [abs(count - JOBS * w / 10) < 49 for count, w in zip(counts, weights.values(), strict=True)] == [True] * 3
    assert counts == sorted(counts, reverse=True), counts


# --- one after the other ---------------------------------------------------------------------------------------------


class Waiting(threading.Thread):
    """A pull that waits; `job` says whether it brought a job."""

    def __init__(self, peer: Peer, seconds: int = 30) -> None:
        super().__init__()
        self.peer, self.seconds, self.job = peer, seconds, False
        self.start()

    def run(self) -> None:
        self.job = self.peer.pull(self.seconds)[0] == 200

    def has_job(self) -> bool:
        self.join(20)
        assert not self.is_alive()
        return self.job


def states(server: Server) -> dict[str, str]:
    return {client["name"]: client["state"] for client in server.status()["clients"]}


def waits(server: Server, name: str) -> Callable[[], bool]:
    return lambda: states(server)[name] == "waiting"


def test_who_reports_comes_after_those_who_wait(tmp_path: Path) -> None:
    with served(tmp_path / "fed", document(3, 1)) as server:
        alice, bob, carol = (joined(server, name) for name in ("alice", "bob", "carol"))
        assert alice.pull()[0] == 200
        assert "aflock-job" in alice.push(ONES, next=True)[1]  # nobody waits
        first = Waiting(bob)
        until(waits(server, "bob"))
        second = Waiting(carol)
        until(waits(server, "carol"))
        status, headers, body = alice.push(ONES, next=True)
        assert (status, headers["content-type"], "aflock-job" in headers) == (200, "application/json", False), body
        assert first.has_job()
        assert "aflock-job" not in bob.push(ONES, next=True)[1]
        assert second.has_job()
        assert states(server) == {"alice": "idle", "bob": "idle", "carol": "working"}


def test_a_pull_that_timed_out_keeps_its_position_in_the_order(tmp_path: Path) -> None:
    with served(tmp_path / "fed", document(3, 1)) as server:
        alice, bob, carol = (joined(server, name) for name in ("alice", "bob", "carol"))
        assert alice.pull()[0] == 200
        assert bob.pull(1)[0] == 204
        second = Waiting(carol)
        until(waits(server, "carol"))
        first = Waiting(bob)  # again
        time.sleep(0.2)
        assert alice.push(ONES)[0] == 200
        assert first.has_job()
        assert bob.push(ONES)[0] == 200
        assert second.has_job()


def test_a_client_that_pulls_again_leaves_its_place_to_those_who_wait(tmp_path: Path) -> None:
    with served(tmp_path / "fed", document(2, 1)) as server:
        alice, bob = joined(server, "alice"), joined(server, "bob")
        assert alice.pull()[0] == 200
        assert alice.pull()[0] == 200  # nobody waits: it gets another
        first = Waiting(bob)
        until(waits(server, "bob"))
        assert alice.pull()[0] == 204
        assert first.has_job()
        assert server.status()["dropped"] == 1


def test_a_free_place_is_not_kept_for_who_has_not_asked(tmp_path: Path) -> None:
    with served(tmp_path / "fed", document(2, 1)) as server:
        alice, bob = joined(server, "alice"), joined(server, "bob")
        for _ in range(5):
            assert alice.pull()[0] == 200
            assert alice.push(ONES)[0] == 200
            assert bob.pull()[0] == 200
            assert bob.push(ONES)[0] == 200


# --- with a clock of one's own ---------------------------------------------------------------------------------------


class OnePlaceFederation:
    """A federation of three with one place, those who wait for it, and a clock that stands still."""

    def __init__(self, selection: str = "waiting", probabilities: dict[str, float] | None = None) -> None:
        self.now = 1000.0
        self.federation = Settings.build(document(3, 1)).federation(np.zeros(8, np.float32))
        self.waiting = WaitingPulls(self.federation, NextClient(selection, 0, probabilities), lambda: self.now)
        for name in ("alice", "bob", "carol"):
            self.federation.apply({"k": "hello", "t": 0.0, "name": name, "gen": 1}, b"")
        assert self.give("alice")

    def give(self, name: str) -> bool:
        """The "pull" record of a client."""
        given = self.federation.apply({"k": "pull", "t": 0.0, "name": name}, b"") is not None
        self.waiting.pulled(name, given=given)
        return given

    def drop(self, name: str) -> None:
        """The client gives its job back."""
        ticket = self.federation.coordinator.ticket(self.federation.clients[name].number)
        self.federation.apply({"k": "drop", "t": 0.0, "name": name, "j": ticket.job, "why": "test"}, b"")
        self.waiting.grant_places()

    async def ask(self, name: str) -> bool:
        """A pull that does not wait: whether there is a place for the client."""
        await self.waiting.wait(_Here(), name, 0)
        return self.waiting.has_place(name)


class _HungUp:
    async def wait_for_disconnect(self) -> None:
        """At once."""


class _Here:
    async def wait_for_disconnect(self) -> None:
        await asyncio.Event().wait()


def test_the_wait_of_a_client_that_asks_in_time_goes_on() -> None:
    async def scenario() -> None:
        small = OnePlaceFederation()
        assert not await small.ask("bob")
        small.now += 1
        assert not await small.ask("carol")
        small.now += FORGOTTEN - 1.5
        assert not await small.ask("bob")
        assert small.waiting.seconds() == {"bob": FORGOTTEN - 0.5, "carol": FORGOTTEN - 1.5}
        small.now += 1
        small.waiting.check()
        assert small.waiting.seconds() == {"bob": FORGOTTEN + 0.5, "carol": FORGOTTEN - 0.5}
        small.now += 1
        small.waiting.check()  # carol has not asked for a minute
        assert small.waiting.seconds() == {"bob": FORGOTTEN + 1.5}
        small.drop("alice")
        assert not small.waiting.has_place("bob")  # it asked last two seconds ago
        assert await small.ask("carol")

    asyncio.run(scenario())


def test_a_place_is_kept_a_moment_for_a_client_that_asks_again_and_again() -> None:
    async def scenario() -> None:
        small = OnePlaceFederation()
        assert not await small.ask("bob")
        small.now += PULL_GRACE / 2
        small.drop("alice")
        assert not await small.ask("carol")
        assert await small.ask("bob")
        small.now += 1.01 * PULL_GRACE  # it has not taken it: its record never came
        assert await small.ask("carol")
        assert not small.waiting.has_place("bob")

    asyncio.run(scenario())


def test_whoever_hangs_up_leaves_its_place_to_the_next() -> None:
    async def scenario() -> None:
        small = OnePlaceFederation()
        with pytest.raises(Disconnected):
            await small.waiting.wait(_HungUp(), "bob", 30)
        assert small.waiting.seconds() == {}
        small.drop("alice")
        assert await small.ask("carol")

    asyncio.run(scenario())


def test_a_client_that_left_or_is_suspended_waits_no_more() -> None:
    async def scenario() -> None:
        small = OnePlaceFederation()
        tasks = [asyncio.create_task(small.waiting.wait(_Here(), name, 30)) for name in ("bob", "carol")]
        await asyncio.sleep(0)
        assert list(small.waiting.seconds()) == ["bob", "carol"]
        small.waiting.forget("bob")
        small.federation.apply({"k": "suspend", "t": 0.0, "name": "carol", "gen": 1}, b"")
        small.waiting.check()
        assert await asyncio.gather(*tasks) == [True, True]  # they look again, and are refused
        assert small.waiting.seconds() == {}
        small.drop("alice")
        assert not small.waiting.has_place("carol")

    asyncio.run(scenario())


def test_biased_serves_who_has_no_weight_when_nobody_else_waits() -> None:
    async def scenario() -> None:
        small = OnePlaceFederation("biased", {"carol": 1.0})
        assert not await small.ask("bob")
        assert not await small.ask("carol")
        small.drop("alice")
        assert small.waiting.has_place("carol")
        assert small.give("carol")
        small.drop("carol")
        assert small.waiting.has_place("bob")

    asyncio.run(scenario())


def test_fair_does_not_make_up_for_the_time_before_a_client_came() -> None:
    chosen, names = NextClient("fair", 0), ["alice", "bob"]
    picked: list[str] = []
    for k in range(160):
        picked.append(chosen.pick(names if k < 100 else [*names, "late"]))
        chosen.served(picked[-1])
    assert [picked[:100].count(name) for name in names] == [50, 50]
    assert [picked[100:].count(name) for name in (*names, "late")] == [20, 20, 20]


# --- what is told ----------------------------------------------------------------------------------------------------


def test_a_long_wait_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        small = OnePlaceFederation()
        tasks = [asyncio.create_task(small.waiting.wait(_Here(), name, 300)) for name in ("bob", "carol")]
        await asyncio.sleep(0)
        for seconds in (LONG, 0.1, 1.0, LONG):
            small.now += seconds
            small.waiting.check()
        for task in tasks:
            task.cancel()

    monkeypatch.setattr(logging.getLogger("aflock.server"), "propagate", True)
    with caplog.at_level(logging.WARNING, "aflock.server"):
        asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == [
        "bob, carol: waiting for a job for over a minute (2 clients in all); [federation] concurrency may be too small"
    ]


def test_status_and_metrics_tell_who_waits(tmp_path: Path) -> None:
    with served(tmp_path / "fed", document(2, 1)) as server:
        alice, bob = joined(server, "alice"), joined(server, "bob")
        assert alice.pull()[0] == 200
        first = Waiting(bob)
        until(waits(server, "bob"))
        time.sleep(0.3)
        found = server.status()
        told = {client["name"]: client["waiting"] for client in found["clients"]}
        assert told["alice"] is None
        assert 0.2 < told["bob"] < 20
        assert (found["clients_waiting"], found["longest_wait"]) == (1, told["bob"])
        text = alice.request("GET", "/metrics")[2].decode()
        assert "aflock_clients_waiting 1\n" in text
        assert "aflock_clients_waiting_long 0\n" in text
        assert "aflock_longest_wait_seconds 0\n" not in text
        assert alice.push(ONES)[0] == 200
        assert first.has_job()
        found = server.status()
        assert (found["clients_waiting"], found["longest_wait"]) == (0, 0.0)
        assert [client["waiting"] for client in found["clients"]] == [None, None]


def test_who_waits_longer_than_a_minute_is_counted(tmp_path: Path) -> None:
    store = DataFolder(tmp_path / "fed", Settings.build(document(2, 1)))
    try:
        for name in ("alice", "bob"):
            store.federation.apply({"k": "hello", "t": 0.0, "name": name, "gen": 1}, b"")
        seconds = {"alice": 75.25, "bob": 59.0}
        text = metrics.text(store, ServerCounters(), seconds, False)
        for line in ("clients_waiting 2", "clients_waiting_long 1", "longest_wait_seconds 75.25"):
            assert f"\naflock_{line}\n" in text
        found = metrics.status(store, ServerCounters(), seconds)
    finally:
        store.close()
    shown = _rendered(found)
    assert "waiting 75 s" in shown
    assert "without a job: 2 clients, the longest for 75 s" in shown


def _rendered(found: dict[str, Any]) -> str:
    from rich.console import Console

    console = Console(width=120, file=io.StringIO())
    with console.capture() as shown:
        console.print(status_table.table(found, 120))
    return shown.get()


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"selection": "oldest"}, "selection='oldest' is not valid; expected one of 'waiting'"),
        ({"selection": "biased"}, '"biased" needs them'),
        ({"probabilities": {"alice": 1}}, "do not go together"),
        ({"selection": "biased", "probabilities": [1, 2]}, "expected a table of numbers"),
        ({"selection": "biased", "probabilities": {"alice": -1}}, "expected a table of numbers"),
        ({"selection": "biased", "probabilities": {"alice": 0}}, "not all 0"),
        ({"selection": "biased", "probabilities": {"Alice": 1}}, "the name 'Alice' is not valid"),
    ],
)
def test_a_selection_that_makes_no_sense_is_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Settings.build(document(2, 1, **keys))
    assert says in str(raised.value)
    assert "[federation]" in str(raised.value)


def test_a_restart_may_change_the_selection_and_nothing_else_of_its_section(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with running(folder, document(2, 1)) as server:
        joined(server, "alice")
    kept = folder / "federation.toml"
    lines = [line for line in kept.read_text().splitlines() if not line.startswith("selection")]
    kept.write_text("\n".join(lines) + "\n")  # as an older version wrote it
    probabilities = {"alice": 2.5, "bob": 1}
    with served(folder, document(2, 1, selection="biased", probabilities=probabilities)):
        found = config.read(kept, "")["federation"]
    assert (found["selection"], found["probabilities"]) == ("biased", probabilities)
    with served(folder, document(2, 1, selection="fair")):
        assert "probabilities" not in config.read(kept, "")["federation"]
    with pytest.raises(NotStarted, match="concurrency is not what this federation was begun with"):
        start(folder, document(2, 2))
