"""The convolutional network of the Anarchic Federated Learning paper (its table 1), arranged for speed on a CPU.

    5x5 conv, 32 -> 2x2 max pool -> ReLU -> 5x5 conv, 64 -> 2x2 max pool -> ReLU ->
    dense 512 -> ReLU -> dense 128 -> ReLU -> dense classes

The convolutions have no padding: the paper's first dense layer takes 1,024 numbers, which is 4x4x64 of a 28x28 image.
Of the 32x32 images of CIFAR-10 it takes 5x5x64 = 1,600; the paper does not say how it came to fewer. For those and 10
classes it has 940,362 weights. Pooling before ReLU and channels-last as in cnn.py.

Yang, H., Zhang, X., Khanduri, P., Liu, J.: Anarchic Federated Learning. ICML 2022. Table 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .cnn import Shape
from .torch_module import TorchModule


class AflCnn(nn.Module):
    """Two convolutions and three dense layers, for examples that are images with the channels last."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        height, width, channels = self.shape = shape
        left = ((height - 4) // 2 - 4) // 2 * (((width - 4) // 2 - 4) // 2)
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.dense1 = nn.Linear(left * 64, 512)
        self.dense2 = nn.Linear(512, 128)
        self.dense3 = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images, flat or not, to logits."""
        x = x.reshape(-1, *self.shape).permute(0, 3, 1, 2)
        for conv in (self.conv1, self.conv2):
            x = functional.max_pool2d(conv(x), 2).relu_()
        x = self.dense1(x.permute(0, 2, 3, 1).flatten(1)).relu_()
        logits: Tensor = self.dense3(self.dense2(x).relu_())
        return logits


def model(shape: Shape, classes: int) -> TorchModule:
    """The network as a flat-vector model, for examples of that shape."""
    return TorchModule(
        lambda: AflCnn(shape, classes).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        features=math.prod(shape),
        classes=classes,
    )
