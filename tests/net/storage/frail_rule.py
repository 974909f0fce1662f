"""Run as a script, this is `aflock` with two rules more, which fail when a client asks them to.

    python frail_rule.py serve ... --set strategy.name=frail

The first number of a gradient says where the rule is to fail; by then it has always changed something.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from aflock import kernels, strategies
from aflock.cli import main
from aflock.errors import StateError, VectorError
from aflock.params import Params
from aflock.types import Accumulator, Receipt, Update, Vector

ERRORS = (
    ZeroDivisionError("division by zero"),
    KeyError("a line\nand another, ä"),
    VectorError("an error that is usually the client's fault"),
    StateError("an error that is usually a file's fault"),
    OSError(5, "input or output"),
    StopIteration(),
    RuntimeError(object()),
)
RECEIVE = 100
"""Plus the index of an error: in `_receive`, at once."""
LEAVE, DROP, JOB, JOIN, FLUSH = range(200, 205)
"""Later, as long as the client that has sent it is there."""


@dataclass(frozen=True)
class FrailParams(Params):
    """None."""


@strategies.register("frail", paper="none", rule="w <- w - G", optimum="biased", params=FrailParams)
class Frail(strategies.Strategy):
    """As asgd, and keeps a sum and what each client asked for."""

    needs = ("gradient",)
    keeps = ("total", "asked")

    def _allocate(self, length: int) -> None:
        self.total: Accumulator = kernels.zeros(length, np.float64)
        self.asked: dict[int, int] = {}

    def _receive(self, update: Update, staleness: int) -> Receipt:
        gradient = update.vectors["gradient"]
        self.asked[update.client] = code = int(gradient[0])
        kernels.add(self.total, 1.0, gradient)
        self.w.step(-1.0, gradient)
        receipt = self._applied(staleness)
        if RECEIVE <= code < LEAVE:
            raise ERRORS[code - RECEIVE]
        return receipt

    def _fail(self, code: int) -> None:
        self.total += 1.0
        if code in self.asked.values():
            raise ZeroDivisionError("division by zero")
        self.total -= 1.0

    def _leave(self, client: int) -> None:
        self._fail(LEAVE)
        self.asked.pop(client, None)

    def restart(self, client: int) -> None:
        self._fail(DROP)

    def _make_extras(self) -> dict[str, Vector]:
        self._fail(JOB)
        return {}

    def _join(self, client: int) -> None:
        self._fail(JOIN)

    def flush(self) -> bool:
        self._fail(FLUSH)
        return False


@strategies.register("frail-first", paper="none", rule="w <- w - G", optimum="biased", params=FrailParams)
class FrailFirst(Frail):
    """The same, and fails at first gradients."""

    first = True

    def _enter(self, client: int, gradient: Vector) -> None:
        kernels.add(self.total, 1.0, gradient)
        self.w.high += 1.0
        if gradient[0] >= RECEIVE:
            raise ERRORS[int(gradient[0]) - RECEIVE]
        self.w.high -= 1.0


if __name__ == "__main__":
    sys.exit(main())
