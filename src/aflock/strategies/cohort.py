"""Rules that wait for a cohort of distinct clients and average their models: what fedavg and afl share.

    w^{t+1} = sum_i r_i x_K^(i) / sum_i r_i    over the clients of the round

A second report of the same client within one round is rejected. The round never waits for a client that has left; what
that client had sent counts, but not as one of those the round waits for.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from .. import kernels
from ..errors import ParameterError
from ..types import Accumulator, Receipt, Update
from .base import Strategy


class Cohort(Strategy):
    """Base of the rules whose step waits for a given number of clients."""

    needs: tuple[str, ...] = ("model",)
    keeps: ClassVar[tuple[str, ...]] = ("acc", "weight", "held", "members")
    can_take = True

    held = 0

    @abstractmethod
    def _size(self) -> int:
        """How many clients this round waits for."""

    def _check_size(self, size: int | None) -> None:
        if size is not None and size > self.n:
            raise ParameterError(
                f"{self.name}: buffer={size} can never fill with {self.n} clients; expected at most {self.n}"
            )

    def _allocate(self, length: int) -> None:
        self.acc: Accumulator = kernels.zeros(length, np.float64)
        self.weight = 0
        self.held = 0
        self.members: dict[int, int] = {}

    @property
    def cohort(self) -> int:
        return max(1, min(self._size(), self.n))

    @property
    def largest_cohort(self) -> int:
        return self._most() or self.n

    @abstractmethod
    def _most(self) -> int | None:
        """The parameter `buffer`; None: all clients."""

    @property
    def pending(self) -> int:
        return self.held

    def flush(self) -> bool:
        self._require_start()
        if not self.held:
            return False
        self.w.assign(1.0 / self.weight, self.acc)
        self.weight = self.held = 0
        self.members.clear()
        self._advance()
        return True

    def _receive(self, update: Update, staleness: int) -> Receipt:
        receipt = self._take(update, staleness)
        if receipt.rejected or len(self.members) < self.cohort:
            return receipt
        self.flush()
        return Receipt("applied", staleness)

    def _take(self, update: Update, staleness: int) -> Receipt:
        if update.client in self.members:
            return Receipt("rejected", staleness, f"client {update.client} has reported in this round already")
        kernels.add(self.acc, float(update.examples), update.vectors["model"])
        self.weight += update.examples
        self.members[update.client] = update.examples
        self.held += 1
        return Receipt("buffered", staleness)

    def _step_if_due(self) -> None:
        if self.held and len(self.members) >= self.cohort:
            self.flush()

    def _leave(self, client: int) -> None:
        self.members.pop(client, None)

    def _left(self) -> None:
        if self.held and len(self.members) >= self.cohort:
            self.flush()
