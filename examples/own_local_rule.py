"""A client rule of one's own: SGD along the sign of the gradient."""

from dataclasses import dataclass

import numpy as np

from aflock import local, simulate
from aflock.local.base import Direction, Known
from aflock.params import Params, positive
from aflock.types import Job


@dataclass(frozen=True)
class SignParams(Params):
    """Hyper-parameters of sign-sgd."""

    eta_l: float = positive(0.01, "local step size")


@local.register("sign-sgd", paper="this example", rule="sign(grad F_i(x_k))", params=SignParams)
class SignSgd(local.LocalRule):
    """Every weight moves by the same amount."""

    p: SignParams

    @property
    def eta_l(self) -> float:
        """The local step size."""
        return self.p.eta_l

    def _directions(self, job: Job, memory: Known) -> Direction:
        return lambda gradient, x, k: np.sign(gradient)


changes = ["local.name=sign-sgd", "strategy.name=fedbuff", "training.steps=5", "data.name=synthetic"]
result = simulate({"budget": {"uploads": 1500}}, *changes)
print(result.strategy, result.gradient_evaluations, f"{result.accuracy:.3f}")
