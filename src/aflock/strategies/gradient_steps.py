"""Rules that take gradients, and those of them whose step is one gradient times a rate: asgd and delay-adaptive.

w <- w - rate*G                                    on an arrival
w <- w - (1/k) * sum over the k arrivals of rate_i*G_i     where one step answers k arrivals (`take`, `step`)
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from .. import kernels
from ..params import Params, choice
from ..types import Accumulator, Receipt, Update
from .base import Strategy


@dataclass(frozen=True)
class GradientParams(Params):
    """What the clients of a rule that averages gradients send.

    gradient     the mean of the raw stochastic gradients of the K local steps
    direction    (w^s - x_K)/(eta_l*K), the mean of the steps that the client's own rule took

    They are the same for plain SGD. With momentum, weight decay, fedprox, scaffold, adam and adamw only the direction
    carries what the client's rule does.
    """

    sends: str = choice(
        "gradient",
        ("gradient", "direction"),
        "what clients send: their mean raw gradient, or the mean step they "
        "took; in a file also auto, the default: direction, unless the local rule is plain SGD",
    )


class GradientSteps(Strategy):
    """Base of the rules that move the model along the gradient of an arrival."""

    needs = ("gradient",)
    can_take = True
    takes = ("taken_sum",)

    @abstractmethod
    def _rate(self, staleness: int) -> float:
        """The step size for an arrival of that staleness; 0 rejects it."""

    def _reason(self, staleness: int) -> str:
        """Why an arrival is rejected."""
        return f"staleness {staleness} has the step size 0"

    def _receive(self, update: Update, staleness: int) -> Receipt:
        rate = self._rate(staleness)
        if not rate:
            return Receipt("rejected", staleness, self._reason(staleness))
        self.w.step(-rate, update.vectors[self.sends])
        return self._applied(staleness)

    def _allocate_taken(self, length: int) -> None:
        self.taken_sum: Accumulator = kernels.zeros(length, np.float64)

    def _take(self, update: Update, staleness: int) -> Receipt:
        rate = self._rate(staleness)
        if not rate:
            return Receipt("rejected", staleness, self._reason(staleness))
        self._prepare_to_take()
        kernels.add(self.taken_sum, rate, update.vectors[self.sends])
        return self._count_taken(staleness)

    def _step_with_taken(self) -> None:
        self.w.drain(-1.0 / self.taken, self.taken_sum)
