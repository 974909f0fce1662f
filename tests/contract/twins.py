"""Naive float64 twins of every server rule: a second reading of the specification page, to test the real one against.

Nothing in them is clever: rows and arrivals are kept whole, and every mean is taken again from scratch."""

from collections.abc import Callable
from typing import Any

from tests.contract.gradient_twins import Ace, Aced, AdaMasFl, AfaCd, AfaCs, Asgd, DelayAdaptive, MasFl
from tests.contract.model_twins import Afl, Ca2fl, Fadas, FedAsync, FedAvg, FedBuff, MrAsyncFl, RollingFedAvg, Twafl
from tests.contract.twin import Array, Twin

PLAIN: dict[str, Callable[..., Twin]] = {
    "asgd": Asgd,
    "delay-adaptive": DelayAdaptive,
    "fedbuff": FedBuff,
    "ca2fl": Ca2fl,
    "mr-asyncfl": MrAsyncFl,
    "fedasync": FedAsync,
    "twafl": Twafl,
    "rolling-fedavg": RollingFedAvg,
    "afa-cd": AfaCd,
    "afa-cs": AfaCs,
    "fadas": Fadas,
    "afl": Afl,
    "fedavg": FedAvg,
}


NEEDS_FIRST: dict[str, Callable[..., Twin]] = {"ace": Ace, "aced": Aced, "masfl": MasFl, "adamasfl": AdaMasFl}


def make(name: str, n: int, w0: Array, first: dict[int, Array] | None, **params: Any) -> Twin:
    """The twin of a rule for n clients 0..n-1, from w0; `first` holds G_j(w^0) for the rules that need it."""
    if name in NEEDS_FIRST:
        if first is None:
            raise ValueError(f"{name} needs every client's first gradient")
        return NEEDS_FIRST[name](n, w0, first, **params)
    return PLAIN[name](n, w0, **params)
