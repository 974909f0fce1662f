"""SCAFFOLD's client half.

    direction_k = grad F_i(x_k) - c_i + c
    c_i^+ = c_i - c + (w^s - x_K)/(K*eta_l)        afterwards; the update carries c_i^+ - c_i as `control`

c comes with the job (strategies ending in "+scaffold"); c_i is the client's own, 0 at first.

Karimireddy, S. P., Kale, S., Mohri, M., Reddi, S., Stich, S., Suresh, A. T.: SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning. ICML 2020. Option II.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...params import Params, positive
from ...types import Job, Vector
from ..base import Direction, Known, LocalRule
from ..registry import register


@dataclass(frozen=True)
class ScaffoldParams(Params):
    """Hyper-parameters of scaffold."""

    eta_l: float = positive(0.1, "local step size")


@register(
    "scaffold",
    paper="Karimireddy et al., ICML 2020",
    rule="grad F_i(x_k) - c_i + c; then c_i <- c_i - c + (w^s - x_K)/(K*eta_l)",
    params=ScaffoldParams,
)
class Scaffold(LocalRule):
    """SGD corrected by the difference of control variates."""

    p: ScaffoldParams
    remembers = ("control",)
    gives = (*LocalRule.gives, "control")
    extras = ("control",)

    @property
    def eta_l(self) -> float:
        return self.p.eta_l

    def _directions(self, job: Job, memory: Known) -> Direction:
        if job.first:  # a first job carries no c: its steps are plain ones
            return lambda gradient, x, k: gradient
        own = memory.get("control")
        correction = job.extras["control"] if own is None else job.extras["control"] - own
        return lambda gradient, x, k: gradient + correction

    def _finish(
        self, job: Job, x: Vector, steps: int, memory: Known, vectors: dict[str, Vector], kept: dict[str, Any]
    ) -> None:
        change: Vector = (job.model - x) / np.float32(steps * self.eta_l) - job.extras["control"]
        vectors["control"] = change
        kept["control"] = memory["control"] + change if "control" in memory else change.copy()
