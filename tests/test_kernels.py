"""The compiled loops against their NumPy twins, and what they promise beside the numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from aflock import kernels
from aflock.strategies.rules import fadas
from tests import numpy_kernels as plain

LENGTHS = [1, 2, 7, 255, 256, 257, 1000]


@pytest.fixture(params=LENGTHS)
def given_vectors(request: Any) -> dict[str, Any]:
    d, draws = request.param, np.random.default_rng(request.param)

    def f32() -> Any:
        return draws.standard_normal(d).astype(np.float32)

    narrow = {name: f32() for name in ("w", "row", "v", "start", "out", "previous")}
    low = (1e-8 * draws.standard_normal(d)).astype(np.float32)
    deep = {name: draws.standard_normal(d) for name in ("total", "acc", "g", "diff", "mom")}
    moments = {name: draws.random(d) for name in ("var", "top")}
    return {**narrow, "low": low, **deep, **moments}


def model(a: dict[str, Any]) -> Any:
    return a["w"].astype(np.float64) + a["low"]


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def model_close(a: dict[str, Any], expected: Any) -> None:
    """The pair holds the exact result to 2^-48, and w alone is its float32 rounding."""
    np.testing.assert_allclose(model(a), expected, rtol=1e-14, atol=1e-14)
    assert np.array_equal(a["w"], expected.astype(np.float32))


def test_step(given_vectors: dict[str, Any]) -> None:
    a = given_vectors
    expected = plain.step(model(a), -0.3, a["v"])
    kernels.step(a["w"], a["low"], -0.3, a["v"])
    model_close(a, expected)
    expected = plain.step(model(a), 0.7, a["total"])
    kernels.step(a["w"], a["low"], 0.7, a["total"])
    model_close(a, expected)


def test_drain_and_assign(given_vectors: dict[str, Any]) -> None:
    a = given_vectors
    expected = plain.step(model(a), 0.2, a["acc"])
    kernels.drain(a["w"], a["low"], 0.2, a["acc"])
    model_close(a, expected)
    assert not a["acc"].any()
    expected = 0.5 * a["total"]
    kernels.assign(a["w"], a["low"], 0.5, a["total"])
    model_close(a, expected)
    assert not a["total"].any()


def test_mix(given_vectors: dict[str, Any]) -> None:
    a = given_vectors
    expected = plain.mix(model(a), 0.3, a["v"])
    kernels.mix(a["w"], a["low"], 0.3, a["v"])
    model_close(a, expected)


def test_replace_model(given_vectors: dict[str, Any]) -> None:
    a = given_vectors
    expected, before = plain.replace_model(model(a), a["row"], a["v"], 0.8, 0.1), a["w"].copy()
    kernels.replace_model(a["w"], a["low"], a["previous"], a["row"], a["v"], 0.8, 0.1)
    model_close(a, expected)
    assert np.array_equal(a["previous"], before)
    assert np.array_equal(a["row"], a["v"])


def test_add(given_vectors: dict[str, Any]) -> None:
    a = given_vectors
    expected = a["total"] + 0.3 * plain.wide(a["v"])
    kernels.add(a["total"], 0.3, a["v"])
    close(a["total"], expected)
    expected = plain.exchange(a["row"], a["v"], a["total"])
    kernels.add_difference(a["total"], a["v"], a["row"])
    close(a["total"], expected)


def test_exchange(given_vectors: dict[str, Any]) -> None:
    a = given_vectors
    expected = plain.exchange(a["row"], a["v"], a["total"])
    kernels.exchange(a["row"], a["v"], a["total"])
    close(a["total"], expected)
    assert np.array_equal(a["row"], a["v"])


def test_exchange_step(given_vectors: dict[str, Any]) -> None:
    a = given_vectors
    total = plain.exchange(a["row"], a["v"], a["total"])
    expected = plain.step(model(a), -0.1, total)
    kernels.exchange_step(a["row"], a["v"], a["total"], a["w"], a["low"], -0.1)
    close(a["total"], total)
    model_close(a, expected)
    assert np.array_equal(a["row"], a["v"])


def test_shift_step(given_vectors: dict[str, Any]) -> None:
    a = given_vectors
    total = a["total"] + plain.wide(a["v"])
    expected = plain.step(model(a), -0.1, total)
    kernels.shift_step(a["v"], a["total"], a["w"], a["low"], -0.1)
    close(a["total"], total)
    model_close(a, expected)


def test_exchange_mean(given_vectors: dict[str, Any]) -> None:
    a = given_vectors
    total = plain.exchange_mean(a["row"], a["v"], a["total"], 3.0, 2.0)
    expected = 0.2 * total + 0.1 * plain.wide(a["start"])
    kernels.exchange_mean(a["row"], a["v"], a["total"], 3.0, 2.0, a["w"], a["low"], 0.2, 0.1, a["start"])
    close(a["total"], total)
    np.testing.assert_allclose(model(a), expected, rtol=1e-13, atol=1e-14)


def test_drain_calibrated(given_vectors: dict[str, Any]) -> None:
    a = given_vectors
    expected = model(a) + (0.2 * a["total"] + 0.5 * a["acc"])
    total = a["total"] + a["acc"]
    kernels.drain_calibrated(a["w"], a["low"], 0.2, a["total"], 0.5, a["acc"])
    np.testing.assert_allclose(model(a), expected, rtol=1e-13, atol=1e-14)
    close(a["total"], total)
    assert not a["acc"].any()


def test_momentum_and_blend(given_vectors: dict[str, Any]) -> None:
    a = given_vectors
    expected, total = plain.momentum(a["g"], a["total"], a["diff"], 0.3, 0.5, 0.1), a["total"] + a["diff"]
    kernels.momentum(a["g"], a["total"], a["diff"], 0.3, 0.5, 0.1)
    close(a["g"], expected)
    close(a["total"], total)
    assert not a["diff"].any()
    kernels.blend(a["out"], 0.3, a["total"], 0.7, a["g"])
    np.testing.assert_allclose(a["out"], (0.3 * a["total"] + 0.7 * a["g"]).astype(np.float32), rtol=1e-6, atol=1e-7)


def test_amsgrad(given_vectors: dict[str, Any]) -> None:
    a = given_vectors
    mom, var, top = plain.amsgrad(a["acc"], 0.5, a["mom"], a["var"], a["top"], 0.9, 0.99)
    expected = model(a) + 0.01 * (mom / (np.sqrt(top) + 1e-8))
    fadas.amsgrad(a["w"], a["low"], 0.01, a["acc"], 2, a["mom"], a["var"], a["top"], 0.9, 0.99, 1e-8)
    close(a["mom"], mom)
    close(a["var"], var)
    close(a["top"], top)
    np.testing.assert_allclose(model(a), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("d", LENGTHS)
def test_int8_rows_change_the_sum_by_exactly_what_is_stored(d: int) -> None:
    draws = np.random.default_rng(d)
    q, scales = np.zeros(d, np.int8), np.zeros(-(-d // kernels.BLOCK), np.float32)
    total, w, low = np.zeros(d), np.zeros(d, np.float32), np.zeros(d, np.float32)
    for key in range(20):
        v = draws.standard_normal(d).astype(np.float32)
        expected_w: Any = plain.wide(w) + low
        if key % 3 == 0:
            kernels.int8_exchange(q, scales, v, total, np.uint32(key))
        else:
            kernels.int8_exchange_step(q, scales, v, total, np.uint32(key), w, low, -0.1)
            expected_w = expected_w - 0.1 * total
        stored = plain.dequantise(q, scales, kernels.BLOCK)
        close(total, stored)
        np.testing.assert_allclose(plain.wide(w) + low, expected_w, rtol=1e-13, atol=1e-14)
        step = np.repeat(plain.wide(scales), kernels.BLOCK)[:d]
        assert np.all(np.abs(stored - v) <= step * (1 + 1e-5))
    twin = np.zeros(d)
    kernels.int8_add(twin, 1.0, q, scales)
    close(twin, total)


@given(some.integers(0, 10_000), some.floats(-30, 30), some.floats(-30, 30))
@settings(max_examples=50, deadline=None)
def test_all_finite(position: int, low: float, high: float) -> None:
    v = np.linspace(low, high, 10_001, dtype=np.float32)
    assert kernels.all_finite(v)
    for bad in (np.nan, np.inf, -np.inf):
        spoilt = v.copy()
        spoilt[position] = bad
        assert not kernels.all_finite(spoilt)


def test_finite_numbers_whose_squares_overflow_are_finite() -> None:
    assert kernels.all_finite(np.full(1000, 3e38, np.float32))


@pytest.mark.parametrize("d", LENGTHS)
@pytest.mark.parametrize("size", [1e-45, 1.0, 3.4e38])
def test_the_norm_and_the_largest_entry_of_finite_numbers(d: int, size: float) -> None:
    v = (np.random.default_rng(d).uniform(-1, 1, d) * size).astype(np.float32)
    assert kernels.norm(v) == pytest.approx(np.linalg.norm(plain.wide(v)), rel=1e-12)
    assert kernels.largest(v) == np.abs(v).max()


@given(some.integers(0, 10_000), some.sampled_from([np.nan, -np.nan, np.inf, -np.inf]))
@settings(max_examples=50, deadline=None)
def test_the_norm_and_the_largest_entry_show_what_is_not_finite(position: int, bad: float) -> None:
    v = np.full(10_001, 3.4e38, np.float32)
    assert np.isfinite(kernels.norm(v))
    v[position] = bad
    assert not np.isfinite(kernels.norm(v))
    assert not np.isfinite(kernels.largest(v))


def test_zeros_start_on_a_cache_line() -> None:
    for length in (1, 100, 7_850, 1_000_000):
        for dtype in (np.float32, np.float64, np.int8):
            made = kernels.zeros(length, dtype)
            assert made.ctypes.data % 64 == 0
            assert made.size == length
            assert not made.any()


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    """The first process compiles and stores, the second one loads."""
    script = (
        "import numpy as np; from aflock import kernels as k; v = np.ones(3, np.float32);"
        "k.step(v, v.copy(), 0.1, v.copy()); s = k.step.stats;"
        "print(sum(s.cache_hits.values()), sum(s.cache_misses.values()))"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [run.stdout.split() for run in runs] == [["0", "1"], ["1", "0"]]
