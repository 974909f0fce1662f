"""A federation of quadratics, whose optimum is known.

F_i(x) = 1/2 * sum_k h_ik * (x_k - b_ik)^2,    F(x) = (1/n) sum_i F_i(x)
grad F_i(x) = h_i * (x - b_i) + noise,         x* = sum_i h_i*b_i / sum_i h_i

As a model of data, `quadratic` is F(w; batch) = 1/2 * mean of |w - x_j|^2: its optimum is the mean of all examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .. import kernels, rng
from ..params import Params
from ..types import Vector
from .base import DatasetLike, Evaluation, Inputs, Labels, Model, check_examples, check_out, check_vector, features
from .registry import register


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


class Quadratic(Model):
    """Half the mean squared distance to the examples; there is nothing to classify, so accuracy is not a number."""

    def __init__(self, features: int) -> None:
        self.length = features

    def init(self, draws: np.random.Generator) -> Vector:
        """Zero."""
        return kernels.zeros(self.length, np.float32)

    def gradient(self, w: Vector, x: Inputs, y: Labels, out: Vector) -> float:
        """w minus the mean of the batch."""
        check_out(out, self.length)
        check_vector("w", w, self.length)
        check_examples(x, y, self.length)
        rows = x.reshape(len(x), self.length)
        np.subtract(w, rows.mean(axis=0), out=out)
        return self._loss(w, rows)

    def evaluate(self, w: Vector, x: Inputs, y: Labels) -> Evaluation:
        """Half the mean squared distance."""
        check_vector("w", w, self.length)
        check_examples(x, y, self.length)
        return Evaluation(self._loss(w, x.reshape(len(x), self.length)), math.nan)

    def _loss(self, w: Vector, rows: Inputs) -> float:
        return float(0.5 * np.square(rows - w, dtype=np.float64).sum(axis=1).mean())


@dataclass(frozen=True)
class QuadraticParams(Params):
    """quadratic has no hyper-parameters."""


@register(
    "quadratic", description="half the squared distance to the examples: its optimum is known", params=QuadraticParams
)
def build(dataset: DatasetLike, p: QuadraticParams) -> Quadratic:
    """For the examples of a dataset."""
    return Quadratic(features(dataset))
