"""The convolutional network of the FedAvg paper, arranged for speed on a CPU.

    5x5 conv, 32 -> 2x2 max pool -> ReLU -> 5x5 conv, 64 -> 2x2 max pool -> ReLU -> dense 512 -> ReLU -> dense classes

For 28x28 images and 10 classes it has 1,663,370 weights. Pooling before ReLU gives the same numbers as after it, for a
quarter of the work; images, activations and the flattening are channels-last throughout, so nothing is reordered.

McMahan, H. B., Moore, E., Ramage, D., Hampson, S., Agüera y Arcas, B.: Communication-Efficient Learning of Deep
Networks from Decentralized Data. AISTATS 2017.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import InputError
from .torch_module import TorchModule

Shape = tuple[int, int, int]
"""Height, width, channels."""


class Cnn(nn.Module):
    """Two convolutions and two dense layers, for examples that are images with the channels last."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        height, width, channels = self.shape = shape
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.dense1 = nn.Linear((height // 4) * (width // 4) * 64, 512)
        self.dense2 = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images, flat or not, to logits."""
        x = x.reshape(-1, *self.shape).permute(0, 3, 1, 2)
        x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
        x = functional.relu(functional.max_pool2d(self.conv2(x), 2))
        x = functional.relu(self.dense1(x.permute(0, 2, 3, 1).flatten(1)))
        logits: Tensor = self.dense2(x)
        return logits


def image(shape: tuple[int, ...]) -> Shape:
    """Height, width and channels of examples given as (height, width, channels), (height, width) or a flat square."""
    if len(shape) == 1:
        shape = (math.isqrt(shape[0]), math.isqrt(shape[0])) if math.isqrt(shape[0]) ** 2 == shape[0] else shape
    if len(shape) not in (2, 3) or min(shape[:2]) < 4:
        raise InputError(f"an example has the shape {shape}; cnn expects images of at least 4x4, channels last")
    return shape[0], shape[1], shape[2] if len(shape) == 3 else 1


def model(shape: tuple[int, ...], classes: int) -> TorchModule:
    """The network as a flat-vector model, for examples of that shape."""
    size = image(shape)
    return TorchModule(
        lambda: Cnn(size, classes).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        features=math.prod(size),
        classes=classes,
    )
