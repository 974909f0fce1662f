"""The guard on its own: when norms begin to limit the next vector, and who sent the longest one."""

from __future__ import annotations

import math

from aflock.net.federation.guard import SETTLED, Guard


def test_the_sender_of_the_longest_vector_is_remembered_and_saved() -> None:
    guard = Guard(1.0)
    assert guard.longest == "the longest vector is not known"
    guard.note_update("honest", ["gradient"], [1.0])
    guard.note_update("evil", ["gradient"], [3.4e38])
    for _ in range(50):
        guard.note_update("honest", ["gradient"], [0.1])
    assert guard.longest == "the longest gradient came from evil (norm 3.4e+38)"
    again = Guard(1.0)
    again.load_state_dict(guard.state_dict())
    assert again.longest == guard.longest
    assert again.objection("gradient", math.inf, most=None, factor=100.0)
    assert not again.objection("gradient", 3.4e38, most=None, factor=100.0)


def test_norms_limit_a_vector_from_the_twentieth_accepted_one_on() -> None:
    """After 19 there is no limit; after 20, exactly `factor` times the longest is allowed. Each name has its count."""
    guard = Guard(1.0)
    for _ in range(SETTLED - 1):
        guard.note_update("alice", ["gradient"], [2.0])
    assert not guard.objection("gradient", 1e30, most=None, factor=100.0)
    guard.note_update("alice", ["gradient"], [2.0])
    assert "100 times the largest so far, 2 " in guard.objection("gradient", 200.1, most=None, factor=100.0)
    assert not guard.objection("gradient", 200.0, most=None, factor=100.0)
    assert not guard.objection("gradient", 1e30, most=None, factor=None)
    assert not guard.objection("delta", 1e30, most=None, factor=100.0)
