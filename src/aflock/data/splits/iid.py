"""All clients alike: the examples are shuffled and cut into equal parts (sizes differ by at most one)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...params import Params
from ..base import Dataset, Integers
from ..partition import register


@dataclass(frozen=True)
class IidParams(Params):
    """The iid split has no parameters."""


@register(
    "iid",
    source="B. McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017",
    description="shuffled and cut into equal parts",
    params=IidParams,
)
def iid(dataset: Dataset, clients: int, params: IidParams, draws: np.random.Generator) -> Integers:
    """The client of each example."""
    return draws.permutation(np.arange(len(dataset.train_y)) % clients)
