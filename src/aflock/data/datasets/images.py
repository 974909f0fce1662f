"""Images as they are stored and as a model gets them.

Stored are the bytes, 0 to 255, with the sums that give the mean m and the standard deviation s of each channel over
all pixels of the training set. A model gets

    (x/255 - m) / s        or, with standardise=False,        x/255

in float32. The sums are integers, so m and s are the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ...params import Params, switch
from ...types import State
from ..base import Dataset, FeatureScale

Pixels = npt.NDArray[np.uint8]
"""(images, height, width) or (images, height, width, channels)."""

WHITE = 255


@dataclass(frozen=True)
class ImageParams(Params):
    """Parameters of every image dataset."""

    standardise: bool = switch(True, "whether each channel has mean 0 and standard deviation 1 over the training set")


def content(train_x: Pixels, train_y: Pixels, test_x: Pixels, test_y: Pixels) -> State:
    """What is stored of images and their labels."""
    for part, x, y in (("training", train_x, train_y), ("test", test_x, test_y)):
        if len(x) != len(y):
            raise InputError(f"there are {len(x)} {part} images and {len(y)} labels; expected as many")
    sums, squares = channel_sums(train_x)
    labels = {"train_y": train_y.astype(np.int64), "test_y": test_y.astype(np.int64)}
    return {"train_x": train_x, "test_x": test_x, **labels, "sums": sums, "squares": squares}


def channel_sums(x: Pixels) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The sums of all pixels and of their squares, per channel."""
    channels = x.reshape(-1, x.shape[3] if x.ndim == 4 else 1)
    values = np.arange(WHITE + 1)
    counts = np.stack([np.bincount(channel, minlength=WHITE + 1) for channel in channels.T])
    return counts @ values, counts @ values**2


def dataset(name: str, kept: State, classes: int, standardise: bool) -> Dataset:
    """The problem made of what was kept."""
    parts = (kept["train_x"], kept["train_y"], kept["test_x"], kept["test_y"])
    return Dataset(name, *parts, classes=classes, scale=_standard(kept) if standardise else _plain())


def _plain() -> FeatureScale:
    return FeatureScale(np.zeros(1, np.float32), np.array([1 / WHITE], np.float32))


def _standard(kept: State) -> FeatureScale:
    count = kept["train_x"].size // len(kept["sums"])
    mean = kept["sums"] / count
    deviation = np.sqrt(kept["squares"] / count - mean**2)
    return FeatureScale(mean.astype(np.float32), (1 / np.where(deviation > 0, deviation, 1)).astype(np.float32))
