"""Whose update it was: the guard names the sender of the longest vector, also long after it came."""

from __future__ import annotations

import math

from aflock.net.federation.guard import Guard


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
