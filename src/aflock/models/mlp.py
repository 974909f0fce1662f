"""A multi-layer perceptron with ReLU, its gradient written by hand.

    h_0 = x,   h_l = max(h_{l-1} W_l + b_l, 0)  for l = 1 .. L-1,   z = h_{L-1} W_L + b_L
    d_L = dz (loops.py),   dW_l = h_{l-1}^T d_l,   db_l = sum_j d_l,   d_{l-1} = (d_l W_l^T) where h_{l-1} > 0

Flat layout: W_1 (inputs x outputs), b_1, W_2, b_2, ... Start: W_l ~ N(0, 2/inputs), b_l = 0.

He, K., Zhang, X., Ren, S., Sun, J.: Delving Deep into Rectifiers. ICCV 2015. (the start)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from .. import kernels
from ..errors import ParameterError
from ..params import Params, non_negative
from ..types import Vector
from . import loops
from .base import DatasetLike, Inputs, Labels, Matrix, features
from .classifier import Classifier, ScratchRows
from .registry import register

Layer = tuple[Matrix, Vector]
"""W_l and b_l, as views of a flat vector."""


def _width(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 1


def _widths(x: Any) -> bool:
    return _width(x) or (isinstance(x, list | tuple) and len(x) > 0 and all(map(_width, x)))


def widths(default: int, text: str) -> Any:
    """A parameter that is one layer's width, or a list of them."""
    expected = "an integer of at least 1, or a list of them"
    return field(default=default, metadata={"help": text, "check": _widths, "expected": expected})


@dataclass(frozen=True)
class MlpParams(Params):
    """Hyper-parameters of mlp."""

    hidden: int | Sequence[int] = widths(128, "width of the hidden layer, or of each of them")
    weight_decay: float = non_negative(0.0, "lambda of the term lambda/2*|w|^2 in the loss")


class Mlp(Classifier):
    """One or more hidden layers."""

    torch_order = False  # a layer's weights are (inputs, outputs)

    def __init__(
        self, features: int, classes: int, hidden: int | Sequence[int] = 128, weight_decay: float = 0.0
    ) -> None:
        super().__init__(features, classes, weight_decay)
        if not _widths(hidden):
            raise ParameterError(f"hidden is {hidden!r}; expected an integer of at least 1, or a list of them")
        self.hidden = (hidden,) if isinstance(hidden, int) else tuple(hidden)
        sizes = (features, *self.hidden, classes)
        self._shapes = list(pairwise(sizes))
        self.length = sum(inputs * outputs + outputs for inputs, outputs in self._shapes)
        self._forward = [ScratchRows(outputs) for outputs in sizes[1:]]
        self._backward = [ScratchRows(outputs) for outputs in self.hidden]

    def init(self, draws: np.random.Generator) -> Vector:
        """He's normal weights, zero biases."""
        w: Vector = kernels.zeros(self.length, np.float32)
        for weights, _ in self.layers(w):
            draws.standard_normal(dtype=np.float32, out=weights)
            weights *= np.float32(math.sqrt(2.0 / len(weights)))
        return w

    def layers(self, v: Vector) -> list[Layer]:
        """The parts of a flat vector, as views: [(W_1, b_1), (W_2, b_2), ...]."""
        parts, start = [], 0
        for inputs, outputs in self._shapes:
            middle = start + inputs * outputs
            parts.append((v[start:middle].reshape(inputs, outputs), v[middle : middle + outputs]))
            start = middle + outputs
        return parts

    def _outputs(self, layers: list[Layer], x: Inputs) -> list[Matrix]:
        """[h_0, .., h_{L-1}, z without its bias], each in its scratch memory."""
        outputs = [x]
        for k, (weights, _) in enumerate(layers):
            if k:
                loops.rectify(outputs[k], layers[k - 1][1])
            outputs.append(np.matmul(outputs[k], weights, out=self._forward[k](len(x))))
        return outputs

    def _logits(self, w: Vector, x: Inputs) -> tuple[Matrix, Vector]:
        layers = self.layers(w)
        return self._outputs(layers, x)[-1], layers[-1][1]

    def _gradient(self, w: Vector, x: Inputs, y: Labels, out: Vector) -> float:
        layers, gradients = self.layers(w), self.layers(out)
        *inputs, d = self._outputs(layers, x)
        loss = loops.cross_entropy(d, layers[-1][1], y, gradients[-1][1])
        if loss == loops.OUTSIDE:
            return loss
        for k in range(len(layers) - 1, 0, -1):
            np.matmul(inputs[k].T, d, out=gradients[k][0])
            d = np.matmul(d, layers[k][0].T, out=self._backward[k - 1](len(x)))
            loops.rectify_back(d, inputs[k], gradients[k - 1][1])
        np.matmul(x.T, d, out=gradients[0][0])
        return loss


@register("mlp", description="multi-layer perceptron with ReLU; needs no torch", params=MlpParams)
def build(dataset: DatasetLike, p: MlpParams) -> Mlp:
    """For the examples and classes of a dataset."""
    return Mlp(features(dataset), dataset.classes, p.hidden, p.weight_decay)
