"""The handwritten digits that scikit-learn ships: 1,797 images of 8x8 grey values.

E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998 (its test
part). The only real data that needs neither a download nor a disk.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import rng
from ..errors import AflockError
from ..params import Params, unit
from .base import Dataset
from .holdout import stratified
from .registry import register

WHITE = 16  # the largest grey value


@dataclass(frozen=True)
class DigitsParams(Params):
    """Parameters of the digits."""

    test_fraction: float = unit(0.2, "share of every class that is kept for testing")


@register(
    "digits",
    source="scikit-learn's load_digits (UCI Optical Recognition of Handwritten Digits, test part)",
    description="1,797 handwritten digits of 8x8 pixels in [0, 1], 10 classes",
    params=DigitsParams,
)
def digits(params: DigitsParams, seed: int) -> Dataset:
    """The digits as vectors of 64 pixels."""
    raw = _sklearn_datasets().load_digits()
    x, y = (raw.data / WHITE).astype(np.float32), raw.target.astype(np.int64)
    train, test = stratified(y, params.test_fraction, rng.stream(seed, "data", "digits"))
    return Dataset("digits", x[train], y[train], x[test], y[test], classes=10)


def _sklearn_datasets() -> Any:
    # Imported here because it takes a second or two, which nobody else should wait for.
    try:
        return importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise AflockError(
            f"the digits come with scikit-learn, which cannot be imported ({error}); pip install scikit-learn"
        ) from error
