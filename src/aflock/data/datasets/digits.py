"""The handwritten digits that scikit-learn ships: 1,797 images of 8x8 grey values.

E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998 (its test
part). The only real data that needs neither a download nor a disk.
"""

from __future__ import annotations

import gzip
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ... import rng
from ...params import Params, unit
from ..base import Dataset
from ..checks import imported
from ..registry import register
from ..splits.holdout import stratified

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
    table = _table()
    x, y = (table[:, :-1] / WHITE).astype(np.float32), table[:, -1].astype(np.int64)
    train, test = stratified(y, params.test_fraction, rng.stream(seed, "data", "digits"))
    return Dataset("digits", x[train], y[train], x[test], y[test], classes=10)


def _table() -> npt.NDArray[np.float64]:
    """One line per digit: 64 pixels and what it is; from scikit-learn's file, whose import would take two seconds."""
    found = importlib.util.find_spec("sklearn")
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            with gzip.open(file, "rt", encoding="ascii") as lines:
                return np.loadtxt(lines, delimiter=",")
    raw = imported("sklearn.datasets", "the digits come with scikit-learn", "scikit-learn").load_digits()
    return np.column_stack([raw.data, raw.target])
