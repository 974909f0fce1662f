"""A server rule of one's own: asynchronous SGD whose step shrinks with the version."""

from dataclasses import dataclass

from aflock import simulate, strategies
from aflock.params import Params, positive
from aflock.types import Receipt, Update


@dataclass(frozen=True)
class CoolingParams(Params):
    """Hyper-parameters of cooling."""

    lr: float = positive(0.5, "first step size")
    half_life: float = positive(500, "versions after which the step has halved")


@strategies.register(
    "cooling", paper="this example", rule="w <- w - lr*2^(-t/half_life)*G", optimum="biased", params=CoolingParams
)
class Cooling(strategies.Strategy):
    """Every arrival is one step, each a little smaller than the last."""

    needs = ("gradient",)
    p: CoolingParams

    def _receive(self, update: Update, staleness: int) -> Receipt:
        step = self.p.lr * 2.0 ** (-self.version / self.p.half_life)
        self.w.step(-step, update.vectors["gradient"])
        return self._applied(staleness)


result = simulate({"budget": {"uploads": 1500}}, "strategy.name=cooling", "data.name=synthetic")
print(result.strategy, result.uploads, f"{result.accuracy:.3f}")
