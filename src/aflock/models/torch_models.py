"""Registers the torch networks by name; torch is imported only when one of them is created."""

from __future__ import annotations

import importlib
import importlib.util
import math
from dataclasses import dataclass
from types import ModuleType

from ..errors import InputError
from ..params import Params, choice, path, positive, whole
from .base import DatasetLike, Model
from .registry import register


@dataclass(frozen=True)
class CnnParams(Params):
    """cnn has no hyper-parameters."""


@register("cnn", description="the CNN of McMahan et al. (AISTATS 2017), for images; needs torch", params=CnnParams)
def cnn(dataset: DatasetLike, p: CnnParams) -> Model:
    """For the images and classes of a dataset."""
    model: Model = _with_torch("cnn").model(dataset.train_x.shape[1:], dataset.classes)
    return model


@dataclass(frozen=True)
class Conv3Params(Params):
    """Hyper-parameters of conv3."""

    width: int = whole(32, "channels of the first convolution")
    norm: str = choice("none", ("none", "group"), "what the convolutions are followed by")
    groups: int = whole(4, "groups of the group norm")


@register("conv3", description="the CNN of Yan et al. (ICML 2025), for small images; needs torch", params=Conv3Params)
def conv3(dataset: DatasetLike, p: Conv3Params) -> Model:
    """For the images and classes of a dataset."""
    shape = _image(dataset, "conv3", least=8)  # three poolings leave one pixel of 8x8
    model: Model = _with_torch("conv3").model(shape, dataset.classes, width=p.width, norm=p.norm, groups=p.groups)
    return model


@dataclass(frozen=True)
class AflCnnParams(Params):
    """afl-cnn has no hyper-parameters."""


@register("afl-cnn", description="the CNN of Yang et al. (ICML 2022), for images; needs torch", params=AflCnnParams)
def afl_cnn(dataset: DatasetLike, p: AflCnnParams) -> Model:
    """For the images and classes of a dataset."""
    shape = _image(dataset, "afl-cnn", least=16)  # without padding, 16 leaves one pixel
    model: Model = _with_torch("afl-cnn", "afl_cnn").model(shape, dataset.classes)
    return model


@dataclass(frozen=True)
class Resnet18Params(Params):
    """Hyper-parameters of resnet18."""

    norm: str = choice("group", ("group", "batch"), "what the convolutions are followed by")
    groups: int = whole(32, "groups of the group norm")
    buffers: str = choice("average", ("average", "local"), "whether batch norm's running statistics travel")
    rate: float | None = positive(None, "the local rule's eta_l, for batch norm with buffers='average'")
    width: int = whole(64, "channels of the first two blocks")


@register("resnet18", description="ResNet-18, for small images; needs torch", params=Resnet18Params)
def resnet18(dataset: DatasetLike, p: Resnet18Params) -> Model:
    """For the images and classes of a dataset."""
    shape = _image(dataset, "resnet18", least=16)  # 2x2 pixels at the end: batch norm averages them, even of one image
    model: Model = _with_torch("resnet18", "resnet").model(
        shape, dataset.classes, width=p.width, norm=p.norm, groups=p.groups, buffers=p.buffers, rate=p.rate
    )
    return model


@dataclass(frozen=True)
class LstmParams(Params):
    """Hyper-parameters of lstm."""

    embedding: int = whole(8, "numbers a token becomes")
    units: int = whole(100, "width of each LSTM layer")
    layers: int = whole(2, "number of LSTM layers")


@register("lstm", description="the LSTM of LEAF, for the next character of a text; needs torch", params=LstmParams)
def lstm(dataset: DatasetLike, p: LstmParams) -> Model:
    """For rows of tokens: as many kinds as classes, or as many as the dataset's `vocabulary` if it has one."""
    shape = dataset.train_x.shape[1:]
    if len(shape) != 1:
        raise InputError(f"an example has the shape {shape}; lstm expects a row of tokens")
    vocabulary: int = getattr(dataset, "vocabulary", None) or dataset.classes
    model: Model = _with_torch("lstm").text(shape[0], vocabulary, dataset.classes, p.embedding, p.units, p.layers)
    return model


@dataclass(frozen=True)
class WindLstmParams(Params):
    """Hyper-parameters of wind-lstm."""

    units: int = whole(32, "width of each LSTM layer")
    layers: int = whole(3, "number of LSTM layers")


@register(
    "wind-lstm",
    description="the LSTM of Forootani and Iervolino (2024), for one number after a series; needs torch",
    params=WindLstmParams,
)
def wind_lstm(dataset: DatasetLike, p: WindLstmParams) -> Model:
    """For series (steps, numbers per step); a flat example is one step."""
    shape = dataset.train_x.shape[1:]
    if len(shape) not in (1, 2):
        raise InputError(f"an example has the shape {shape}; wind-lstm expects (steps, numbers per step)")
    model: Model = _with_torch("wind-lstm", "lstm").wind((1, *shape)[-2:], p.units, p.layers)
    return model


@dataclass(frozen=True)
class TransformerParams(Params):
    """Hyper-parameters of transformer."""

    checkpoint: str = path("distilbert-base-uncased", "folder, package or hub name of a pretrained encoder")
    layers: int | None = whole(None, "encoder layers that are kept; None: all")


@register(
    "transformer",
    description="a pretrained transformer with a new head, for rows of tokens; needs torch and transformers",
    params=TransformerParams,
)
def transformer(dataset: DatasetLike, p: TransformerParams) -> Model:
    """For rows of the checkpoint's tokens."""
    shape = dataset.train_x.shape[1:]
    if len(shape) != 1:
        raise InputError(f"an example has the shape {shape}; transformer expects a row of tokens")
    if importlib.util.find_spec("transformers") is None:
        raise InputError("the model transformer needs transformers: pip install 'aflock[text]'")
    model: Model = _with_torch("transformer").model(p.checkpoint, dataset.classes, shape[0], p.layers)
    return model


def _image(dataset: DatasetLike, name: str, *, least: int) -> tuple[int, int, int]:
    """Height, width and channels of examples that are (H, W, C), (H, W), or the H*W*C numbers of a square image."""
    given = shape = dataset.train_x.shape[1:]
    if len(given) == 1:
        sides = ((math.isqrt(given[0] // channels), channels) for channels in (1, 3))
        shape = next(((side, side, c) for side, c in sides if side * side * c == given[0]), given)
    if len(shape) not in (2, 3) or min(shape[:2]) < least:
        raise InputError(
            f"an example has the shape {given}; {name} expects images of at least {least}x{least}, channels last"
        )
    return shape[0], shape[1], shape[2] if len(shape) == 3 else 1


def _with_torch(name: str, file: str | None = None) -> ModuleType:
    """The sibling module that has the model of that name; it imports torch."""
    try:
        return importlib.import_module(f"{__package__}.{file or name}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InputError(f"the model {name} needs torch, which is not installed: pip install 'aflock[torch]'") from None
