"""A dataset of one's own: which quadrant is a point in."""

import numpy as np

from aflock import data, rng, simulate
from aflock.params import Params


@data.register("quadrants", source="this example", description="points in the plane", params=Params)
def quadrants(params: Params, seed: int) -> data.Dataset:
    """Two thousand points, uniform on a square."""
    draws = rng.stream(seed, "quadrants")
    x = draws.uniform(-1, 1, (2000, 2)).astype(np.float32)
    y = 2 * (x[:, 0] > 0) + (x[:, 1] > 0)
    return data.Dataset("quadrants", x[:1500], y[:1500], x[1500:], y[1500:], classes=4)


result = simulate({"budget": {"uploads": 2000}}, "data.name=quadrants", "strategy.name=ace", "strategy.lr=1.0")
print(result.strategy, result.uploads, f"{result.accuracy:.3f}")
