"""A delay of one's own: every job takes a night or a day."""

from aflock import simulate
from aflock.params import Params
from aflock.sim import delays


@delays.register("night-or-day", description="eight hours or sixteen", params=Params)
class NightOrDay(delays.Delay):
    """Half of the jobs are done over night."""

    def quantile(self, u: float) -> float:
        """The duration below which a part u of all jobs stay."""
        return 8.0 if u < 0.5 else 16.0


changes = ["delays.name=night-or-day", "data.name=synthetic", "strategy.name=fedbuff"]
result = simulate({"budget": {"uploads": 400}}, *changes)
print(result.virtual_time, result.versions)
