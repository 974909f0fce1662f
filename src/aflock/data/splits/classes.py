"""p classes per client: each client holds examples of exactly p classes, and as many as the others.

"Each worker randomly chooses p classes of labels and evenly samples training/testing data points only with these p
classes labels from the overall dataset without replacement" (appendix E.1). Here every example is used, so two readings
had to be chosen:

- how many clients hold a class follows its size, so that a holder's share is about the same in every class; which
  clients these are is random;
- each class is divided evenly among its holders, then holders of the same class exchange examples until no
  other division makes the sizes more equal (`level`). A holder of a class keeps at least one example of it.

H. Yang, X. Zhang, P. Khanduri and J. Liu, "Anarchic Federated Learning", ICML 2022.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import ParameterError
from ...params import Params, whole
from ..base import Dataset, Integers
from ..partition import register
from .deal import deal
from .level import level


@dataclass(frozen=True)
class ClassesParams(Params):
    """Parameters of the split by classes."""

    p: int = whole(2, "classes each client holds")


@register(
    "classes",
    source="H. Yang et al., Anarchic Federated Learning, ICML 2022",
    description="each client holds examples of exactly p classes; sizes as equal as that allows",
    params=ClassesParams,
    by_class=True,
)
def classes(dataset: Dataset, clients: int, params: ClassesParams, draws: np.random.Generator) -> Integers:
    """The client of each example."""
    totals = np.bincount(dataset.train_y, minlength=dataset.classes)
    _check(totals, clients, params.p)
    holds = _assign(_holders(totals, clients, params.p), clients, params.p, draws)
    counts = _shares(totals, holds, draws)
    level(counts)
    return deal(dataset.train_y, counts, draws)


def _check(totals: Integers, clients: int, p: int) -> None:
    present = int((totals > 0).sum())
    if p > present:
        raise ParameterError(f"classes: p={p} is more than the {present} classes in the data; lower p to {present}")
    if p * clients < present:
        raise ParameterError(
            f"classes: {clients} clients of p={p} classes leave some of the {present} classes without a client; "
            f"use at least {-(-present // p)} clients or raise p to {-(-present // clients)}"
        )
    if np.minimum(totals, clients).sum() < p * clients:
        raise ParameterError(
            f"classes: the classes have too few examples for {clients} clients of exactly p={p} classes each; "
            "use fewer clients or a smaller p"
        )


def _holders(totals: Integers, clients: int, p: int) -> Integers:
    """How many clients hold each class: one more for the class whose holders have most, until p*clients are given."""
    holders = (totals > 0).astype(np.int64)
    room = np.minimum(totals, clients)
    heap = [(-float(totals[label]), label) for label in np.flatnonzero(room > 1).tolist()]
    heapq.heapify(heap)
    for _ in range(p * clients - int(holders.sum())):
        label = heap[0][1]
        holders[label] += 1
        if holders[label] < room[label]:
            heapq.heapreplace(heap, (-totals[label] / holders[label], label))
        else:
            heapq.heappop(heap)
    return holders


def _assign(holders: Integers, clients: int, p: int, draws: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Which client holds which class (clients x classes): p in each row, `holders` in the columns.

    A client must take the classes that need all the clients still to come. Of the others it draws with weights of how
    many clients they still need. This always succeeds: if r clients are to come, the needs sum to p*r and none exceeds
    r, so at most p classes need all of them and at least p need some.
    """
    need = holders.copy()
    holds = np.zeros((clients, len(holders)), bool)
    for client in range(clients):
        must = need == clients - client
        free = np.where(must, 0, need)
        some = p - int(must.sum())
        if some:
            must[draws.choice(len(need), some, replace=False, p=free / free.sum())] = True
        holds[client] = must
        need -= must
    return holds


def _shares(totals: Integers, holds: npt.NDArray[np.bool_], draws: np.random.Generator) -> Integers:
    """Each class divided evenly among its holders; who gets one of the examples left over is random."""
    counts = np.zeros(holds.shape, np.int64)
    for label in np.flatnonzero(totals):
        who = draws.permutation(np.flatnonzero(holds[:, label]))
        counts[who, label] = totals[label] // len(who)
        counts[who[: totals[label] % len(who)], label] += 1
    return counts
