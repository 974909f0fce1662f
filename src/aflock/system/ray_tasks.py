"""Calls of one function as tasks of a Ray cluster, for calls that need nothing of each other: whole runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ..errors import AflockError

T = TypeVar("T")

RETRIES = 3
"""How often Ray begins a call again whose worker or node was lost."""


def results(function: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, T]]:
    """Makes all calls; yields the number and the result of each as it ends, in any order.

    The caller is connected to the cluster (ray_cluster.py). The function and its arguments travel to the nodes; what it
    raises there is raised here.
    """
    import ray

    task: Any = ray.remote(num_cpus=1, max_retries=RETRIES)(function)
    running = {task.remote(*arguments): number for number, arguments in enumerate(calls)}
    while running:
        for call in ray.wait(list(running), num_returns=1)[0]:
            yield running.pop(call), _result(ray, call)


def _result(ray: Any, call: Any) -> Any:
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:  # raised by the function itself, on its node
        if isinstance(error.cause, AflockError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise AflockError(
            f"a run was lost with its worker {RETRIES + 1} times ({type(error).__name__}); is there enough memory on "
            "the nodes?"
        ) from None
