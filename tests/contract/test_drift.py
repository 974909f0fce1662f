"""ACE's mean does not drift: a million arrivals with gradients that shrink by a million."""

from __future__ import annotations

import numpy as np

from aflock import Update, kernels, strategies

ARRIVALS, CLIENTS, LENGTH = 1_000_000, 5, 8


def test_a_million_arrivals() -> None:
    """The exact model is kept in float64 with every row averaged anew at every arrival."""
    lr = 0.01
    draws = np.random.default_rng(0)
    pool = draws.standard_normal((1009, LENGTH))
    shrink = 10.0 ** (-6.0 / ARRIVALS)
    first = {c: pool[c].astype(np.float32) for c in range(CLIENTS)}
    s = strategies.create("ace", clients=CLIENTS, lr=lr)
    s.start(np.ones(LENGTH, np.float32), first=first)
    rows = np.array([first[c] for c in range(CLIENTS)], np.float64)
    w = np.ones(LENGTH) - lr * rows.mean(axis=0)
    weights = np.full(CLIENTS, lr / CLIENTS)
    clients = draws.integers(CLIENTS, size=ARRIVALS).tolist()
    scale = 1.0
    for position, client in enumerate(clients):
        scale *= shrink
        g = (scale * pool[position % 1009]).astype(np.float32)
        s.receive(Update(client, s.version, {"gradient": g}))
        rows[client] = g
        w -= weights @ rows
    assert s.version == ARRIVALS + 1
    assert np.max(np.abs(s.model - w)) / np.max(np.abs(w)) < 1e-6
    exact_mean = rows.mean(axis=0)
    mean = s.total / CLIENTS  # type: ignore[attr-defined]
    assert np.max(np.abs(mean - exact_mean)) / np.max(np.abs(exact_mean)) < 1e-6


def test_small_steps_are_not_lost() -> None:
    """A hundred thousand steps of 1e-8 move a weight of 1 by 0.001; plain float32 would not move at all."""
    w, low = np.ones(1, np.float32), np.zeros(1, np.float32)
    step = np.ones(1, np.float32)
    for _ in range(100_000):
        kernels.step(w, low, 1e-8, step)
    assert abs(float(w[0]) - 1.001) < 1e-7
    assert np.float32(1.0) + np.float32(1e-8) == np.float32(1.0)
