"""ResNet-18 for small images, with group or batch norm.

    3x3 conv, w -> norm -> ReLU -> 2 blocks of w -> 2 of 2w -> 2 of 4w -> 2 of 8w -> global mean -> dense classes

    block:  x -> 3x3 conv -> norm -> ReLU -> 3x3 conv -> norm -> + shortcut(x) -> ReLU

Where a block doubles the channels it halves the image, and its shortcut is a 1x1 conv with norm, elsewhere x itself. No
stride and no pooling in front: that is for images of 224x224. For w = 64, RGB and 10 classes it has 11,173,962 weights.

Batch norm has 9,600 running means and variances besides; `buffers` in torch_module.py says how they are treated. They
and the statistics of a batch differ from client to client. Group norm, the default, has no state and uses one image at
a time. Weights, images and activations are channels-last throughout; ReLU and the sum work in place, since no backward
pass here needs what they overwrite.

He, K., Zhang, X., Ren, S., Sun, J.: Deep Residual Learning for Image Recognition. CVPR 2016.
He, K., Zhang, X., Ren, S., Sun, J.: Delving Deep into Rectifiers. ICCV 2015. (the start of the convolutions)
Wu, Y., He, K.: Group Normalization. ECCV 2018. (32 groups)
Hsieh, K., Phanishayee, A., Mutlu, O., Gibbons, P. B.: The Non-IID Data Quagmire of Decentralized Machine Learning. ICML
2020. (group norm where clients differ)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..errors import ParameterError
from .cnn import Shape
from .torch_module import Policy, TorchModule

Norm = Callable[[int], nn.Module]
"""A norm layer for that many channels."""


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, norm: Norm) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)
        self.shortcut = nn.Sequential()
        if inputs != outputs:
            self.shortcut.extend([nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs)])

    def forward(self, x: Tensor) -> Tensor:
        """Channels first in shape, last in memory, in and out."""
        inner = self.norm1(self.conv1(x)).relu_()
        total: Tensor = self.norm2(self.conv2(inner)).add_(self.shortcut(x))
        return total.relu_()


class Resnet18(nn.Module):
    """Eight blocks, for examples that are images with the channels last."""

    def __init__(self, shape: Shape, classes: int, width: int, norm: Norm) -> None:
        super().__init__()
        self.shape = shape
        self.conv = nn.Conv2d(shape[2], width, 3, padding=1, bias=False)
        self.norm = norm(width)
        widths = [width] + [width * 2**stage for stage in range(4) for _ in range(2)]
        self.blocks = nn.Sequential(*(ResidualBlock(a, b, norm) for a, b in pairwise(widths)))
        self.dense = nn.Linear(8 * width, classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Images, flat or not, to logits."""
        x = x.reshape(-1, *self.shape).permute(0, 3, 1, 2)
        x = self.blocks(self.norm(self.conv(x)).relu_())
        logits: Tensor = self.dense(x.mean((2, 3)))
        return logits


def model(
    shape: Shape, classes: int, *, width: int, norm: str, groups: int, buffers: Policy, rate: float | None
) -> TorchModule:
    """The network as a flat-vector model, for examples of that shape."""
    if norm == "group" and width % groups:
        raise ParameterError(f"groups is {groups} with width={width}; expected a divisor of the width")
    make: Norm = nn.BatchNorm2d if norm == "batch" else lambda channels: nn.GroupNorm(groups, channels)
    return TorchModule(
        lambda: Resnet18(shape, classes, width, make).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        buffers=buffers if norm == "batch" else "refuse",
        rate=rate,
        features=math.prod(shape),
        classes=classes,
    )
