"""AFL: rounds of a random number of clients, chosen fairly.

    J' drawn uniformly from {J_min, ..., J} for every round; J' clients, without replacement and fair over rounds
    x^{(j+1)} = sum_c r_c x_{c,I}^{(j - tau_c)} / sum_c r_c    when all J' are in

A client may have started from an older version, x^{(j - tau_c)}. The selection is the coordinator's (policy "fair", its
default for this rule); the delay-aware Adam with early stopping is the local rule `adam`.

Forootani, A., Iervolino, R.: Asynchronous Federated Learning: A Scalable Approach for Decentralized Machine Learning.
arXiv:2412.17723, 2024. Algorithm 1 and section 6.3.
"""

from __future__ import annotations

from dataclasses import dataclass

from ... import rng
from ...errors import ParameterError
from ...params import Params, whole
from ..cohort import Cohort
from ..registry import register


@dataclass(frozen=True)
class AflParams(Params):
    """Hyper-parameters of afl."""

    buffer: int | None = whole(None, "J, most clients per round; None: all")
    buffer_min: int = whole(1, "J_min, fewest clients per round")


@register(
    "afl",
    paper="Forootani and Iervolino, algorithm 1",
    rule="a round takes J' clients, J' drawn from [J_min, J]; when all are in: w <- sum r_i x_K^(i) / sum r_i",
    optimum="step",
    params=AflParams,
)
class Afl(Cohort):
    """Cohorts of random size."""

    fair = True
    size = 0
    keeps = (*Cohort.keeps, "draws", "size")
    p: AflParams

    def __init__(self, clients: int, params: Params, seed: int = 0) -> None:
        super().__init__(clients, params, seed)
        self._check_size(self.p.buffer)
        if self.p.buffer_min > (self.p.buffer or clients):
            raise ParameterError(
                f"afl: buffer_min={self.p.buffer_min} exceeds the most a round takes; expected at most "
                f"{self.p.buffer or clients}"
            )

    def _allocate(self, length: int) -> None:
        super()._allocate(length)
        self.draws = rng.stream(self.seed, "afl", "cohort")
        self.size = 0

    def _begin(self) -> None:
        self._draw()

    def _draw(self) -> None:
        most = max(self.p.buffer_min, self.p.buffer or self.n)
        self.size = int(self.draws.integers(self.p.buffer_min, most, endpoint=True))

    def _most(self) -> int | None:
        return self.p.buffer

    def _size(self) -> int:
        return self.size

    def _advance(self) -> None:
        super()._advance()
        self._draw()
