"""A federation of quadratics, whose optimum is known.

F_i(x) = 1/2 * sum_k h_ik * (x_k - b_ik)^2,    F(x) = (1/n) sum_i F_i(x)
grad F_i(x) = h_i * (x - b_i) + noise,         x* = sum_i h_i*b_i / sum_i h_i
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .. import rng
from ..types import Vector


@dataclass(frozen=True)
class Quadratics:
    """One diagonal quadratic per client: row i of `curvature` and `centre` is client i's."""

    curvature: npt.NDArray[np.float64]
    centre: npt.NDArray[np.float64]
    noise: float = 0.0

    @staticmethod
    def random(clients: int, length: int, seed: int, *, spread: float = 1.0, noise: float = 0.0) -> Quadratics:
        """Curvatures in [0.5, 1.5]; the later half of the clients has its centres elsewhere than the earlier half."""
        draws = rng.stream(seed, "quadratics")
        curvature = draws.uniform(0.5, 1.5, (clients, length))
        side = np.where(np.arange(clients) < clients / 2, -1.0, 1.0)[:, None]
        return Quadratics(curvature, spread * (side + 0.3 * draws.standard_normal((clients, length))), noise)

    @property
    def optimum(self) -> npt.NDArray[np.float64]:
        """x*, where the mean gradient of all clients vanishes."""
        best: npt.NDArray[np.float64] = (self.curvature * self.centre).sum(0) / self.curvature.sum(0)
        return best

    def gradient(self, client: int, x: Vector, draws: np.random.Generator | None = None) -> Vector:
        """The gradient of F_i at x, with Gaussian noise if a stream is given."""
        exact = self.curvature[client] * (x - self.centre[client])
        if draws is not None and self.noise:
            exact += self.noise * draws.standard_normal(exact.size)
        gradient: Vector = exact.astype(np.float32)
        return gradient
