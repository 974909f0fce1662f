"""As much of a dataset as a model looks at when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt


@dataclass(frozen=True)
class Data:
    """Examples, of which only the shape matters, and the number of classes."""

    train_x: npt.NDArray[Any]
    classes: int
