"""The few fused numeric loops: the only place where speed is bought with ugliness.

Conventions
    w, low     the model as two float32 vectors (see `weights.Weights`, which has them as `high` and `low`)
    total, acc running sums, float64: a float32 sum of 10^6 differences drifts (see docs/design.md).
    row        one client's stored float32 vector.

Every loop reads and writes each vector once, allocates nothing of size d, uses one thread, and does the same IEEE
operations in the same order on every machine (no fast-math where a result is kept). `tests/numpy_kernels.py` holds
the plain NumPy twin of each. Compiled code is cached on disk by numba, next to this file or in the user's cache folder.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .system.compiled import compiled
from .types import Accumulator, Vector

Floats = Vector | Accumulator
Levels = npt.NDArray[np.int8]

BLOCK = 256
"""Weights that share one int8 scale: 1 + 4/256 = 1.016 bytes per weight."""

_ALIGNMENT = 64


def zeros(length: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A zero vector that starts on a cache line and is in memory already.

    Unaligned vectors cost the loops below 5 to 10 % of their speed; memory the system hands out only when it is first
    touched would cost an early arrival ten times its due.
    """
    kind = np.dtype(dtype)
    raw = np.zeros(length * kind.itemsize + _ALIGNMENT, np.uint8)
    raw.fill(0)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + length * kind.itemsize].view(kind)


# --- looking -------------------------------------------------------------------------------------------------------


@compiled(fastmath={"reassoc", "contract"})
def all_finite(v: Vector) -> bool:
    """Whether v holds no NaN and no infinity.

    The sum of squares is finite only if every entry is; when it is not, large but finite entries may be the reason, and
    the entries themselves are asked. The order of that sum does not matter, so this loop alone may be reassociated,
    which lets it run at the speed of memory.
    """
    total = np.float32(0.0)
    for k in range(v.shape[0]):
        total += v[k] * v[k]
    return bool(np.isfinite(total) or np.isfinite(v).all())


@compiled(fastmath={"reassoc", "contract"})
def norm(v: Vector) -> float:
    """The Euclidean norm of v: infinity or NaN if, and only if, an entry is one, since no sum of squares overflows.

    How the sum is ordered depends on the machine, and its last bits with it: whoever needs the same bits elsewhere
    writes the norm down (the server does, in its journal).
    """
    total = 0.0
    for k in range(v.shape[0]):
        x = np.float64(v[k])
        total += x * x
    return float(np.sqrt(total))


@compiled()
def largest(v: Vector) -> float:
    """The largest absolute entry of v: infinity or NaN if there is one."""
    bits = v.view(np.int32)  # as in `_scale_of`; NaN stands above infinity
    top = np.int32(0)
    for k in range(bits.shape[0]):
        magnitude = np.int32(bits[k] & np.int32(0x7FFFFFFF))
        top = magnitude if magnitude > top else top
    return float(np.int32(top).view(np.float32))


# --- moving a client's model ----------------------------------------------------------------------------------------


@compiled()
def descend(x: Vector, rate: np.float32, d: Vector) -> None:
    """x <- x - rate*d, in float32."""
    for k in range(x.shape[0]):
        x[k] -= rate * d[k]


@compiled()
def descend_and_sum(x: Vector, rate: np.float32, g: Vector, total: Accumulator) -> None:
    """x <- x - rate*g, in float32; total <- total + g."""
    for k in range(x.shape[0]):
        x[k] -= rate * g[k]
        total[k] += np.float64(g[k])


# --- moving the model ----------------------------------------------------------------------------------------------


@compiled()
def step(w: Vector, low: Vector, a: float, v: Floats) -> None:
    """w <- w + a*v."""
    for k in range(v.shape[0]):
        x = np.float64(w[k]) + np.float64(low[k]) + a * np.float64(v[k])
        high = np.float32(x)
        w[k] = high
        low[k] = np.float32(x - np.float64(high))


@compiled()
def drain(w: Vector, low: Vector, a: float, acc: Accumulator) -> None:
    """w <- w + a*acc; acc <- 0."""
    for k in range(acc.shape[0]):
        x = np.float64(w[k]) + np.float64(low[k]) + a * acc[k]
        acc[k] = 0.0
        high = np.float32(x)
        w[k] = high
        low[k] = np.float32(x - np.float64(high))


@compiled()
def assign(w: Vector, low: Vector, a: float, acc: Accumulator) -> None:
    """w <- a*acc; acc <- 0."""
    for k in range(acc.shape[0]):
        x = a * acc[k]
        acc[k] = 0.0
        high = np.float32(x)
        w[k] = high
        low[k] = np.float32(x - np.float64(high))


@compiled()
def mix(w: Vector, low: Vector, alpha: float, x: Floats) -> None:
    """w <- (1-alpha)*w + alpha*x."""
    beta = 1.0 - alpha
    for k in range(x.shape[0]):
        y = beta * (np.float64(w[k]) + np.float64(low[k])) + alpha * np.float64(x[k])
        high = np.float32(y)
        w[k] = high
        low[k] = np.float32(y - np.float64(high))


@compiled()
def replace_model(w: Vector, low: Vector, previous: Vector, row: Vector, x: Vector, gamma: float, c: float) -> None:
    """previous <- w; w <- gamma*(w + c*(x - row)) + (1-gamma)*x; row <- x."""
    rest = 1.0 - gamma
    for k in range(x.shape[0]):
        new = np.float64(x[k])
        old = np.float64(w[k]) + np.float64(low[k])
        previous[k] = w[k]
        y = gamma * (old + c * (new - np.float64(row[k]))) + rest * new
        row[k] = x[k]
        high = np.float32(y)
        w[k] = high
        low[k] = np.float32(y - np.float64(high))


# --- sums and rows -------------------------------------------------------------------------------------------------


@compiled()
def add(total: Accumulator, a: float, v: Floats) -> None:
    """total <- total + a*v."""
    for k in range(v.shape[0]):
        total[k] += a * np.float64(v[k])


@compiled()
def fold(total: Accumulator, acc: Accumulator) -> None:
    """total <- total + acc; acc <- 0."""
    for k in range(acc.shape[0]):
        total[k] += acc[k]
        acc[k] = 0.0


@compiled()
def add_difference(total: Accumulator, v: Vector, row: Vector) -> None:
    """total <- total + v - row."""
    for k in range(v.shape[0]):
        total[k] += np.float64(v[k]) - np.float64(row[k])


@compiled()
def exchange(row: Vector, v: Vector, total: Accumulator) -> None:
    """total <- total + v - row; row <- v."""
    for k in range(v.shape[0]):
        total[k] += np.float64(v[k]) - np.float64(row[k])
        row[k] = v[k]


@compiled()
def exchange_step(row: Vector, v: Vector, total: Accumulator, w: Vector, low: Vector, a: float) -> None:
    """total <- total + v - row; row <- v; w <- w + a*total."""
    for k in range(v.shape[0]):
        s = total[k] + (np.float64(v[k]) - np.float64(row[k]))
        total[k] = s
        row[k] = v[k]
        x = np.float64(w[k]) + np.float64(low[k]) + a * s
        high = np.float32(x)
        w[k] = high
        low[k] = np.float32(x - np.float64(high))


@compiled()
def shift_step(v: Vector, total: Accumulator, w: Vector, low: Vector, a: float) -> None:
    """total <- total + v; w <- w + a*total."""
    for k in range(v.shape[0]):
        s = total[k] + np.float64(v[k])
        total[k] = s
        x = np.float64(w[k]) + np.float64(low[k]) + a * s
        high = np.float32(x)
        w[k] = high
        low[k] = np.float32(x - np.float64(high))


@compiled()
def exchange_mean(
    row: Vector,
    x: Vector,
    total: Accumulator,
    new: float,
    old: float,
    w: Vector,
    low: Vector,
    a: float,
    b: float,
    start: Vector,
) -> None:
    """total <- total + new*x - old*row; row <- x; w <- a*total + b*start."""
    for k in range(x.shape[0]):
        s = total[k] + (new * np.float64(x[k]) - old * np.float64(row[k]))
        total[k] = s
        row[k] = x[k]
        y = a * s + b * np.float64(start[k])
        high = np.float32(y)
        w[k] = high
        low[k] = np.float32(y - np.float64(high))


@compiled()
def exchange_weighted(row: Vector, x: Vector, total: Accumulator, new: float, old: float) -> None:
    """total <- total + new*x - old*row; row <- x."""
    for k in range(x.shape[0]):
        total[k] += new * np.float64(x[k]) - old * np.float64(row[k])
        row[k] = x[k]


@compiled()
def weighted_mean(w: Vector, low: Vector, a: float, total: Accumulator, b: float, start: Vector) -> None:
    """w <- a*total + b*start."""
    for k in range(total.shape[0]):
        y = a * total[k] + b * np.float64(start[k])
        high = np.float32(y)
        w[k] = high
        low[k] = np.float32(y - np.float64(high))


@compiled()
def drain_calibrated(w: Vector, low: Vector, a: float, total: Accumulator, b: float, acc: Accumulator) -> None:
    """w <- w + a*total + b*acc; total <- total + acc; acc <- 0."""
    for k in range(acc.shape[0]):
        x = np.float64(w[k]) + np.float64(low[k]) + (a * total[k] + b * acc[k])
        total[k] += acc[k]
        acc[k] = 0.0
        high = np.float32(x)
        w[k] = high
        low[k] = np.float32(x - np.float64(high))


# --- momentum and moments ------------------------------------------------------------------------------------------


@compiled()
def momentum(g: Accumulator, total: Accumulator, diff: Accumulator, beta: float, a: float, b: float) -> None:
    """g <- beta*(a*diff + b*total) + (1-beta)*g; total <- total + diff; diff <- 0."""
    rest = 1.0 - beta
    for k in range(g.shape[0]):
        g[k] = beta * (a * diff[k] + b * total[k]) + rest * g[k]
        total[k] += diff[k]
        diff[k] = 0.0


@compiled()
def blend(out: Vector, a: float, x: Accumulator, b: float, y: Accumulator) -> None:
    """out <- a*x + b*y, rounded to float32."""
    for k in range(x.shape[0]):
        out[k] = np.float32(a * x[k] + b * y[k])


# --- int8 rows: one scale per block, unbiased stochastic rounding ----------------------------------------------------
#
# A block x is stored as q = floor(x/scale + u) with u uniform on [0, 1), so E[q*scale] = x. u comes from a counter:
# a hash of (key, position), so that the bits depend on nothing but the key of this store and the place of the weight.

_TINY = np.float32(1e-36)  # keeps 1/scale finite when a whole block is (nearly) zero; rounding stays unbiased


@compiled(inline="always")
def _scale_of(x: Vector) -> np.float32:
    bits = x.view(np.int32)  # for |x| the order of the bits is the order of the numbers, and integers vectorise
    top = np.int32(0)
    for k in range(bits.shape[0]):
        magnitude = np.int32(bits[k] & np.int32(0x7FFFFFFF))
        top = magnitude if magnitude > top else top
    return np.float32(max(np.int32(top).view(np.float32), _TINY) / np.float32(127.0))


@compiled(inline="always")
def _uniforms(out: Vector, count: int, base: np.uint32, key: np.uint32) -> None:
    for k in range(count):
        h = np.uint32(np.uint32(base + np.uint32(k)) * np.uint32(0x9E3779B9)) ^ key
        h = np.uint32(h ^ (h >> np.uint32(16)))
        h = np.uint32(h * np.uint32(0x7FEB352D))
        h = np.uint32(h ^ (h >> np.uint32(15)))
        h = np.uint32(h * np.uint32(0x846CA68B))
        h = np.uint32(h ^ (h >> np.uint32(16)))
        out[k] = np.float32(np.int32(h >> np.uint32(8))) * np.float32(1.0 / 16777216.0)


@compiled(inline="always")
def _requantise(q: Levels, scales: Vector, v: Vector, b: int, key: np.uint32, u: Vector, change: Accumulator) -> None:
    """Stores block b of v; `change` holds by how much what is stored has moved."""
    i = b * BLOCK
    x = v[i : min(v.shape[0], i + BLOCK)]
    levels = q[i : i + x.shape[0]]
    old, new = np.float64(scales[b]), _scale_of(x)
    inverse = np.float32(1.0) / new
    scales[b] = new
    _uniforms(u, x.shape[0], np.uint32(i), key)
    for k in range(x.shape[0]):
        level = min(np.floor(x[k] * inverse + u[k]), np.float32(127.0))
        change[k] = np.float64(level) * np.float64(new) - np.float64(levels[k]) * old
        levels[k] = np.int8(np.int32(level))


@compiled()
def int8_store(q: Levels, scales: Vector, v: Vector, key: np.uint32) -> None:
    """row <- Q(v)."""
    u, change = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float64)
    for b in range(scales.shape[0]):
        _requantise(q, scales, v, b, key, u, change)


@compiled()
def int8_exchange(q: Levels, scales: Vector, v: Vector, total: Accumulator, key: np.uint32) -> None:
    """total <- total + Q(v) - row; row <- Q(v)."""
    u, change = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float64)
    for b in range(scales.shape[0]):
        _requantise(q, scales, v, b, key, u, change)
        part = total[b * BLOCK : (b + 1) * BLOCK]
        for k in range(part.shape[0]):
            part[k] += change[k]


@compiled()
def int8_exchange_step(
    q: Levels, scales: Vector, v: Vector, total: Accumulator, key: np.uint32, w: Vector, low: Vector, a: float
) -> None:
    """total <- total + Q(v) - row; row <- Q(v); w <- w + a*total."""
    u, change = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float64)
    for b in range(scales.shape[0]):
        _requantise(q, scales, v, b, key, u, change)
        i, j = b * BLOCK, (b + 1) * BLOCK
        part, wb, lb = total[i:j], w[i:j], low[i:j]
        for k in range(part.shape[0]):
            s = part[k] + change[k]
            part[k] = s
            y = np.float64(wb[k]) + np.float64(lb[k]) + a * s
            high = np.float32(y)
            wb[k] = high
            lb[k] = np.float32(y - np.float64(high))


@compiled()
def int8_add(total: Accumulator, a: float, q: Levels, scales: Vector) -> None:
    """total <- total + a*row."""
    d = total.shape[0]
    for b in range(scales.shape[0]):
        i = b * BLOCK
        j = min(d, i + BLOCK)
        qb = q[i:j]
        part = total[i:j]
        scale = np.float64(scales[b])
        for k in range(part.shape[0]):
            part[k] += a * (np.float64(qb[k]) * scale)


# --- the yardstick -------------------------------------------------------------------------------------------------


@compiled()
def triad(out: Accumulator, x: Accumulator, a: float, y: Accumulator) -> None:
    """out <- x + a*y: STREAM's measure of what memory gives one thread."""
    for k in range(out.shape[0]):
        out[k] = x[k] + a * y[k]
