"""The plain NumPy twin of every compiled loop: the same mathematics, one array expression at a time.

`w` and `low` are taken and returned as one float64 vector, which is what the pair stands for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def wide(v: Array) -> Array:
    return v.astype(np.float64)


def step(w: Array, a: float, v: Array) -> Array:
    moved: Array = w + a * wide(v)
    return moved


def mix(w: Array, alpha: float, x: Array) -> Array:
    return (1 - alpha) * w + alpha * wide(x)


def replace_model(w: Array, row: Array, x: Array, gamma: float, c: float) -> Array:
    return gamma * (w + c * (wide(x) - wide(row))) + (1 - gamma) * wide(x)


def exchange(row: Array, v: Array, total: Array) -> Array:
    moved: Array = total + (wide(v) - wide(row))
    return moved


def exchange_mean(row: Array, x: Array, total: Array, new: float, old: float) -> Array:
    return total + (new * wide(x) - old * wide(row))


def momentum(g: Array, total: Array, diff: Array, beta: float, a: float, b: float) -> Array:
    moved: Array = beta * (a * diff + b * total) + (1 - beta) * g
    return moved


def amsgrad(
    acc: Array, a: float, mom: Array, var: Array, top: Array, b1: float, b2: float
) -> tuple[Array, Array, Array]:
    d = a * acc
    mom = b1 * mom + (1 - b1) * d
    var = b2 * var + (1 - b2) * d * d
    return mom, var, np.maximum(top, var)


def dequantise(q: Array, scales: Array, block: int) -> Array:
    stored: Array = wide(q) * np.repeat(wide(scales), block)[: q.size]
    return stored
