"""Softmax regression, with its gradient written by hand.

    z = x W^T + b,    F = mean cross entropy of softmax(z)
    dW = dz^T x,      db = sum_j dz_j,         dz as in loops.py

Flat layout: W (classes x features), then b; the order of torch's nn.Linear. The start is zero: the loss is convex, and
zero treats all classes alike. (Stored as features x classes, the two products take 1.5 times as long: BLAS prefers the
long axis innermost.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import kernels
from ..params import Params, non_negative
from ..types import Vector
from . import loops
from .base import DatasetLike, Inputs, Labels, Matrix, features
from .classifier import Classifier, ScratchRows
from .registry import register


@dataclass(frozen=True)
class LogisticParams(Params):
    """Hyper-parameters of logistic."""

    weight_decay: float = non_negative(0.0, "lambda of the term lambda/2*|w|^2 in the loss")


class Logistic(Classifier):
    """One matrix and one bias."""

    def __init__(self, features: int, classes: int, weight_decay: float = 0.0) -> None:
        super().__init__(features, classes, weight_decay)
        self.length = classes * features + classes
        self._z = ScratchRows(classes)

    def init(self, draws: np.random.Generator) -> Vector:
        """Zero."""
        return kernels.zeros(self.length, np.float32)

    def _parts(self, v: Vector) -> tuple[Matrix, Vector]:
        cut = self.classes * self.features
        return v[:cut].reshape(self.classes, self.features), v[cut:]

    def _logits(self, w: Vector, x: Inputs) -> tuple[Matrix, Vector]:
        weights, bias = self._parts(w)
        return np.matmul(x, weights.T, out=self._z(len(x))), bias

    def _gradient(self, w: Vector, x: Inputs, y: Labels, out: Vector) -> float:
        z, bias = self._logits(w, x)
        d_weights, d_bias = self._parts(out)
        loss = loops.cross_entropy(z, bias, y, d_bias)
        if loss != loops.OUTSIDE:
            np.matmul(z.T, x, out=d_weights)
        return loss


@register("logistic", description="softmax regression; needs no torch", params=LogisticParams)
def build(dataset: DatasetLike, p: LogisticParams) -> Logistic:
    """For the examples and classes of a dataset."""
    return Logistic(features(dataset), dataset.classes, p.weight_decay)
