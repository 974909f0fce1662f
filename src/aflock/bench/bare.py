"""The yardsticks of `aflock bench sim`: plain loops that do the same gradient steps with no federation around them.

"Bare" is PyTorch as one would write it: one persistent module, autograd, torch.optim.SGD, slices of tensors in memory,
channels first. "By hand" is softmax regression in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from .turns import Streak

Data = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]

RATE = 0.01


def _slices(count: int, batch: int) -> Iterator[slice]:
    """Batches one after the other, around the end, for ever."""
    while True:
        for begin in range(0, count - batch + 1, batch):
            yield slice(begin, begin + batch)


class Bare(Streak):
    """K steps of a module per update."""

    def __init__(self, module: nn.Module, data: Data, shape: tuple[int, ...], steps: int, batch: int) -> None:
        super().__init__()
        x, self._y = torch.from_numpy(data[0].copy()), torch.from_numpy(data[1].copy())
        self._x = x.long() if shape == () else x.reshape(len(x), *shape)
        self._module, self._steps = module, steps
        self._slices = _slices(len(x), batch)
        self._optimizer = torch.optim.SGD(module.parameters(), lr=RATE)

    def _work(self, prepared: int) -> None:
        for _ in range(prepared * self._steps):
            some = next(self._slices)
            self._optimizer.zero_grad()
            loss = functional.cross_entropy(self._module(self._x[some]), self._y[some])
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()


class ByHand(Streak):
    """Softmax regression in NumPy, one step per update."""

    def __init__(self, data: Data, classes: int, batch: int) -> None:
        super().__init__()
        self._x, self._y = data
        self._w = np.zeros((classes, self._x.shape[1]), np.float32)
        self._b = np.zeros(classes, np.float32)
        self._slices, self._batch = _slices(len(self._x), batch), batch
        self._range = np.arange(batch)

    def _work(self, prepared: int) -> None:
        for _ in range(prepared):
            some = next(self._slices)
            x, y = self._x[some], self._y[some]
            z = x @ self._w.T
            z += self._b
            z -= z.max(axis=1, keepdims=True)
            np.exp(z, out=z)
            z /= z.sum(axis=1, keepdims=True)
            z[self._range, y] -= 1.0
            z *= np.float32(RATE / self._batch)
            self._w -= z.T @ x
            self._b -= z.sum(axis=0)


# --- the networks ----------------------------------------------------------------------------------------------------


def logistic() -> nn.Module:
    """784-10."""
    return nn.Linear(784, 10)


def mlp() -> nn.Module:
    """784-128-10."""
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn() -> nn.Module:
    """5x5 32 and 64, two dense layers: 1,663,370 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


class Lstm(nn.Module):
    """Embedding of 8, two layers of 100, 80 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(80, 8)
        self.lstm = nn.LSTM(8, 100, 2, batch_first=True)
        self.dense = nn.Linear(100, 80)

    def forward(self, x: Tensor) -> Tensor:
        """The last step decides."""
        steps, _ = self.lstm(self.embedding(x))
        logits: Tensor = self.dense(steps[:, -1])
        return logits


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(32, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(32, outputs)
        self.around: nn.Module = nn.Identity()
        if inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.around(x))


def resnet18() -> nn.Module:
    """For 32x32 images, group norm."""
    widths = [64] + [64 * 2**stage for stage in range(4) for _ in range(2)]
    blocks = [_Block(a, b) for a, b in pairwise(widths)]
    head = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    return nn.Sequential(*head, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "logistic": logistic,
    "mlp": mlp,
    "cnn": cnn,
    "lstm": Lstm,
    "resnet18": resnet18,
}
