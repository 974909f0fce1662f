"""FedAvg, the synchronous baseline: wait for a cohort, then average.

    w^{t+1} = sum_i r_i x_K^(i) / sum_i r_i    over the cohort

It runs on the same clock as the asynchronous rules, so that what waiting costs can be seen.

McMahan, H. B., Moore, E., Ramage, D., Hampson, S., Aguera y Arcas, B.: Communication-Efficient Learning of Deep
Networks from Decentralized Data. AISTATS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...params import Params, whole
from ..cohort import Cohort
from ..registry import register


@dataclass(frozen=True)
class FedAvgParams(Params):
    """Hyper-parameters of fedavg."""

    buffer: int | None = whole(None, "clients per round; None: all")


@register(
    "fedavg",
    paper="McMahan et al., AISTATS 2017",
    rule="wait for a cohort; w <- sum r_i x_K^(i) / sum r_i",
    optimum="true",
    params=FedAvgParams,
)
class FedAvg(Cohort):
    """Every round waits for its slowest client."""

    p: FedAvgParams

    def __init__(self, clients: int, params: Params, seed: int = 0) -> None:
        super().__init__(clients, params, seed)
        self._check_size(self.p.buffer)

    def _most(self) -> int | None:
        return self.p.buffer

    def _size(self) -> int:
        return self.n if self.p.buffer is None else self.p.buffer
