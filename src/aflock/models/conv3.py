"""A convolutional network for Fashion-MNIST with three convolutions and two dense layers, arranged for speed on a CPU.

    3x3 conv, 32  -> 2x2 max pool -> ReLU ->
    3x3 conv, 64  -> 2x2 max pool -> ReLU ->
    3x3 conv, 128 -> 2x2 max pool -> ReLU -> dense 128 -> ReLU -> dense classes

For 28x28 images and 10 classes it has 241,546 weights. Section E.1 of the paper gives the numbers of layers and nothing
else: kernels, channels, pooling and the width of the dense layer are our choice. Pooling before ReLU and channels-last
as in cnn.py; ReLU works in place, since no backward pass here needs what it overwrites.

Yan, W., Zhong, X., Wang, X., Zhang, Y.-J. A.: Momentum-Driven Adaptivity: Towards Tuning-Free Asynchronous Federated
Learning. ICML 2025.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .cnn import Shape
from .torch_module import TorchModule


class Conv3(nn.Module):
    """Three convolutions and two dense layers, for examples that are images with the channels last."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        height, width, channels = self.shape = shape
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 128, 3, padding=1)
        self.dense1 = nn.Linear((height // 8) * (width // 8) * 128, 128)
        self.dense2 = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images, flat or not, to logits."""
        x = x.reshape(-1, *self.shape).permute(0, 3, 1, 2)
        for conv in (self.conv1, self.conv2, self.conv3):
            x = functional.max_pool2d(conv(x), 2).relu_()
        x = self.dense1(x.permute(0, 2, 3, 1).flatten(1)).relu_()
        logits: Tensor = self.dense2(x)
        return logits


def model(shape: Shape, classes: int) -> TorchModule:
    """The network as a flat-vector model, for examples of that shape."""
    return TorchModule(
        lambda: Conv3(shape, classes).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        features=math.prod(shape),
        classes=classes,
    )
