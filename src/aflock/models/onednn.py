"""Keeps strided 1x1 convolutions of few channels away from a fault of oneDNN that corrupts the heap.

oneDNN 3.12.0, which torch 2.13.0 carries, writes past its scratch memory in `jit_1x1:avx2` while it computes the
gradient of the weights. An allocator with a guard page behind every block showed which convolutions do it, of about
2,400 tried (dimensions 1 to 3, kernels 1 to 5, strides 1 to 4, transposed, grouped, padded, dilated):

    Conv2d, kernel 1x1, a stride above 1 that divides the size of the image, no padding, no groups, fewer than 8 input
    channels (1, 2, 3, 4 and 7 were tried), weights or images channels-last,
    on CPUs with AVX2 but not AVX-512 (ONEDNN_MAX_CPU_ISA=AVX2 or AVX2_VNNI shows it on any).

All others were sound: stride 1, larger kernels, 8 or more input channels, the forward pass on its own; and 144 of them,
9 faulty ones included, with each of SSE41, AVX and AVX-512. `UnitStride` rewrites a little more than the faulty ones:
convolutions of any dimension with a kernel of one pixel, a stride s above 1 and no padding, unless both numbers of
channels are multiples of 8. It gives the convolution every s-th pixel and the stride 1, which is the same sum:

    y[o, i, j] = b[o] + sum_c W[o, c] x[c, s*i, s*j]

The decision depends on the convolution alone, not on the CPU or on the process, so that runs, workers and network
clients agree to the bit. torch.backends.mkldnn.enabled would avoid the fault too, but it holds for all threads of a
process (clients train in a thread, servers evaluate in one) and for all layers of a network: a gradient of ResNet-18
with 4 (12) channels and 32 images took 10.0 (21.3) ms as torch has it, 10.5 (22.3) ms in `UnitStride` and 14.8 (54.4)
ms without oneDNN, on one core with AVX-512. Convolutions inside TorchScript do not call `__torch_function__` and
are not rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

Numbers = int | Iterable[int]
"""One number for every dimension of an image, or one for each."""

LANES = 8
"""float32 numbers in a register of AVX2."""

CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}


class UnitStride(TorchFunctionMode):
    """Inside, the calling thread computes strided 1x1 convolutions of few channels with the stride 1."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """torch calls this instead of each of its functions, with the function and its arguments."""
        given = kwargs or {}
        return _convolve(func, *args, **given) if func in CONVOLUTIONS else func(*args, **given)


def has_narrow(module: nn.Module) -> bool:
    """Whether the module may hold a weight that `UnitStride` is for.

    Modules without one are not wrapped: the mode costs time at every call of torch. A lazy tensor has no shape yet, so
    it counts. Buffers count, too: a module may keep a frozen weight as one.
    """
    return any(is_lazy(tensor) or _narrow(tensor) for tensor in chain(module.parameters(), module.buffers()))


def _narrow(weight: Tensor) -> bool:
    """Whether this is the weight of a 1x1 convolution whose numbers of channels are not both multiples of 8."""
    return weight.ndim > 2 and max(weight.shape[2:]) == 1 and any(n % LANES for n in weight.shape[:2])


def _convolve(
    convolve: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers | str = 0,
    dilation: Numbers = 1,
    groups: int = 1,
) -> Tensor:
    """The convolution, with the names and defaults of torch's arguments: a caller may pass any of them by name."""
    steps = _each(stride, weight.ndim - 2)
    # The last condition leaves a stride of a wrong length to torch, whose error message names it.
    if _narrow(weight) and _unpadded(padding) and max(steps) > 1 and len(steps) == weight.ndim - 2:
        every: tuple[Any, ...] = (..., *(slice(None, None, step) for step in steps))
        input, stride = input[every], 1
    return convolve(input, weight, bias, stride, padding, dilation, groups)


def _unpadded(padding: Numbers | str) -> bool:
    return padding == "valid" if isinstance(padding, str) else not any(_each(padding, 1))


def _each(numbers: Numbers, dimensions: int) -> list[int]:
    """One number per dimension: torch takes one for all, a sequence of one, or a sequence with one for each."""
    each = [numbers] if isinstance(numbers, int) else list(numbers)
    return each * dimensions if len(each) == 1 else each
