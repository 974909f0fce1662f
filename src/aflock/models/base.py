"""The interface of every model: a loss and its gradient as functions of one flat float32 vector.

    F(w; batch) = (1/B) sum_j loss(w; x_j, y_j)            gradient(w, x, y, out):   out <- grad F,  returns F
                                                           evaluate(w, x, y):        F and the accuracy on a test set

A model holds no weights: the caller owns w, and the same model object serves every client. Both functions depend on
their arguments alone (same arguments, same bits, in any process). `gradient` keeps its scratch memory between calls and
allocates nothing of size d. Examples come as the rows of a float32 array, of any shape; labels as integers 0, 1, ...
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from .. import kernels
from ..errors import CountError, VectorError
from ..types import Accumulator, Vector

Inputs = npt.NDArray[Any]
"""B examples: (B, ...), float32; integers for a torch module that takes tokens."""

Matrix = npt.NDArray[Any]
"""float32, two axes: a layer's weights, or one row per example (activations, logits)."""

Labels = npt.NDArray[Any]
"""B labels: integers, or what a loss function of one's own takes."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean loss of a model on some examples, and the share of them that it classifies right."""

    loss: float
    accuracy: float


class DatasetLike(Protocol):
    """What a model must know of the data to be built: the shape of an example and the number of classes."""

    @property
    def train_x(self) -> npt.NDArray[Any]:
        """The training examples, (N, ...)."""

    @property
    def classes(self) -> int:
        """The number of classes."""


class Model(ABC):
    """One model; `length` is d."""

    length: int
    weights: Vector | None = None
    """The memory in which the model needs w (a torch module); calls that pass this very vector save a copy."""
    torch_order: ClassVar[bool] = True
    """Whether w has the order of the parameters of the equivalent `nn.Module`, one after the other."""
    buffers: int = 0
    """How many numbers besides w every client keeps (batch norm's, with buffers="local")."""

    @abstractmethod
    def init(self, draws: np.random.Generator) -> Vector:
        """A new initial model, drawn from that stream alone."""

    @abstractmethod
    def gradient(self, w: Vector, x: Inputs, y: Labels, out: Vector) -> float:
        """The mean loss of a batch; overwrites all of `out` with its gradient at w."""

    def trusted_gradient(self, w: Vector, x: Inputs, y: Labels, out: Vector) -> float:
        """`gradient` in the inner loop of training: a model may trust its arguments to be what `gradient` demands."""
        return self.gradient(w, x, y, out)

    def descend(self, w: Vector, x: Inputs, y: Labels, rate: float, out: Vector) -> float:
        """w <- w - rate*gradient; returns the loss. `out` is scratch memory; arguments are trusted."""
        loss = self.trusted_gradient(w, x, y, out)
        kernels.descend(w, np.float32(rate), out)
        return loss

    def get_buffers(self) -> Accumulator:
        """The numbers besides w that the client keeps."""
        return np.zeros(0)

    def set_buffers(self, values: Accumulator) -> None:
        """Restores what `get_buffers` returned."""

    @abstractmethod
    def evaluate(self, w: Vector, x: Inputs, y: Labels) -> Evaluation:
        """Mean loss and accuracy over any number of examples."""


def features(dataset: DatasetLike) -> int:
    """How many numbers one example has."""
    return math.prod(dataset.train_x.shape[1:])


def chunks(x: Inputs, y: Labels, size: int) -> Iterator[tuple[Inputs, Labels]]:
    """The examples, at most `size` at a time."""
    return ((x[i : i + size], y[i : i + size]) for i in range(0, len(x), size))


# --- checks --------------------------------------------------------------------------------------------------------


def check_vector(what: str, v: Vector, length: int) -> None:
    """Raises unless v is a flat float32 vector of that length, in one piece."""
    if not isinstance(v, np.ndarray) or v.dtype != np.float32:
        raise VectorError(f"{what} is {getattr(v, 'dtype', type(v).__name__)}; expected a float32 vector")
    if v.shape != (length,):
        raise VectorError(f"{what} has the shape {v.shape}; expected ({length},)")
    if not v.flags.c_contiguous:
        raise VectorError(f"{what} is a view with gaps; expected a vector in one piece")


def check_out(out: Vector, length: int) -> None:
    """Raises unless a gradient of that length can be written into `out`."""
    check_vector("out", out, length)
    if not out.flags.writeable:
        raise VectorError("out is read-only; expected a vector to write the gradient into")


def check_examples(x: Inputs, y: Labels, numbers: int | None, *, tokens: bool = False) -> None:
    """Raises unless x and y are the same number of examples, at least one, of that many float32 numbers each.

    With `tokens` the numbers may be integers, too.
    """
    if not isinstance(x, np.ndarray) or not (x.dtype == np.float32 or (tokens and x.dtype.kind in "iu")):
        raise VectorError(f"x is {getattr(x, 'dtype', type(x).__name__)}; expected a float32 array")
    if not isinstance(y, np.ndarray) or y.ndim < 1 or x.ndim < 1 or y.shape[0] != x.shape[0]:
        raise VectorError(f"x and y have the shapes {np.shape(x)} and {np.shape(y)}; expected one label per example")
    count = x.shape[0]
    if count == 0:
        raise CountError("the batch is empty; expected at least one example")
    if numbers is not None and x.size != count * numbers:
        raise VectorError(f"an example has {x.size // count} numbers; the model expects {numbers}")
