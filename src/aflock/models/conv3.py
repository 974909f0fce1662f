"""A convolutional network for Fashion-MNIST with three convolutions and two dense layers, arranged for speed on a CPU.

    3x3 conv, w  -> 2x2 max pool -> norm -> ReLU ->
    3x3 conv, 2w -> 2x2 max pool -> norm -> ReLU ->
    3x3 conv, 4w -> 2x2 max pool -> norm -> ReLU -> dense 4w -> ReLU -> dense classes

For w = 32, no norm, 28x28 images and 10 classes it has 241,546 weights; that is the default. With w = 8 and group norm
it is a small network for CIFAR-10, of 22,890 weights; resnet.py says why group norm where clients differ. Section E.1
of the paper gives the numbers of layers and nothing else: kernels, channels, pooling and the width of the dense layer
are our choice. Pooling before ReLU and channels-last as in cnn.py; ReLU works in place, since no backward pass here
needs what it overwrites.

Yan, W., Zhong, X., Wang, X., Zhang, Y.-J. A.: Momentum-Driven Adaptivity: Towards Tuning-Free Asynchronous Federated
Learning. ICML 2025.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ParameterError
from .cnn import Shape
from .torch_module import TorchModule

Norm = Callable[[int], nn.Module]
"""A norm layer for that many channels."""


class Conv3(nn.Module):
    """Three convolutions and two dense layers, for examples that are images with the channels last."""

    def __init__(self, shape: Shape, classes: int, first: int, norm: Norm) -> None:
        super().__init__()
        height, width, channels = self.shape = shape
        self.conv1 = nn.Conv2d(channels, first, 3, padding=1)
        self.norm1 = norm(first)
        self.conv2 = nn.Conv2d(first, 2 * first, 3, padding=1)
        self.norm2 = norm(2 * first)
        self.conv3 = nn.Conv2d(2 * first, 4 * first, 3, padding=1)
        self.norm3 = norm(4 * first)
        self.dense1 = nn.Linear((height // 8) * (width // 8) * 4 * first, 4 * first)
        self.dense2 = nn.Linear(4 * first, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images, flat or not, to logits."""
        x = x.reshape(-1, *self.shape).permute(0, 3, 1, 2)
        for conv, norm in ((self.conv1, self.norm1), (self.conv2, self.norm2), (self.conv3, self.norm3)):
            x = norm(functional.max_pool2d(conv(x), 2)).relu_()
        x = self.dense1(x.permute(0, 2, 3, 1).flatten(1)).relu_()
        logits: Tensor = self.dense2(x)
        return logits


def model(shape: Shape, classes: int, *, width: int = 32, norm: str = "none", groups: int = 4) -> TorchModule:
    """The network as a flat-vector model, for examples of that shape."""
    if norm == "group" and width % groups:
        raise ParameterError(f"groups is {groups} with width={width}; expected a divisor of the width")
    make: Norm = nn.Identity if norm == "none" else lambda channels: nn.GroupNorm(groups, channels)
    return TorchModule(
        lambda: Conv3(shape, classes, width, make).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        features=math.prod(shape),
        classes=classes,
    )
