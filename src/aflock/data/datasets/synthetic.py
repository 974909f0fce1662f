"""Gaussian blobs: class c is a unit Gaussian around its centre m_c.

    m_c = separation * u_c,    u_c uniform on the unit sphere
    x | y=c  ~  N(m_c, I)

Two centres are sqrt(2)*separation apart on average (in the square), so that `separation` 0 cannot be learnt and 5 gives
almost no errors. The sizes of the classes differ by at most one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ... import rng
from ...errors import ParameterError
from ...params import Params, non_negative, unit, whole
from ..base import Dataset
from ..registry import register
from ..splits.holdout import stratified


@dataclass(frozen=True)
class SyntheticParams(Params):
    """Parameters of the blobs."""

    examples: int = whole(2000, "examples in all, for training and testing", least=2)
    features: int = whole(20, "length of an example")
    classes: int = whole(10, "number of blobs")
    separation: float = non_negative(3.0, "distance of each blob's centre from the origin, in standard deviations")
    test_fraction: float = unit(0.2, "share of every class that is kept for testing")


@register(
    "synthetic",
    source="drawn from the seed",
    description="one unit Gaussian per class, its centre at a given distance from the origin in a random direction",
    params=SyntheticParams,
)
def synthetic(params: SyntheticParams, seed: int) -> Dataset:
    """The blobs of that seed."""
    if params.examples < 2 * params.classes:
        raise ParameterError(
            f"synthetic: examples={params.examples} is too few to train and test {params.classes} classes; "
            f"expected at least {2 * params.classes}"
        )
    draws = rng.stream(seed, "data", "synthetic")
    y = draws.permutation(np.arange(params.examples) % params.classes)
    x = draws.standard_normal((params.examples, params.features), np.float32)
    x += _centres(params, draws)[y]
    train, test = stratified(y, params.test_fraction, draws)
    return Dataset("synthetic", x[train], y[train], x[test], y[test], params.classes)


def _centres(params: SyntheticParams, draws: np.random.Generator) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    directions = draws.standard_normal((params.classes, params.features))
    directions *= params.separation / np.linalg.norm(directions, axis=1, keepdims=True)
    return directions.astype(np.float32)
