"""Rows: dense, int8 and on disk."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from aflock import kernels, rows
from aflock.errors import DoesNotFit, ParameterError, StateError
from aflock.system import memory
from aflock.system.disk_rows import create

KINDS = rows.KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_stated_before_they_are_taken(kind: str) -> None:
    clients, length = 10, 10_000
    made = create(kind, (), length)
    stated = clients * made.row_bytes(length)
    assert create(kind, range(clients), length).nbytes == stated
    per_weight = stated / clients / length
    assert per_weight <= {"dense": 4.0, "int8": 1.03, "disk": 4.01}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_fit_is_refused_in_one_sentence(kind: str) -> None:
    with pytest.raises(DoesNotFit, match=rf"1000000 {kind} rows of 1000000000 weights need .* TB, but .* free"):
        create(kind, range(1_000_000), 1_000_000_000)


def test_a_row_too_many_is_refused_when_it_joins() -> None:
    free = [12_000]
    made = rows.create("dense", range(3), 1000, free=lambda: free[0])
    free[0] = 3999
    with pytest.raises(DoesNotFit, match="1 dense rows of 1000 weights need 4 kB, but memory has 4 kB free"):
        made.insert(3)
    assert 3 not in made


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ParameterError, match="'int4' do not exist; expected one of dense, int8, disk"):
        create("int4", range(3), 10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_follows_the_rows(kind: str) -> None:
    draws = np.random.default_rng(0)
    made, total = create(kind, range(5), 300), np.zeros(300)
    for _ in range(200):
        made.exchange(int(draws.integers(5)), draws.standard_normal(300).astype(np.float32), total)
    exact = sum(made.read(c).astype(np.float64) for c in made)
    np.testing.assert_allclose(total, exact, atol=1e-5 if kind == "int8" else 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_and_go(kind: str) -> None:
    made = create(kind, range(3), 20)
    ones = np.ones(20, np.float32)
    for client in range(3):
        made.store(client, (client + 1) * ones)
    made.discard(1)
    assert sorted(made) == [0, 2]
    for client in range(10, 40):  # far beyond what was reserved; space of the departed is used again
        made.insert(client)
        assert not made.read(client).any()
    made.insert(50, 7 * ones)
    np.testing.assert_allclose(made.read(50), 7, rtol=1e-6)
    np.testing.assert_allclose(made.read(0), 1, rtol=1e-6)
    np.testing.assert_allclose(made.read(2), 3, rtol=1e-6)
    assert len(made) == 33


@pytest.mark.parametrize("kind", KINDS)
def test_state(kind: str) -> None:
    draws = np.random.default_rng(1)
    made = create(kind, range(4), 500, seed=3)
    for client in made:
        made.store(client, draws.standard_normal(500).astype(np.float32))
    saved = made.state_dict()
    other = create(kind, range(2), 500, seed=99)
    other.load_state_dict(saved)
    v, a, b = draws.standard_normal(500).astype(np.float32), np.zeros(500), np.zeros(500)
    made.exchange(2, v, a)
    other.exchange(2, v, b)
    assert np.array_equal(a, b)
    for client in made:
        assert np.array_equal(made.read(client), other.read(client))
    with pytest.raises(StateError, match=r"expected .* of 20"):
        create(kind, range(2), 20).load_state_dict(saved)


def test_int8_is_unbiased() -> None:
    """The mean of 4,000 stored copies is the vector: the errors are those of fair coins, and average out to nothing."""
    draws = np.random.default_rng(2)
    size, copies = 4 * kernels.BLOCK, 4000
    v = (draws.standard_normal(size) * np.repeat([1.0, 1e-3, 100.0, 1e-6], kernels.BLOCK)).astype(np.float32)
    made = create("int8", [0], size)
    total = np.zeros(size)
    for _ in range(copies):
        made.store(0, v)
        total += made.read(0)
    step = np.repeat(np.abs(v).reshape(4, -1).max(axis=1).astype(np.float64) / 127, kernels.BLOCK)
    chance = v / step - np.floor(v / step)  # of being rounded up
    error = (total / copies - v)[(chance > 0.01) & (chance < 0.99)]
    deviation = (step * np.sqrt(chance * (1 - chance) / copies))[(chance > 0.01) & (chance < 0.99)]
    z = error / deviation
    assert z.size > 900
    assert np.max(np.abs(z)) < 5
    assert abs(z.mean()) < 5 / np.sqrt(z.size)
    assert 0.9 < np.sqrt(np.mean(z**2)) < 1.1  # random at all, and no more random than a coin


def test_int8_keeps_zeros_and_extremes() -> None:
    made = create("int8", [0], 600)
    v = np.zeros(600, np.float32)
    v[300:] = np.where(np.arange(300) % 2, 1.0, -1.0) * np.float32(3e38)
    made.store(0, v)
    assert not made.read(0)[:256].any()
    np.testing.assert_allclose(made.read(0)[300:], v[300:], rtol=1e-6)
    made.store(0, np.full(600, 1e-42, np.float32))  # denormal: rounded to a step far above it, but finite
    assert np.isfinite(made.read(0)).all()


def test_int8_rounding_depends_on_seed_and_count_alone() -> None:
    v = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    a, b, c = (create("int8", [0, 1], 300, seed=seed) for seed in (1, 1, 2))
    for made in (a, b, c):
        made.store(0, v)
        made.store(1, v)
    assert np.array_equal(a.read(0), b.read(0))
    assert not np.array_equal(a.read(0), c.read(0))
    assert not np.array_equal(a.read(0), a.read(1))


def test_disk_rows_leave_no_file_behind(tmp_path: Path) -> None:
    made = create("disk", range(4), 1000, folder=str(tmp_path))
    made.store(2, np.ones(1000, np.float32))
    assert list(tmp_path.iterdir()) == []  # unlinked while in use: even SIGKILL leaves nothing
    assert made.read(2).sum() == 1000


def test_disk_rows_close_their_file() -> None:
    before = len(os.listdir("/proc/self/fd"))
    made = create("disk", range(4), 1000)
    assert len(os.listdir("/proc/self/fd")) > before
    del made
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_disk_rows_need_their_folder(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="is not a folder; make it first or leave it out"):
        create("disk", range(2), 10, folder=str(tmp_path / "nowhere"))


def test_disk_rows_may_exceed_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no memory to be had, dense rows are refused and disk rows work."""
    monkeypatch.setattr(memory, "available", lambda: 0)
    with pytest.raises(DoesNotFit):
        create("dense", range(100), 10_000)
    made = create("disk", range(100), 10_000, folder=str(tmp_path))
    total = np.zeros(10_000)
    for client in range(100):
        made.exchange(client, np.full(10_000, client, np.float32), total)
    assert total[0] == sum(range(100))


@pytest.mark.parametrize("kept", [None, [1]])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_swallowed_the_others_leaves_their_sum(kind: str, kept: list[int] | None) -> None:
    """1e30 + 1 is 1e30 in float64: what is left without 1e30 is summed again, of those who count."""
    made, total = create(kind, range(3), 300), np.zeros(300)
    for client, value in ((1, 1.0), (0, 1e30), (2, 1.0)):
        vector = np.ones(300, np.float32)
        vector[0] = value
        made.exchange(client, vector, total)
    made.take_out(0, total, kept)
    assert sorted(made) == [1, 2]
    np.testing.assert_allclose(total, 2.0 if kept is None else 1.0, rtol=0.01)
