"""The corrected momentum that masfl and adamasfl follow at the client.

direction_k = beta*(grad F_i(x_k) - ct_i) + job extra
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import theorems
from ..errors import MissingVector
from ..params import Params, unit, whole
from ..types import Job, Vector
from .base import Direction, Known, LocalRule


@dataclass(frozen=True)
class MomentumParams(Params):
    """What masfl and adamasfl have in common; S is `buffer`, K is `steps`, T is `rounds`, as on the server."""

    beta: float | None = unit(None, "beta, momentum; None: sqrt(S*K/T)", one=True)
    buffer: int = whole(10, "S, for the theorem's beta")
    steps: int = whole(1, "K, for the theorem's defaults")
    rounds: int = whole(1000, "T, for the theorem's defaults")


class Momentum(LocalRule):
    """Base of the client rules with a control variate of their own."""

    p: MomentumParams
    remembers = ("gradient",)
    averages = True
    extras = ("momentum",)

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        p = self.p
        self.beta = theorems.momentum(p.buffer, p.steps, p.rounds) if p.beta is None else p.beta

    def _directions(self, job: Job, memory: Known) -> Direction:
        own: Vector | None = memory.get("gradient")
        if own is None:
            raise MissingVector(
                f"{self.name}: the client's memory holds no gradient; it must answer a first job and keep its result"
            )
        beta = np.float32(self.beta)
        offset: Vector = job.extras["momentum"] - beta * own

        def direction(gradient: Vector, x: Vector, k: int) -> Vector:
            moved: Vector = beta * gradient + offset
            return moved

        return direction

    def _remember(self, gradient: Vector) -> dict[str, npt.NDArray[Any]]:
        return {"gradient": gradient.copy()}
