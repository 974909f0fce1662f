"""Clients that come and go: the opening, first gradients, joining, leaving."""

from __future__ import annotations

import pytest

from aflock import errors
from tests.coordination.coordinators import answer, made


def test_the_opening() -> None:
    """Every client's first job is marked; the rule starts when the last answer is in; nobody works meanwhile."""
    c, events = made("ace", 3, lr=1.0)
    jobs = c.dispatch(0.0)
    assert [(job.first, job.version) for job in jobs] == [(True, 0)] * 3
    assert c.opening
    assert c.push(answer(jobs[0], "gradient", value=1.0), 1.0).buffered
    assert c.pull(jobs[0].client, 1.5) is None  # it has done its part
    assert c.dispatch(1.5) == []
    c.push(answer(jobs[1], "gradient", value=2.0), 2.0)
    assert c.push(answer(jobs[2], "gradient", value=3.0), 3.0).applied
    assert not c.opening
    assert (c.strategy.version, c.strategy.model[0]) == (1, -2)
    assert [job.first for job in c.dispatch(3.0)] == [False] * 3
    assert [e.first for e in events if e.kind == "arrival"] == [True] * 3


def test_the_opening_under_a_concurrency_limit() -> None:
    c, _ = made("ace", 5, options={"concurrency": 2})
    seen = []
    while c.opening:
        for job in c.dispatch(0.0):
            assert job.first
            seen.append(job.client)
            c.push(answer(job, "gradient"), 0.0)
    assert sorted(seen) == list(range(5))


def test_a_client_that_never_answers_does_not_block_the_opening_once_it_has_left() -> None:
    c, _ = made("ace", 3, lr=1.0)
    jobs = {job.client: job for job in c.dispatch(0.0)}
    c.push(answer(jobs[0], "gradient", value=1.0), 1.0)
    c.push(answer(jobs[1], "gradient", value=3.0), 1.0)
    c.leave(2, 2.0)
    assert not c.opening
    assert c.strategy.model[0] == -2
    assert {job.client for job in c.dispatch(2.0)} == {0, 1}


def test_joining_a_rule_that_needs_first_gradients() -> None:
    c, events = made("ace", 2, lr=1.0)
    for job in c.dispatch(0.0):
        c.push(answer(job, "gradient", value=1.0), 0.0)
    c.join(7, 1.0)
    assert c.strategy.n == 2
    opening = c.pull(7, 2.0)
    assert opening is not None
    assert opening.first
    receipt = c.push(answer(opening, "gradient", value=4.0), 3.0)
    assert (receipt.buffered, receipt.reason) == (True, "the client has joined")
    assert c.strategy.clients == {0, 1, 7}
    c.push(answer(c.pull(0, 3.0), "gradient", value=1.0), 4.0)
    assert c.strategy.model[0] == -1 - 2  # the mean of 1, 1, 4
    again = c.pull(7, 4.0)
    assert again is not None
    assert not again.first
    assert [e.kind for e in events if e.client == 7] == ["join", "pull", "arrival", "pull"]


def test_joining_and_leaving_any_rule() -> None:
    c, events = made("fedbuff", 2, buffer=2)
    c.join(5, 0.0)
    assert {job.client for job in c.dispatch(0.0)} == {0, 1, 5}
    c.leave(5, 1.0)
    assert 5 not in c.working
    assert events[-1].kind == "leave"
    with pytest.raises(errors.UnknownClient, match="client 5 is not in the federation of 2 clients"):
        c.pull(5, 1.0)
    with pytest.raises(errors.DuplicateClient):
        c.join(1, 1.0)


def test_a_client_on_its_way_in_may_leave_again() -> None:
    c, _ = made("ace", 2)
    for job in c.dispatch(0.0):
        c.push(answer(job, "gradient"), 0.0)
    c.join(7, 1.0)
    with pytest.raises(errors.DuplicateClient, match="on its way"):
        c.join(7, 1.0)
    c.pull(7, 1.0)
    c.leave(7, 2.0)
    assert c.clients == {0, 1}
    c.join(7, 3.0)


def test_the_first_job_is_checked_like_any_other() -> None:
    c, _ = made("ace", 1)
    job = c.pull(0, 0.0)
    with pytest.raises(errors.CountError, match="steps is 0"):
        c.push(answer(job, "gradient", steps=0), 1.0)
    with pytest.raises(errors.MissingVector, match="lacks the vector 'gradient'"):
        c.push(answer(job, "delta"), 1.0)
    assert c.push(answer(job, "gradient"), 1.0).applied


def test_everyone_leaves_during_the_opening_and_others_come() -> None:
    c, _ = made("ace", 2, lr=1.0)
    c.dispatch(0.0)
    c.leave(0, 1.0)
    c.leave(1, 1.0)
    assert c.opening
    c.join(5, 2.0)
    (job,) = c.dispatch(2.0)
    assert job.first
    assert c.push(answer(job, "gradient", value=3.0), 3.0).applied
    assert c.strategy.model[0] == -3
