"""Rules that hold arrivals and step when m of them are in: one server update, so t grows by one."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from ..params import Params, whole
from ..types import Receipt, Update
from .base import Strategy


@dataclass(frozen=True)
class BufferParams(Params):
    """The buffer size every buffered rule has."""

    buffer: int = whole(10, "m, arrivals per server step")


class Buffered(Strategy):
    """Counts arrivals, releases them at m, and never drops a last partial buffer silently (`pending`, `flush`)."""

    keeps: ClassVar[tuple[str, ...]] = ("held",)
    can_take = True
    p: BufferParams

    def _allocate(self, length: int) -> None:
        self.held = 0

    held = 0

    @property
    def pending(self) -> int:
        return self.held

    def flush(self) -> bool:
        self._require_start()
        if not self.held:
            return False
        self._step()
        return True

    def _receive(self, update: Update, staleness: int) -> Receipt:
        self._hold(update, staleness)
        self.held += 1
        if self.held < self.p.buffer:
            return Receipt("buffered", staleness)
        self._step()
        return Receipt("applied", staleness)

    def _take(self, update: Update, staleness: int) -> Receipt:
        self._hold(update, staleness)
        self.held += 1
        return Receipt("buffered", staleness)

    def _step_if_due(self) -> None:
        """One step with all that is held, if that is m or more."""
        if self.held >= self.p.buffer:
            self._step()

    def _step(self) -> None:
        self._release(self.held)
        self.held = 0
        self._advance()

    @abstractmethod
    def _hold(self, update: Update, staleness: int) -> None:
        """Takes one arrival into the buffer."""

    @abstractmethod
    def _release(self, m: int) -> None:
        """Moves the model by the m arrivals held, and empties the buffer."""
