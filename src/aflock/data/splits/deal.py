"""Turns a table of counts (how many examples of each class a client gets) into the client of each example."""

from __future__ import annotations

import numpy as np

from ..base import Integers


def deal(labels: Integers, counts: Integers, draws: np.random.Generator) -> Integers:
    """The client of each example when client i gets counts[i, c] random examples of class c."""
    clients, classes = counts.shape
    owners = np.empty(len(labels), np.int64)
    for label in range(classes):
        members = draws.permutation(np.flatnonzero(labels == label))
        owners[members] = np.repeat(np.arange(clients), counts[:, label])
    return owners
