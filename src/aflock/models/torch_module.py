"""Any torch nn.Module as a flat-vector model.

    TorchModule(lambda: Net(10))      a function that builds the module: `init` builds it anew from the given stream
    TorchModule(net)                  a module as it is (pretrained, say): `init` returns the weights it came with

The trainable parameters are views of one flat vector, `weights`, whose memory NumPy and torch share: a model is loaded
by one copy into it, and gradients are written straight into views of `out`. Each parameter keeps the memory format it
came with (channels-last, say); for contiguous ones the flat order is torch's `parameters_to_vector`. Frozen parameters
(requires_grad=False) are constants of the module: not in the vector, not drawn. torch's global random state is never
changed; dropout draws from a hash of (w, x, y), so that a gradient depends on its arguments alone, in every process.

Buffers that belong to the module's saved state, such as the running mean and variance of batch norm, are no weights:
the forward pass changes them, no gradient does. `buffers` says how they are treated.

    refuse     (default) a module that has any is an error
    local      they stay with the client: `set_buffers` before its job, `get_buffers` after. Nothing of them is sent;
               `evaluate` uses those that are set
    average    the float buffers b are the tail of the flat vector, w = (parameters, b), and travel with it. With b' the
               buffers after the forward pass, their entry of the gradient is

                   g_b = (b - b')/rate        so that        x_{k+1} = x_k - rate*g   carries b'.

               `rate` is the local rule's eta_l. A server that averages models or deltas averages the buffers; one that
               follows gradients with its step lr moves them by lr/rate of the way, so lr = eta_l is one moving average
               over all clients. A local rule whose step is not rate*g (momentum, Adam) would not carry b', and
               `training.check_rate` refuses it.

Buffers that are not float (batch norm's count of batches) cannot be averaged and stay local under both. Buffers outside
the saved state (persistent=False: masks, position tables) are constants.

Strided 1x1 convolutions of few channels are computed with the stride 1: onednn.py says which, and why.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from .. import kernels
from ..errors import InputError, ParameterError, VectorError
from ..types import Accumulator, Vector
from .base import Evaluation, Inputs, Labels, Model, check_examples, check_out, check_vector, chunks
from .onednn import UnitStride, has_narrow

Build = Callable[[], nn.Module]
Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> mean loss, one number."""

Policy = Literal["refuse", "local", "average"]

CHUNK = 512
"""Examples that are evaluated at a time."""


@dataclass(frozen=True)
class _Segment:
    """The part of the flat vector that one tensor is a view of."""

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.stride, self.start)


class _Buffer:
    """One buffer of a module, by name: some modules change its tensor in place, some assign another tensor."""

    def __init__(self, module: nn.Module, name: str) -> None:
        path, _, self._attribute = name.rpartition(".")
        self._owner, self.name = module.get_submodule(path), name
        self._own = self.tensor

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = getattr(self._owner, self._attribute)
        return tensor

    def reclaim(self) -> None:
        """Copies the present value into the original tensor, a view of `weights`, and assigns that again."""
        if self.tensor is not self._own:
            self._own.copy_(self.tensor.detach())
            setattr(self._owner, self._attribute, self._own)


class TorchModule(Model):
    """A module, a loss function and a policy for buffers."""

    def __init__(
        self,
        module: nn.Module | Build,
        *,
        loss: Loss = functional.cross_entropy,
        buffers: Policy = "refuse",
        rate: float | None = None,
        features: int | None = None,
        classes: int | None = None,
    ) -> None:
        _check_policy(buffers, rate)
        self._build = None if isinstance(module, nn.Module) else module
        self.module = module if isinstance(module, nn.Module) else _built(module, 0)
        self.loss, self.rate, self.features, self.classes = loss, rate, features, classes
        self._policy = buffers
        self._averaged, self._kept = _sorted_buffers(self.module, buffers)
        trained = dict(_trainable(self.module))
        averaged = {buffer.name: buffer.tensor for buffer in self._averaged}
        _check_tensors(trained, averaged)
        self._parameters = list(trained.values())
        self._trained = sum(p.numel() for p in self._parameters)
        self._move_in([*self._parameters, *averaged.values()])
        self.buffers = sum(buffer.tensor.numel() for buffer in self._kept)
        self._convolutions: AbstractContextManager[object] = UnitStride() if has_narrow(self.module) else nullcontext()

    def _move_in(self, tensors: list[Tensor]) -> None:
        """Makes the tensors views of `weights`, at the values they have."""
        self._segments = list(_laid_out(tensors))
        self.length = sum(tensor.numel() for tensor in tensors)
        self.weights: Vector = kernels.zeros(self.length, np.float32)
        self._fill(self.weights, tensors)
        self._start = self.weights.copy()
        for tensor, view in zip(tensors, self._views(self.weights), strict=True):
            tensor.data = view
        self._before, self._after = self._start[self._trained :].copy(), self._start[self._trained :].copy()
        self._out: Vector | None = None
        self._gradients: list[Tensor] = []

    def init(self, draws: np.random.Generator) -> Vector:
        """The weights of a module built from that stream; those the module came with if it was given as it is."""
        if self._build is None:
            return self._start.copy()
        fresh = _built(self._build, int(draws.integers(2**63)))
        w: Vector = kernels.zeros(self.length, np.float32)
        buffers, _ = _sorted_buffers(fresh, self._policy)
        self._fill(w, [*(p for _, p in _trainable(fresh)), *(buffer.tensor for buffer in buffers)])
        return w

    def gradient(self, w: Vector, x: Inputs, y: Labels, out: Vector) -> float:
        """The mean loss in training mode; out <- its gradient, and (b - b')/rate for averaged buffers."""
        check_out(out, self.length)
        if out is self.weights or out is w:
            raise VectorError("out is w itself; expected a vector of its own for the gradient")
        loss, gradients = self._autograd(w, x, y)
        self._write(gradients, out)
        return loss

    def descend(self, w: Vector, x: Inputs, y: Labels, rate: float, out: Vector) -> float:
        """w <- w - rate*gradient; in place, without a flat gradient, where w is `weights`."""
        if w is not self.weights or self._averaged:
            return super().descend(w, x, y, rate, out)
        loss, gradients = self._autograd(w, x, y)
        moved = [(p, g) for p, g in zip(self._parameters, gradients, strict=True) if g is not None]
        with torch.no_grad():
            torch._foreach_add_([p for p, _ in moved], [g for _, g in moved], alpha=-rate)
        return loss

    def _autograd(self, w: Vector, x: Inputs, y: Labels) -> tuple[float, Sequence[Tensor | None]]:
        """The loss and the gradient of every parameter."""
        self._load(w, x, y)
        self.module.train()
        with _seeded(_seed_of(w, x, y)), self._buffers_put_back(), self._convolutions:
            loss = self._loss(self.module(_tensor(x)), y)
            gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        return float(loss.detach()), gradients

    def _write(self, gradients: Sequence[Tensor | None], out: Vector) -> None:
        if out is not self._out:  # the views are kept: a trainer passes the same vector at every step
            self._out, self._gradients = out, self._views(out)
        for view, gradient in zip(self._gradients, gradients, strict=False):
            view.zero_() if gradient is None else view.copy_(gradient)
        if self.rate is not None:
            out[self._trained :] = (self._before - self._after) / np.float32(self.rate)

    def evaluate(self, w: Vector, x: Inputs, y: Labels) -> Evaluation:
        """Mean loss in evaluation mode; accuracy over all labels if y are classes (on axis 1), else NaN."""
        self._load(w, x, y)
        self.module.eval()
        loss, hits = 0.0, 0.0
        with _seeded(0), torch.no_grad(), self._convolutions:
            for some_x, some_y in chunks(x, y, CHUNK):
                outputs = self.module(_tensor(some_x))
                loss += float(self._loss(outputs, some_y)) * len(some_x)
                hits += _hits(outputs, some_y)
        return Evaluation(loss / len(x), hits / y.size)

    # --- buffers

    def get_buffers(self) -> Accumulator:
        """The buffers that stay with the client, as one vector; float64 holds both float32 and counts exactly."""
        parts = [buffer.tensor.detach().numpy().ravel() for buffer in self._kept]
        return np.concatenate([np.zeros(0), *parts])

    def set_buffers(self, values: Accumulator) -> None:
        """Restores what `get_buffers` returned."""
        sizes = [buffer.tensor.numel() for buffer in self._kept]
        if np.shape(values) != (sum(sizes),):
            raise VectorError(f"the buffers have the shape {np.shape(values)}; expected ({sum(sizes)},)")
        start = 0
        for buffer, size in zip(self._kept, sizes, strict=True):
            part = torch.tensor(values[start : start + size]).reshape(buffer.tensor.shape)
            buffer.tensor.detach().copy_(part)
            start += size

    @contextmanager
    def _buffers_put_back(self) -> Iterator[None]:
        """Inside, the forward pass changes the averaged buffers from b to b'; afterwards the module has b again."""
        now = self.weights[self._trained :]
        self._before[:] = now
        try:
            yield
        finally:
            for buffer in self._averaged:
                buffer.reclaim()
            self._after[:] = now
            now[:] = self._before

    # --- the flat vector

    def _load(self, w: Vector, x: Inputs, y: Labels) -> None:
        check_vector("w", w, self.length)
        check_examples(x, y, self.features, tokens=True)
        self._check_labels(y)
        if w is not self.weights:
            np.copyto(self.weights, w)

    def _views(self, v: Vector) -> list[Tensor]:
        flat = torch.from_numpy(v)
        return [segment.of(flat) for segment in self._segments]

    def _fill(self, v: Vector, tensors: list[Tensor]) -> None:
        for view, tensor in zip(self._views(v), tensors, strict=True):
            view.copy_(tensor.detach())

    def _loss(self, outputs: Tensor, y: Labels) -> Tensor:
        if self.classes is None and self.loss is functional.cross_entropy:
            self.classes = outputs.shape[1]
            self._check_labels(y)
        loss = self.loss(outputs, _tensor(y))
        if loss.numel() != 1:
            raise InputError(f"the loss function gave {loss.numel()} numbers; expected one, the mean over the batch")
        return loss

    def _check_labels(self, y: Labels) -> None:
        """Raises unless y are classes, as far as that is known: a loss function of one's own may take anything."""
        if self.loss is not functional.cross_entropy:
            return
        if y.dtype.kind not in "iu":
            raise VectorError(f"y is {y.dtype}; expected integers for the cross entropy")
        low, high = int(y.min()), int(y.max())
        if low < 0 or (self.classes is not None and high >= self.classes):
            top = "" if self.classes is None else f" to {self.classes - 1}"
            raise InputError(f"a label is {low if low < 0 else high}; expected integers from 0{top}")


# --- randomness ----------------------------------------------------------------------------------------------------


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Inside, torch draws from that seed; afterwards its global generator has the state it had before."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def _seed_of(w: Vector, x: Inputs, y: Labels) -> int:
    """A hash of about 256 weights, the first example and the labels; a hash of everything would take too long."""
    digest = hashlib.blake2b(w[:: 1 + w.size // 256].tobytes(), digest_size=8)
    digest.update(x[0].tobytes())
    digest.update(y.tobytes())
    return int.from_bytes(digest.digest(), "little")


def _built(build: Build, seed: int) -> nn.Module:
    with _seeded(seed):
        return build()


# --- tensors -------------------------------------------------------------------------------------------------------


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    """A tensor on the array's own memory, or on a copy if that is read-only or not contiguous; integers as int64."""
    if array.dtype.kind in "iu":
        array = array.astype(np.int64, copy=False)
    return torch.from_numpy(array if array.flags.c_contiguous and array.flags.writeable else array.copy())


def _hits(outputs: Tensor, y: Labels) -> float:
    if y.dtype.kind not in "iu" or outputs.ndim != y.ndim + 1:
        return math.nan
    return float((outputs.argmax(1) == _tensor(y)).sum())


def _trainable(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, p) for name, p in module.named_parameters() if p.requires_grad)


def _laid_out(tensors: Iterable[Tensor]) -> Iterator[_Segment]:
    start = 0
    for tensor in tensors:
        # empty_like drops gaps and overlaps (an expanded tensor), but keeps the memory format
        yield _Segment(start, tuple(tensor.shape), torch.empty_like(tensor).stride())
        start += tensor.numel()


def _sorted_buffers(module: nn.Module, policy: Policy) -> tuple[list[_Buffer], list[_Buffer]]:
    """The buffers that are averaged, and those that stay with the client."""
    saved = module.state_dict(keep_vars=True)
    found = [_Buffer(module, name) for name, _ in module.named_buffers() if name in saved]
    if policy == "refuse" and found:
        some = ", ".join(buffer.name for buffer in found[:3]) + (", ..." if len(found) > 3 else "")
        raise InputError(f"the module has buffers ({some}); say buffers='local' or 'average' to have them handled")
    averaged = [buffer for buffer in found if policy == "average" and buffer.tensor.is_floating_point()]
    return averaged, [buffer for buffer in found if buffer not in averaged]


# --- checks --------------------------------------------------------------------------------------------------------


def _check_policy(buffers: str, rate: float | None) -> None:
    if buffers not in get_args(Policy):
        raise ParameterError(f"buffers is {buffers!r}; expected one of {', '.join(map(repr, get_args(Policy)))}")
    if (buffers == "average") != (rate is not None):
        raise ParameterError(f"rate is {rate!r} with buffers={buffers!r}; 'average', and only it, needs eta_l as rate")
    if rate is not None and not 0 < rate < math.inf:
        raise ParameterError(f"rate is {rate!r}; expected a positive number, the local step size eta_l")


def _check_tensors(trained: dict[str, Tensor], averaged: dict[str, Tensor]) -> None:
    if not trained:
        raise InputError("the module has no parameter to train; expected at least one with requires_grad")
    for name, tensor in (trained | averaged).items():
        if is_lazy(tensor):
            raise InputError(f"{name} has no shape yet; run the module on one batch first")
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise InputError(f"{name} is {tensor.dtype} on {tensor.device}; expected torch.float32 on cpu")
