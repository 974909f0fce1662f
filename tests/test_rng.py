"""One seed, many named streams."""

from __future__ import annotations

import numpy as np
import pytest

from aflock import rng
from aflock.errors import StateError


def test_a_stream_depends_on_seed_and_name_alone() -> None:
    a = rng.stream(1, "client", 3, "job", 17).random(5)
    assert np.array_equal(a, rng.stream(1, "client", 3, "job", 17).random(5))
    others = [
        rng.stream(2, "client", 3, "job", 17),
        rng.stream(1, "client", 3, "job", 18),
        rng.stream(1, "client", 31, "job", 7),
        rng.stream(1, "client", "3", "job", 17),
        rng.stream(1, "client", 3, "job"),
    ]
    assert all(not np.array_equal(a, other.random(5)) for other in others)


def test_the_key_is_fixed_for_all_time() -> None:
    """Recorded once: runs must repeat across versions and machines."""
    assert rng.key(0, "schedule") == 0x2A4737A366BA976F22DFFB759BC10E8D
    assert rng.key(np.int64(7), "client", np.int32(3)) == rng.key(7, "client", 3)  # type: ignore[arg-type]


def test_state_goes_on_where_it_was() -> None:
    a = rng.stream(1, "x")
    a.random(7)
    saved = rng.get_state(a)
    expected = a.random(3)
    b = rng.stream(2, "y")
    rng.set_state(b, saved)
    assert np.array_equal(b.random(3), expected)
    with pytest.raises(StateError, match="not one of PCG64"):
        rng.set_state(b, {"bit_generator": "MT19937"})


def test_streams_do_not_touch_the_global_state() -> None:
    before = np.random.get_state()[1].copy()  # type: ignore[index] # noqa: NPY002
    rng.stream(0, "a").random(100)
    assert np.array_equal(before, np.random.get_state()[1])  # type: ignore[index] # noqa: NPY002


@pytest.mark.parametrize("used", [0, 1, 255, 256, 257, 600])
def test_numbers_made_ahead_are_the_streams_own_and_go_on_from_a_saved_place(used: int) -> None:
    plain, ahead = rng.stream(3, "x"), rng.Ahead(rng.stream(3, "x"))
    assert [ahead.random() for _ in range(used)] == plain.random(used).tolist()
    other = rng.Ahead(rng.stream(9, "y"))
    other.random()
    other.load_state_dict(ahead.state_dict())
    expected = plain.random(300).tolist()
    assert [ahead.random() for _ in range(300)] == expected
    assert [other.random() for _ in range(300)] == expected


def test_a_branch_of_a_key_draws_what_its_counter_says() -> None:
    key = rng.counter_key(5, "fleet")
    row = rng.fractions(key, 4, 7, 2)  # counters 7, 2, then 0 to 3
    assert [rng.fraction(rng.branch(key, 7), 2, i) for i in range(4)] == row.tolist()
    assert len({rng.fraction(rng.branch(key, c), 0, 0) for c in range(50)}) == 50
