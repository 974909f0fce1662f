"""The yardsticks of `aflock bench sim`: plain loops that do the same gradient steps with no federation around them.

"Bare" is PyTorch as one would write it: one persistent module, autograd, torch.optim.SGD, slices of tensors in memory,
channels first. "By hand" is softmax regression in NumPy. Batches come from random clients, as in a federation: the
caches are as cold for these loops as for it.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from .turns import Streak

Examples = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
"""One client's examples and labels."""

RATE = 0.01


class Loop(Streak):
    """Random clients, a random offset in each one's data, K batches from there on: what a federation trains on."""

    def __init__(self, clients: Sequence[Any], steps: int, batch: int) -> None:
        super().__init__()
        self._clients, self._steps, self._batch = clients, steps, batch
        self._draws = random.Random(0)

    def _work(self, prepared: int) -> None:
        batch, draw = self._batch, self._draws.randrange
        for _ in range(prepared):
            x, y = self._clients[draw(len(self._clients))]
            starts = len(x) - batch + 1
            begin = draw(starts)
            for _ in range(self._steps):
                self._step(x[begin : begin + batch], y[begin : begin + batch])
                begin = (begin + batch) % starts

    @abstractmethod
    def _step(self, x: Any, y: Any) -> None: ...


class TorchLoop(Loop):
    """A torch module and its optimiser."""

    def __init__(
        self, module: nn.Module, clients: Sequence[Examples], shape: tuple[int, ...], steps: int, batch: int
    ) -> None:
        tensors = [(torch.from_numpy(x.copy()), torch.from_numpy(y.copy())) for x, y in clients]
        super().__init__(
            [(x.long() if shape == () else x.reshape(len(x), *shape), y) for x, y in tensors], steps, batch
        )
        self._module = module
        self._optimizer = torch.optim.SGD(module.parameters(), lr=RATE)

    def _step(self, x: Tensor, y: Tensor) -> None:
        self._optimizer.zero_grad()
        loss = functional.cross_entropy(self._module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


class NumpyLoop(Loop):
    """Softmax regression in NumPy."""

    def __init__(self, clients: Sequence[Examples], classes: int, steps: int, batch: int) -> None:
        super().__init__(clients, steps, batch)
        self._w = np.zeros((classes, clients[0][0].shape[1]), np.float32)
        self._b = np.zeros(classes, np.float32)
        self._range = np.arange(batch)

    def _step(self, x: npt.NDArray[np.float32], y: npt.NDArray[np.int64]) -> None:
        z = x @ self._w.T + self._b
        p = np.exp(z - z.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        p[self._range, y] -= 1
        p /= len(x)
        self._w -= RATE * (p.T @ x)
        self._b -= RATE * p.sum(axis=0)


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
        """Logits from the output of the last step."""
        steps, _ = self.lstm(self.embedding(x))
        logits: Tensor = self.dense(steps[:, -1])
        return logits


class _BareResidual(nn.Module):
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
    blocks = [_BareResidual(a, b) for a, b in pairwise(widths)]
    head = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    return nn.Sequential(*head, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "logistic": logistic,
    "mlp": mlp,
    "cnn": cnn,
    "lstm": Lstm,
    "resnet18": resnet18,
}
