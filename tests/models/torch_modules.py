"""Small torch modules, batches for them, and their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from aflock import models, rng

FEATURES, CLASSES = 6, 4


Floats = npt.NDArray[np.float32]


def batch(count: int, shape: tuple[int, ...] = (FEATURES,), seed: int = 1) -> tuple[Floats, npt.NDArray[np.int64]]:
    draws = rng.stream(seed, "batch")
    return draws.standard_normal((count, *shape), dtype=np.float32), draws.integers(0, CLASSES, count)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 40), nn.Dropout(0.5), nn.Linear(40, CLASSES))


def gradient(model: models.Model, w: Floats, x: Any, y: Any) -> tuple[float, Floats]:
    out = np.full(model.length, np.nan, np.float32)
    return model.gradient(w, x, y, out), out


def start(model: models.Model, seed: int = 0) -> Floats:
    return model.init(rng.stream(seed, "init"))


def autograd(module: nn.Module, x: Any, y: Any) -> tuple[float, Floats]:
    """The reference: backward, in a module of its own."""
    module.zero_grad()
    loss = functional.cross_entropy(module(torch.tensor(x)), torch.tensor(y))
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), torch.cat(
        [p.grad.flatten() for p in module.parameters() if p.grad is not None]
    ).numpy()


def moved(w: Floats, x: Any) -> tuple[Floats, Floats]:
    """What batch norm's running mean and variance become after one batch, by its definition (momentum 0.1)."""
    h = x @ w[: 5 * FEATURES].reshape(5, FEATURES).T + w[5 * FEATURES : 5 * FEATURES + 5]
    return (0.1 * h.mean(0)).astype(np.float32), (0.9 + 0.1 * h.var(0, ddof=1)).astype(np.float32)
