"""What a rule keeps, as arrays and JSON values, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import rng
from ..errors import StateError
from ..rows import Rows


def saved(value: Any, detached: bool) -> Any:
    """A kept attribute as arrays and JSON values; a number per client keeps the order of the clients."""
    if isinstance(value, np.ndarray):
        return value.copy() if detached else value
    if isinstance(value, np.random.Generator):
        return rng.get_state(value)
    if isinstance(value, Rows):
        return value.state_dict(detached=detached)
    if isinstance(value, dict):
        return {"ids": np.array(list(value), np.int64), "values": np.array(list(value.values()))}
    return value


def restored(empty: Any, value: Any, name: str) -> Any:
    """The attribute a saved value stands for; `empty` is what a fresh rule holds in its place."""
    if isinstance(empty, np.ndarray):
        if value.shape != empty.shape or value.dtype != empty.dtype:
            raise StateError(f"saved {name} is {value.dtype}{value.shape}; expected {empty.dtype}{empty.shape}")
        empty[:] = value
        return empty
    if isinstance(empty, np.random.Generator):
        rng.set_state(empty, value)
        return empty
    if isinstance(empty, Rows):
        empty.load_state_dict(value)
        return empty
    if isinstance(empty, dict):
        return dict(zip(value["ids"].tolist(), value["values"].tolist(), strict=True))
    return value
