"""What models with hand-written gradients share: checks, weight decay, and an evaluation in chunks.

    F(w) = -(1/B) sum_j log softmax(z_j)[y_j] + (weight_decay/2) * |w|^2,    z_j the model's logits for x_j

Weight decay acts on every weight, biases included, which makes softmax regression strongly convex. It belongs to the
loss that is trained, not to the loss that `evaluate` reports.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from ..errors import InputError, ParameterError, VectorError
from ..types import Vector
from . import loops
from .base import Evaluation, Inputs, Labels, Matrix, Model, check_examples, check_out, check_vector, chunks

CHUNK = 1024
"""Examples that are evaluated at a time."""


class ScratchRows:
    """A scratch matrix of `width` columns that grows to the largest batch so far, so that a step allocates nothing."""

    def __init__(self, width: int) -> None:
        self._all = np.empty((0, width), np.float32)
        self._view = self._all

    def __call__(self, count: int) -> Matrix:
        """The first `count` rows; they are not initialised."""
        if len(self._view) != count:
            if len(self._all) < count:
                self._all = np.empty((count, self._all.shape[1]), np.float32)
            self._view = self._all[:count]
        return self._view


class Classifier(Model):
    """Base of the models that map `features` numbers to logits for `classes` classes."""

    def __init__(self, features: int, classes: int, weight_decay: float = 0.0) -> None:
        if features < 1:
            raise ParameterError(f"features is {features}; expected at least 1")
        if classes < 2:
            raise ParameterError(f"classes is {classes}; expected at least 2")
        self.features = features
        self.classes = classes
        self.weight_decay = float(weight_decay)

    def gradient(self, w: Vector, x: Inputs, y: Labels, out: Vector) -> float:
        """F at w; out <- grad F."""
        check_out(out, self.length)
        self._check(w, x, y)
        if out is w:
            raise VectorError("out is w itself; expected a vector of its own for the gradient")
        return self.trusted_gradient(w, x, y, out)

    def trusted_gradient(self, w: Vector, x: Inputs, y: Labels, out: Vector) -> float:
        """F at w; out <- grad F."""
        if x.ndim != 2:
            x = x.reshape(len(x), self.features)
        loss = self._gradient(w, x, y, out)
        if loss == loops.OUTSIDE:
            raise self._outside(y)
        return loss + loops.decay(out, self.weight_decay, w) if self.weight_decay else loss

    def evaluate(self, w: Vector, x: Inputs, y: Labels) -> Evaluation:
        """Mean cross entropy and accuracy."""
        self._check(w, x, y)
        loss, right = 0.0, 0
        for some_x, some_y in chunks(x, y, CHUNK):
            z, b = self._logits(w, some_x.reshape(len(some_x), self.features))
            more, hits = loops.score(z, b, some_y)
            if more == loops.OUTSIDE:
                raise self._outside(y)
            loss, right = loss + more, right + hits
        return Evaluation(loss / len(x), right / len(x))

    @abstractmethod
    def _logits(self, w: Vector, x: Inputs) -> tuple[Matrix, Vector]:
        """z without its bias, in scratch memory, and the bias."""

    @abstractmethod
    def _gradient(self, w: Vector, x: Inputs, y: Labels, out: Vector) -> float:
        """The mean cross entropy (or OUTSIDE); out <- its gradient."""

    def _check(self, w: Vector, x: Inputs, y: Labels) -> None:
        check_vector("w", w, self.length)
        check_examples(x, y, self.features)
        if y.ndim != 1 or y.dtype.kind not in "iu":
            raise VectorError(f"y is {y.dtype} of shape {y.shape}; expected one integer per example")

    def _outside(self, y: Labels) -> InputError:
        wrong = y[(y < 0) | (y >= self.classes)][0]
        return InputError(f"a label is {wrong}; expected integers from 0 to {self.classes - 1}")
