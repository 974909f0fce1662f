"""Label skew by a Dirichlet distribution: each class is divided over the clients in random proportions.

    q_c ~ Dir(alpha * 1_n),    client i gets the share q_ci of class c

The smaller alpha, the fewer classes a client holds, and the more the clients differ in size. With small alpha some
clients come out (nearly) empty. As usual the proportions are then drawn again, but only `DRAWS` times: with many
clients and alpha = 0.1 practically no draw gives every client enough. The draw that lacks least is completed: a client
below `min_size` gets what it lacks from the largest client, out of that one's largest class, so that it still holds few
classes.

M. Yurochkin, M. Agarwal, S. Ghosh, K. Greenewald, N. Hoang and Y. Khazaeni, "Bayesian Nonparametric Federated Learning
of Neural Networks", ICML 2019 (the split by class); alpha = 0.1 is the default of the ACE paper's experiments.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from ...errors import ParameterError
from ...params import Params, positive, whole
from ..base import Dataset, Integers
from ..partition import register
from .deal import deal

DRAWS = 10
NARROWEST, WIDEST = 1e-12, 1e12
"""Beyond these alpha makes no difference to any example, but the sampler under- or overflows."""


@dataclass(frozen=True)
class DirichletParams(Params):
    """Parameters of the Dirichlet split."""

    alpha: float = positive(0.1, "concentration: small is one-sided, large is alike")
    min_size: int = whole(1, "examples every client has at least")


@register(
    "dirichlet",
    source="M. Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019",
    description="each class divided over the clients in proportions drawn from Dir(alpha)",
    params=DirichletParams,
    by_class=True,
)
def dirichlet(dataset: Dataset, clients: int, params: DirichletParams, draws: np.random.Generator) -> Integers:
    """The client of each example."""
    labels, needed = dataset.train_y, clients * params.min_size
    if needed > len(labels):
        raise ParameterError(
            f"dirichlet: {clients} clients with min_size={params.min_size} need {needed} examples and "
            f"{dataset.name!r} has {len(labels)}; lower min_size or clients"
        )
    totals = np.bincount(labels, minlength=dataset.classes)
    counts = best_draw(totals, clients, params, draws)
    fill(counts, params.min_size)
    return deal(labels, counts, draws)


def best_draw(totals: Integers, clients: int, params: DirichletParams, draws: np.random.Generator) -> Integers:
    """The first of `DRAWS` draws that gives every client enough, or the one that lacks the fewest examples."""
    best, least = np.empty(0, np.int64), -1
    for _ in range(DRAWS):
        counts = draw(totals, clients, params.alpha, draws)
        short = int(np.maximum(params.min_size - counts.sum(1), 0).sum())
        if least < 0 or short < least:
            best, least = counts, short
        if short == 0:
            break
    return best


def draw(totals: Integers, clients: int, alpha: float, draws: np.random.Generator) -> Integers:
    """How many examples of each class each client gets (clients x classes); the columns sum to `totals`."""
    alphas = np.full(clients, min(max(alpha, NARROWEST), WIDEST))
    ends = np.cumsum(draws.dirichlet(alphas, len(totals)), axis=1) * totals[:, None]
    # Rounded, not truncated: the proportions sum to one only up to the last bits, and no example may be lost.
    return np.ascontiguousarray(np.diff(np.rint(ends).astype(np.int64), axis=1, prepend=0).T)


def fill(counts: Integers, least: int) -> None:
    """Moves examples in place until every client has `least`; there must be that many.

    While one client has fewer than `least`, another has more, and none gives below `least`. Every move ends a client's
    shortage, a giver's surplus or a giver's class, so there are few moves.
    """
    sizes = counts.sum(1)
    rich = [(-int(sizes[client]), client) for client in np.flatnonzero(sizes > least).tolist()]
    heapq.heapify(rich)
    for poor in np.flatnonzero(sizes < least).tolist():
        lack = least - int(sizes[poor])
        while lack:
            size, giver = -rich[0][0], rich[0][1]
            label = int(counts[giver].argmax())
            amount = min(lack, size - least, int(counts[giver, label]))
            counts[giver, label] -= amount
            counts[poor, label] += amount
            lack -= amount
            _resize(rich, size - amount, least)


def _resize(rich: list[tuple[int, int]], size: int, least: int) -> None:
    """Gives the client at the top of the heap its new size, and removes it if it has nothing left to give."""
    if size > least:
        heapq.heapreplace(rich, (-size, rich[0][1]))
    else:
        heapq.heappop(rich)
