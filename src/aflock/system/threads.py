"""One thread per process: small models lose up to a hundred times to threads that wait for each other.

It also makes results repeat to the bit: a sum split over threads depends on how many there are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def ask_for_one() -> None:
    """Limits libraries that are not loaded yet to one thread, in this process and in those it starts."""
    os.environ.update(dict.fromkeys(_VARIABLES, "1"))


@contextmanager
def one_thread_for_children() -> Iterator[None]:
    """Processes started inside use one thread each; afterwards the environment of this one is as before."""
    before = {name: os.environ.get(name) for name in _VARIABLES}
    ask_for_one()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, libraries that are loaded already use one thread."""
    from threadpoolctl import threadpool_limits

    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else 1
    with threadpool_limits(1):
        if torch is not None:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if torch is not None:
                torch.set_num_threads(before)
