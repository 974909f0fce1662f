"""Split by key: the examples of one writer, role or turbine stay together.

With as many clients as keys, client i holds the i-th key. With fewer, each client holds several whole keys: the largest
key goes first, each to the client that has least so far; keys of equal size come in random order, and so do clients.

S. Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018 (arXiv:1812.01097).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from ...errors import ParameterError
from ...params import Params
from ..base import Dataset, Integers
from ..partition import register


@dataclass(frozen=True)
class KeyParams(Params):
    """The split by key has no parameters."""


@register(
    "key",
    source="S. Caldas et al., LEAF: A Benchmark for Federated Settings, 2018",
    description="examples with the same key of the data stay together; clients=None gives one client per key",
    params=KeyParams,
    keyed=True,
)
def key(dataset: Dataset, clients: int, params: KeyParams, draws: np.random.Generator) -> Integers:
    """The client of each example."""
    assert dataset.keys is not None  # `create` gives `keyed` splits only data with keys
    _, number, sizes = np.unique(dataset.keys, return_inverse=True, return_counts=True)
    if clients > len(sizes):
        raise ParameterError(
            f"key: clients={clients} is more than the {len(sizes)} keys of {dataset.name!r}; "
            f"use at most {len(sizes)} clients"
        )
    owners: Integers = number if clients == len(sizes) else _packed(sizes, clients, draws)[number]
    return owners


def _packed(sizes: Integers, clients: int, draws: np.random.Generator) -> Integers:
    """The client of each key."""
    keys = draws.permutation(len(sizes))
    heap = [(0, client) for client in range(clients)]
    owners = np.empty(len(sizes), np.int64)
    for key_ in keys[np.argsort(-sizes[keys], kind="stable")]:
        held, client = heap[0]
        owners[key_] = client
        heapq.heapreplace(heap, (held + int(sizes[key_]), client))
    return draws.permutation(clients)[owners]
