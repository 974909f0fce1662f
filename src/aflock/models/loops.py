"""The fused loops between the matrix products: bias, ReLU, softmax and cross entropy, each in one pass.

For a batch of B rows z_j (the result of the last matrix product), biases b and labels y_j:

    p_j = softmax(z_j + b),   F = -(1/B) sum_j log p_j[y_j],   dF/dz_j = (p_j - onehot(y_j))/B,   dF/db = sum_j dF/dz_j

In NumPy these are ten calls of a microsecond or two each, as much as the matrix products of a small model. The loops
work in place, allocate nothing and pass NaN on.
"""

from __future__ import annotations

import numpy as np

from ..system.compiled import compiled
from ..types import Vector
from .base import Labels, Matrix

OUTSIDE = -1.0
"""Returned instead of a loss (which is never negative) when a label is not one of 0 .. classes-1."""


@compiled()
def _inside(y: Labels, classes: int) -> bool:
    inside = True
    for j in range(y.shape[0]):
        inside &= y[j] >= 0 and y[j] < classes
    return inside


@compiled(inline="always")
def _exponentials(row: Vector, b: Vector) -> tuple[np.float32, float]:
    """row <- exp(row + b - top); returns top and the sum of the row."""
    for c in range(row.shape[0]):
        row[c] += b[c]
    top = row[0]
    for c in range(1, row.shape[0]):
        top = max(top, row[c])
    total = 0.0
    for c in range(row.shape[0]):
        row[c] = np.exp(row[c] - top)
        total += row[c]
    return top, total


@compiled()
def cross_entropy(z: Matrix, b: Vector, y: Labels, db: Vector) -> float:
    """z <- dF/dz; db <- dF/db; returns F, or OUTSIDE before anything is changed."""
    count, classes = z.shape
    if not _inside(y, classes):
        return OUTSIDE
    db[:] = 0.0
    loss = 0.0
    for j in range(count):
        row, label = z[j], y[j]
        shown = np.float64(row[label] + b[label])
        top, total = _exponentials(row, b)
        loss += np.log(total) - (shown - np.float64(top))
        scale = np.float32(1.0 / (total * count))
        for c in range(classes):
            row[c] *= scale
        row[label] -= np.float32(1.0 / count)
        for c in range(classes):
            db[c] += row[c]
    return max(loss, 0.0) / count if loss == loss else loss


@compiled()
def score(z: Matrix, b: Vector, y: Labels) -> tuple[float, int]:
    """The sum of the losses (or OUTSIDE) and how many rows have their largest entry at their label; overwrites z."""
    count, classes = z.shape
    if not _inside(y, classes):
        return OUTSIDE, 0
    loss, right = 0.0, 0
    for j in range(count):
        row, label = z[j], y[j]
        shown = np.float64(row[label] + b[label])
        top, total = _exponentials(row, b)
        loss += np.log(total) - (shown - np.float64(top))
        right += np.argmax(row) == label
    return max(loss, 0.0) if loss == loss else loss, right


@compiled()
def rectify(h: Matrix, b: Vector) -> None:
    """h <- max(h + b, 0)."""
    for j in range(h.shape[0]):
        for k in range(h.shape[1]):
            v = h[j, k] + b[k]
            h[j, k] = np.float32(0.0) if v < 0 else v


@compiled()
def rectify_back(d: Matrix, h: Matrix, db: Vector) -> None:
    """d <- d where h > 0, else 0; db <- the sum of d's rows."""
    db[:] = 0.0
    for j in range(d.shape[0]):
        for k in range(d.shape[1]):
            v = d[j, k] if h[j, k] > 0 else np.float32(0.0)
            d[j, k] = v
            db[k] += v


@compiled()
def decay(out: Vector, a: float, w: Vector) -> float:
    """out <- out + a*w; returns (a/2)*|w|^2."""
    total = 0.0
    for k in range(w.shape[0]):
        out[k] += np.float32(a * np.float64(w[k]))
        total += np.float64(w[k]) * np.float64(w[k])
    return 0.5 * a * total
