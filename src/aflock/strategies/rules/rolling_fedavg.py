"""Rolling FedAvg: the mean of every client's latest model, whatever its age.

    M_i <- x_K;    w^{t+1} = sum_j r_j M_j / sum_j r_j

M_j = w^0 at the start. It is twafl with decay 0.

Baseline of the MR.AsyncFL paper (see `mr-asyncfl`), section 5.3.
"""

from __future__ import annotations

from ..caching import CacheParams
from ..latest_models import LatestModels
from ..registry import register


@register(
    "rolling-fedavg",
    paper="MR.AsyncFL, section 5.3",
    rule="M_i <- x_K; w <- mean of M_j weighted by r_j",
    optimum="step",
    params=CacheParams,
)
class RollingFedAvg(LatestModels):
    """The mean of all latest models, age ignored."""

    decay = 0.0
