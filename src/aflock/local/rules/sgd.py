"""Plain SGD at the client, with momentum and weight decay if wanted.

d_k = grad F_i(x_k) + weight_decay*x_k
v_k = momentum*v_{k-1} + d_k,   v_{-1} = 0 at the start of every job
x_{k+1} = x_k - eta_l * v_k
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...params import Params, non_negative, positive, unit
from ...types import Job, Vector
from ..base import Direction, Known, LocalRule
from ..registry import register


@dataclass(frozen=True)
class SgdParams(Params):
    """Hyper-parameters of sgd."""

    eta_l: float = positive(0.1, "local step size")
    momentum: float = unit(0.0, "momentum within a job", zero=True)
    weight_decay: float = non_negative(0.0, "pull towards zero")


@register(
    "sgd",
    paper="Robbins and Monro, Annals of Mathematical Statistics 1951",
    rule="grad F_i(x_k)",
    params=SgdParams,
)
class Sgd(LocalRule):
    """The gradient, possibly with memory within the job."""

    p: SgdParams

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.follows = not (self.p.momentum or self.p.weight_decay)

    @property
    def eta_l(self) -> float:
        return self.p.eta_l

    def _directions(self, job: Job, memory: Known) -> Direction:
        decay, momentum = np.float32(self.p.weight_decay), np.float32(self.p.momentum)
        velocity: list[Vector] = []

        def direction(gradient: Vector, x: Vector, k: int) -> Vector:
            moved = gradient + decay * x if decay else gradient
            if not momentum:
                return moved
            if velocity:
                velocity[0] *= momentum
                velocity[0] += moved
            else:
                velocity.append(moved.copy())
            return velocity[0]

        return direction
