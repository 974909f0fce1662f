"""The server's core: who may pull, what becomes of what they send, and a record of everything."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from aflock import Job, Update, errors, local, state, strategies
from aflock.coordination.coordinator import Coordinator
from aflock.events import Event
from tests.contract.continuation import digest
from tests.coordination.coordinators import ONE, answer, made


def test_a_pull_a_push_and_their_records() -> None:
    c, events = made("asgd", 3, lr=0.5)
    job = c.pull(1, now=1.0)
    assert job is not None
    assert (job.client, job.version, job.id) == (1, 0, 0)
    receipt = c.push(answer(job, steps=4, examples=7), now=3.5)
    assert receipt.applied
    assert [e.kind for e in events] == ["start", "pull", "arrival"]
    pull, arrival = events[1:]
    assert (pull.time, pull.client, pull.version, pull.job, pull.server) == (1.0, 1, 0, 0, 0)
    assert (arrival.time, arrival.client, arrival.version, arrival.server) == (3.5, 1, 0, 1)
    assert (arrival.steps, arrival.examples, arrival.staleness, arrival.outcome) == (4, 7, 0, "applied")


def test_finished_clients_return_to_the_pool() -> None:
    """A thousand jobs on two clients."""
    c, _ = made("asgd", 2)
    for now in range(500):
        jobs = c.dispatch(float(now))
        assert {job.client for job in jobs} == {0, 1}
        assert c.idle == 0
        for job in jobs:
            c.push(answer(job), float(now))
    assert c.strategy.version == 1000


def test_the_concurrency_limit() -> None:
    c, _ = made("asgd", 10, options={"concurrency": 3})
    jobs = c.dispatch(0.0)
    assert len(jobs) == len(c.working) == 3
    assert c.dispatch(0.0) == []
    waiting = next(client for client in range(10) if client not in c.working)
    assert c.pull(waiting, 0.0) is None
    c.push(answer(jobs[0]), 1.0)
    assert c.pull(waiting, 1.0) is not None
    assert c.dispatch(1.0) == []


def test_staleness_is_counted_in_versions_between_pull_and_push() -> None:
    c, _ = made("fedbuff", 3, buffer=2)
    slow = c.pull(0, 0.0)
    for now in range(1, 7):  # six uploads make three versions
        c.push(answer(c.pull(1 + now % 2, now)), now)
    assert c.push(answer(slow), 9.0).staleness == 3


def test_duplicates_and_impossible_versions_are_refused_and_recorded() -> None:
    c, events = made("asgd", 3)
    job = c.pull(0, 0.0)
    assert job is not None
    before = c.strategy.model.copy()
    bad = {
        "never given": Update(1, 0, {"gradient": ONE}),
        "another job": Update(0, 0, {"gradient": ONE}, job=99),
        "another version": Update(0, 7, {"gradient": ONE}, job=job.id),
        "a stranger": Update(42, 0, {"gradient": ONE}),
        "not finite": Update(0, 0, {"gradient": np.nan * ONE}, job=job.id),
    }
    kinds = [
        errors.DuplicateUpdate,
        errors.DuplicateUpdate,
        errors.VersionError,
        errors.UnknownClient,
        errors.VectorError,
    ]
    for (what, update), kind in zip(bad.items(), kinds, strict=True):
        with pytest.raises(kind):
            c.push(update, 1.0)
        assert events[-1].kind == "refuse", what
        assert events[-1].reason
    assert np.array_equal(c.strategy.model, before)
    assert c.push(answer(job), 2.0).applied  # the job is still open for its true answer
    with pytest.raises(errors.DuplicateUpdate, match="client 0 has no open job 0: it was answered"):
        c.push(answer(job), 3.0)
    assert c.strategy.version == 1


def test_time_is_an_argument_and_never_runs_backwards() -> None:
    c, _ = made("asgd", 2)
    c.pull(0, 5.0)
    with pytest.raises(errors.InputError, match=r"time 4\.0 is not valid; expected a finite number of at least 5\.0"):
        c.pull(1, 4.0)
    with pytest.raises(errors.InputError, match="time nan"):
        c.pull(1, math.nan)
    assert c.pull(1, 5.0) is not None


def test_dropped_jobs_free_their_slot() -> None:
    c, events = made("asgd", 3, options={"concurrency": 1})
    job = c.dispatch(0.0)[0]
    c.drop(job.client, 5.0, "lease ran out")
    assert (events[-1].kind, events[-1].reason) == ("drop", "lease ran out")
    assert c.idle == 3
    assert len(c.dispatch(5.0)) == 1
    with pytest.raises(errors.DuplicateUpdate):
        c.push(answer(job), 6.0)  # its time is over, whoever has the slot now


def test_a_client_that_pulls_again_has_lost_its_job() -> None:
    c, events = made("asgd", 2)
    old = c.pull(0, 0.0)
    new = c.pull(0, 1.0)
    assert old is not None
    assert new is not None
    assert new.id != old.id
    assert [e.kind for e in events[-2:]] == ["drop", "pull"]
    with pytest.raises(errors.DuplicateUpdate):
        c.push(answer(old), 2.0)
    assert c.push(answer(new), 2.0).applied


def test_over_stale_updates_are_discarded_and_their_clients_restart() -> None:
    c, events = made("asgd", 3, options={"max_staleness": 2})
    slow = c.pull(0, 0.0)
    for now in range(1, 4):
        c.push(answer(c.pull(1, now)), now)
    version = c.strategy.version
    receipt = c.push(answer(slow), 9.0)
    assert (receipt.rejected, receipt.staleness, c.strategy.version) == (True, 3, version)
    assert (events[-1].kind, events[-1].outcome) == ("arrival", "rejected")
    fresh = c.pull(0, 9.0)
    assert fresh is not None
    assert fresh.version == version


def test_overdue_clients_can_be_reset_before_they_report() -> None:
    c, events = made("mr-asyncfl", 3, max_staleness=2)
    slow = c.pull(0, 0.0)
    for now in range(1, 4):
        assert c.overdue() == []
        c.push(answer(c.pull(1, now)), now)
    assert c.overdue() == [0]
    job = c.reset(0, 4.0)
    assert (job.client, job.version) == (0, 3)
    assert [e.kind for e in events[-2:]] == ["reset", "pull"]
    assert c.overdue() == []
    with pytest.raises(errors.DuplicateUpdate):
        c.push(answer(slow), 5.0)
    assert c.push(answer(job), 5.0).applied


def test_a_cohort_waits_and_rests() -> None:
    """fedavg, 2 of 4: two jobs per round, no third until the round is over, then anyone again."""
    c, _ = made("fedavg", 4, buffer=2)
    jobs = c.dispatch(0.0)
    assert len(jobs) == 2
    assert c.push(answer(jobs[0]), 1.0).buffered
    assert c.dispatch(1.0) == []
    assert c.pull(jobs[0].client, 1.0) is None
    assert c.push(answer(jobs[1]), 8.0).applied
    assert len(c.dispatch(8.0)) == 2


def test_a_lost_cohort_member_is_replaced_by_another_client() -> None:
    c, _ = made("fedavg", 3, buffer=2)
    first, second = c.dispatch(0.0)
    c.push(answer(first), 1.0)
    c.leave(second.client, 2.0)
    (replacement,) = c.dispatch(2.0)
    assert replacement.client not in (first.client, second.client)
    assert c.push(answer(replacement), 3.0).applied


def test_finish_uses_the_last_partial_buffer() -> None:
    c, events = made("fedbuff", 3, buffer=5)
    c.push(answer(c.pull(0, 0.0)), 1.0)
    assert c.finish(2.0)
    assert (c.strategy.version, events[-1].kind) == (1, "flush")
    assert not c.finish(3.0)


def test_bad_settings() -> None:
    s = strategies.create("asgd", clients=2)
    options: dict[str, Any]
    for options in ({"concurrency": 0}, {"max_staleness": -1}, {"concurrency": 1.5}):
        with pytest.raises(errors.ParameterError, match="expected an integer of at least"):
            Coordinator(s, **options)
    with pytest.raises(errors.ParameterError, match="expected one of uniform"):
        Coordinator(s, selection="any")
    with pytest.raises(errors.OrderError, match="call start"):
        Coordinator(s).pull(0, 0.0)


@pytest.mark.parametrize("name", strategies.names())
@pytest.mark.parametrize("policy", ["uniform", "fair", "all"])
def test_going_on_from_a_saved_state(name: str, policy: str, tmp_path: Any) -> None:
    """A run cut in two, open jobs included, gives the events and bits of the whole one; for every rule."""
    whole, whole_events = _federation(name, policy)
    _drive(whole, 0, 120)
    cut, _ = _federation(name, policy)
    _drive(cut, 0, 60)
    state.save(tmp_path / "s", cut.state_dict())
    events: list[Event] = []
    resumed = Coordinator(strategies.create(name, clients=6, **_small(name)), concurrency=4, selection=policy,
                          on_event=events.append)  # fmt: skip
    resumed.load_state_dict(state.load(tmp_path / "s"))
    _drive(resumed, 60, 120)
    assert events == whole_events[-len(events) :]
    assert np.array_equal(resumed.strategy.model, whole.strategy.model)


def _small(name: str) -> dict[str, Any]:
    known = [item["name"] for item in strategies.get(name).params.describe()]
    return {"buffer": 3} if "buffer" in known else {}


def _federation(name: str, policy: str) -> tuple[Coordinator, list[Event]]:
    return made(name, 6, options={"concurrency": 4, "selection": policy}, **_small(name))


def _drive(c: Coordinator, begin: int, end: int) -> None:
    """Each tick: dispatch, then one open job answers, leaves its slot or, rarely, its client leaves or joins."""
    for tick in range(begin, end):
        now, draws = float(tick), np.random.default_rng(tick)
        c.dispatch(now)
        client = sorted(c.working)[int(draws.integers(len(c.working)))]
        ticket = c.working[client]
        if tick % 17 == 5:
            c.drop(client, now)
        elif tick % 40 == 30:
            c.leave(client, now)
        elif tick % 40 == 35:
            c.join(100 + tick, now)
        else:
            vectors = {
                n: draws.standard_normal(2).astype(np.float32) for n in ("gradient", "delta", "model", "direction")
            }
            c.push(Update(client, ticket.version, vectors, 1, 10, ticket.job), now)


def test_a_state_with_another_policy_is_refused() -> None:
    a, _ = made("asgd", 2)
    with pytest.raises(errors.StateError, match="saved with selection 'uniform'; expected 'all'"):
        Coordinator(strategies.create("asgd", clients=2), selection="all").load_state_dict(a.state_dict())


def test_refused_calls_change_nothing_not_even_the_clock() -> None:
    c, events = made("ace", 2)
    for job in c.dispatch(0.0):
        c.push(answer(job, "gradient"), 0.0)
    c.pull(0, 1.0)
    before = digest(c.state_dict())
    bad: list[Any] = [
        lambda: c.pull(7, 9.0),
        lambda: c.pull([1], 9.0),  # type: ignore[arg-type]
        lambda: c.leave(7, 9.0),
        lambda: c.drop(1, 9.0),
        lambda: c.reset(1, 9.0),
        lambda: c.join(-5, 9.0),
        lambda: c.join("a", 9.0),  # type: ignore[arg-type]
        lambda: c.join(2.5, 9.0),  # type: ignore[arg-type]
        lambda: c.join(1, 9.0),
        lambda: c.push(Update(0, 1, {"gradient": np.nan * ONE}), 9.0),
        lambda: c.push(Update(0, 1, {"gradient": ONE}, steps=0), 9.0),
        lambda: c.push(Update([0], 1, {"gradient": ONE}), 9.0),  # type: ignore[arg-type]
        lambda: c.push({"client": 0}, 9.0),  # type: ignore[arg-type]
    ]
    for call in bad:
        count = len(events)
        with pytest.raises(errors.InputError):
            call()
        assert [e.kind for e in events[count:]] == ["refuse"]
        assert digest(c.state_dict()) == before
    for time in (None, "1", True, math.inf):
        with pytest.raises(errors.InputError, match=r"time .* is not valid"):
            c.pull(1, time)  # type: ignore[arg-type]
    assert digest(c.state_dict()) == before


def test_a_discarded_client_restarts_from_the_current_model_whatever_the_exchange() -> None:
    c, _ = made("mr-asyncfl", 1, max_staleness=0, exchange="before")
    outcomes = []
    for now in range(6):
        job = c.pull(0, float(now))
        assert job is not None
        outcomes.append((job.version, c.push(answer(job), float(now)).outcome))
    assert outcomes == [
        (0, "applied"), (0, "rejected"), (1, "applied"), (1, "rejected"), (2, "applied"), (2, "rejected"),
    ]  # fmt: skip


def test_a_reset_starts_from_the_current_model_whatever_the_exchange() -> None:
    c, _ = made("mr-asyncfl", 2, exchange="before")
    c.push(answer(c.pull(0, 0.0)), 1.0)
    assert c.pull(0, 1.0).version == 0  # type: ignore[union-attr]
    assert c.reset(0, 2.0).version == 1


def test_client_memory_survives_discarded_and_lost_updates() -> None:
    """What the server adds up stays what the client believes it has told, whatever is thrown away."""
    strategy: Any = strategies.create("ace", clients=2, memory="client")
    c = Coordinator(strategy, max_staleness=1)
    c.start(0 * ONE)
    rule, memories, draws = local.create("sgd"), [dict[str, Any](), dict[str, Any]()], np.random.default_rng(0)
    held: list[tuple[Job, local.Trained]] = []
    for now in range(200):
        for job in c.dispatch(float(now)):
            g = draws.standard_normal(2).astype(np.float32)
            task = local.Task(lambda x, k, g=g: g)  # type: ignore[misc]
            held.append((job, rule.train(job, task, needs=("gradient",), changes=strategy.changes,
                                         memory=memories[job.client])))  # fmt: skip
        job, done = held.pop(int(draws.integers(len(held))))
        if not c.opening and draws.random() < 0.3:
            c.drop(job.client, float(now))
            continue
        receipt = c.push(Update(job.client, job.version, done.vectors, job=job.id), float(now))
        done.keep(memories[job.client], receipt)
        if not c.opening:
            np.testing.assert_allclose(strategy.total, sum(m["told gradient"] for m in memories), atol=1e-9)


def test_a_damaged_state_changes_nothing() -> None:
    c, _ = made("asgd", 3)
    c.pull(0, 1.0)
    saved = c.state_dict()
    c.push(Update(0, 0, {"gradient": ONE}), 2.0)
    before = digest(c.state_dict())
    for part in ("selection", "open", "strategy", "first"):
        broken = {**saved, part: {}}
        with pytest.raises(errors.StateError):
            c.load_state_dict(broken)
        assert digest(c.state_dict()) == before
    c.load_state_dict(saved)
    assert c.strategy.version == 0


def test_a_job_of_a_version_that_does_not_exist_is_not_assigned() -> None:
    c, _ = made("asgd", 2)
    for version in (-1, 1):
        with pytest.raises(errors.VersionError, match=f"version {version} does not exist; expected 0 to 0"):
            c.assign(Job(0, version, ONE), 0.0)
        assert c.is_idle(0)
    assert c.assign(Job(0, 0, ONE), 0.0).id == 0
