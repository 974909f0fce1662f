"""No allocation of size d inside `receive`, for any rule, once it runs."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from aflock import Update
from tests.contract.cases import Case, all_cases

LENGTH = 50_000
CLIENTS = 4


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_receive_allocates_nothing_of_size_d(case: Case) -> None:
    params = {key: min(value, CLIENTS) if key == "buffer" else value for key, value in case.params.items()}
    s = Case(case.name, params).create(clients=CLIENTS)
    vector = np.ones(LENGTH, np.float32)
    s.start(vector, first=dict.fromkeys(range(CLIENTS), vector) if s.first else None)
    updates = [Update(c % CLIENTS, 0, dict.fromkeys(s.needs, vector), 1, 50) for c in range(30)]
    for update in 3 * updates:  # kernels are loaded, pools filled, a row or two expired
        s.receive(update)
    tracemalloc.start()
    try:
        for update in updates:
            s.receive(update)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < LENGTH, f"{peak} bytes at once; a vector has {4 * LENGTH}"


def test_the_measure_sees_numpy() -> None:
    """tracemalloc counts NumPy's memory, or the test above could not fail."""
    tracemalloc.start()
    kept = np.ones(LENGTH, np.float32) + 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak >= kept.nbytes
