"""The models that are torch networks: known by name without importing torch, which `create` does."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from ..errors import InputError
from ..params import Params
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


def _with_torch(name: str) -> ModuleType:
    """The sibling module of that name; it imports torch."""
    try:
        return importlib.import_module(f"{__package__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InputError(f"the model {name} needs torch, which is not installed: pip install 'aflock[torch]'") from None
