"""Flat-vector models, by name.

    model = create("mlp", dataset, hidden=[64, 32])
    w = model.init(rng.stream(seed, "init"))
    loss = model.gradient(w, x, y, out)

`names()` lists them, `entries()` says what each is; `register` adds one's own. torch is imported when a model that
needs it is created, not before; any nn.Module becomes a model through `aflock.models.torch_module.TorchModule`.
"""

from __future__ import annotations

from ..params import Params
from . import logistic, mlp, quadratic, torch_models  # noqa: F401  (importing a model registers it)
from .base import DatasetLike, Evaluation, Model
from .registry import ModelEntry, create, entries, get, names, register

__all__ = [
    "DatasetLike",
    "Evaluation",
    "Model",
    "ModelEntry",
    "Params",
    "create",
    "entries",
    "get",
    "names",
    "register",
]
