"""AdaMasFL: MasFL with normalised local steps, and no learning rate to tune.

    theta^{t+1} = theta^t - gamma * (1/S) * sum over S_t of Delta_i,    Delta_i = (theta^{t-tau} - theta_i^K)/(eta*K)
    c_i, g, c as in MasFL

    beta = sqrt(S*K/T),   gamma = (S*K)^(1/4) / T^(3/4),   eta = 1/(K*sqrt(T))      from S, K, T alone (theorem 4.1)

Delta_i is the vector `direction` of an update. With selection="arrivals" the sum runs over the S arrivals of the round;
with "random" over the newest direction of each drawn client, which is 0 until it has reported. `eta_l` is the step the
theorem gives the clients (local rule `adamasfl`).

Yan, W., Zhong, X., Wang, X., Zhang, Y.-J. A.: Momentum-Driven Adaptivity: Towards Tuning-Free Asynchronous Federated
Learning. ICML 2025. Algorithms 3 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ... import kernels, theorems
from ...params import Params
from ...types import Accumulator, Update
from ..control_variates import ControlParams, ControlVariates
from ..registry import register


@dataclass(frozen=True)
class AdaMasFlParams(ControlParams):
    """Hyper-parameters of adamasfl."""


@register(
    "adamasfl",
    paper="Yan et al., Momentum-driven adaptivity, algorithm 3",
    rule="as masfl, but w <- w - gamma*(1/S)*sum of the S directions",
    optimum="step",
    params=AdaMasFlParams,
)
class AdaMasFl(ControlVariates):
    """A step along the mean of the clients' normalised directions."""

    needs = ("gradient", "direction")
    keeps = (*ControlVariates.keeps, "acc", "directions")
    p: AdaMasFlParams

    def __init__(self, clients: int, params: Params, seed: int = 0) -> None:
        super().__init__(clients, params, seed)
        theorem = theorems.adamasfl_gamma(self.p.buffer, self.p.steps, self.p.rounds)
        self.gamma = theorem if self.p.gamma is None else self.p.gamma
        self.eta_l = theorems.adamasfl_eta(self.p.steps, self.p.rounds)

    def _allocate(self, length: int) -> None:
        super()._allocate(length)
        self.acc: Accumulator = kernels.zeros(length, np.float64)
        self.directions = self._make_rows(self.clients if self._random else (), length)

    def _hold(self, update: Update, staleness: int) -> None:
        super()._hold(update, staleness)
        if self._random:
            self.directions.store(update.client, update.vectors["direction"])
        else:
            kernels.add(self.acc, 1.0, update.vectors["direction"])

    def _move(self, chosen: list[int], size: int) -> None:
        for client in chosen:
            self.directions.add_to(self.acc, 1.0, client)
        self.w.drain(-self.gamma / max(1, size), self.acc)
        super()._move(chosen, size)

    def _join(self, client: int) -> None:
        self.rows.require(3 if self._random else 1)
        super()._join(client)
        if self._random:
            self.directions.insert(client, check=False)

    def _leave(self, client: int) -> None:
        super()._leave(client)
        if self._random:
            self.directions.discard(client)
