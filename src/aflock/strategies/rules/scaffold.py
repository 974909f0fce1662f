"""SCAFFOLD's server half, as an addition to any rule: create("afa-cd+scaffold", ...), create("fedbuff+scaffold", ...).

    the job carries             c = (1/N) sum_i c_i                  as its extra vector `control`
    the update carries          c_i^+ - c_i                          as its vector `control`
    the server adds             (1/N)*(c_i^+ - c_i)   to c           when the model moves next

so that a job's vectors are all of one version. The client keeps c_i (local rule `scaffold`) and moves it once the
server has taken its update: what the rule rejects counts on neither side. A client that joins has c_i = 0; one that
leaves stays in the mean with its last c_i, which the server has no row to take out of.

Karimireddy, S. P., Kale, S., Mohri, M., Reddi, S., Stich, S., Suresh, A. T.: SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning. ICML 2020. Its use under AFL: the AFA paper, table 3 (see `afa-cd`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import kernels
from ...types import Accumulator, Receipt, Update, Vector
from ..base import Strategy
from ..registry import addition


@addition("scaffold")
class Scaffold(Strategy):
    """Mixed in before a rule's own class."""

    control: Accumulator
    drift: Accumulator
    departed: int

    def __init_subclass__(cls) -> None:
        cls.needs = (*cls.needs, "control")
        cls.keeps = (*cls.keeps, "control", "drift", "departed")

    @property
    def client_half(self) -> tuple[str, dict[str, Any]]:
        return "scaffold", {}

    def _allocate(self, length: int) -> None:
        super()._allocate(length)
        self.control = kernels.zeros(length, np.float64)
        self.drift = kernels.zeros(length, np.float64)
        self.departed = 0

    def _make_extras(self) -> dict[str, Vector]:
        mean = (self.control / max(1, self.n + self.departed)).astype(np.float32)
        return super()._make_extras() | {"control": mean}

    def _receive(self, update: Update, staleness: int) -> Receipt:
        version = self.version
        receipt = super()._receive(update, staleness)  # type: ignore[safe-super]
        if not receipt.rejected:
            kernels.add(self.drift, 1.0, update.vectors["control"])
        if self.version > version:
            self._fold()
        return receipt

    def _take(self, update: Update, staleness: int) -> Receipt:
        receipt = super()._take(update, staleness)
        if not receipt.rejected:
            kernels.add(self.drift, 1.0, update.vectors["control"])
        return receipt

    def _step_if_due(self) -> None:
        version = self.version
        super()._step_if_due()
        if self.version > version:
            self._fold()

    def flush(self) -> bool:
        flushed = super().flush()
        if flushed:
            self._fold()
        return flushed

    def _left(self) -> None:
        version = self.version
        super()._left()
        if self.version > version:
            self._fold()

    def _leave(self, client: int) -> None:
        super()._leave(client)
        self.departed += 1

    def _fold(self) -> None:
        kernels.fold(self.control, self.drift)
        self._extras = None
