"""TWAFL: temporally weighted aggregation.

    M_i <- x_K, stamp_i <- t+1
    w^{t+1} = sum_j weight_j M_j / sum_j weight_j,    weight_j = r_j * exp(-decay*(t+1 - stamp_j))

M_j = w^0 and stamp_j = 0 at the start. decay = 1 - ln 2 is the original (e/2)^(-age).

Chen, Y., Sun, X., Jin, Y.: Communication-Efficient Federated Deep Learning With Layerwise Asynchronous Model Update and
Temporally Weighted Aggregation. IEEE Transactions on Neural Networks and Learning Systems 31(10), 2020. Baseline of
the MR.AsyncFL paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...params import non_negative
from ..caching import CacheParams
from ..latest_models import LatestModels
from ..registry import register


@dataclass(frozen=True)
class TwaflParams(CacheParams):
    """Hyper-parameters of twafl."""

    decay: float = non_negative(1.0 - math.log(2.0), "decay per version of age")


@register(
    "twafl",
    paper="Chen et al., IEEE TNNLS 2020",
    rule="M_i <- x_K; w <- mean of M_j weighted by r_j*exp(-decay*age_j)",
    optimum="biased",
    params=TwaflParams,
)
class Twafl(LatestModels):
    """The mean of all latest models, faded by age."""

    p: TwaflParams

    @property
    def decay(self) -> float:
        return self.p.decay
