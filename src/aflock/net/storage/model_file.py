"""Models as safetensors files: the one a federation begins with, and those that the server writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ... import kernels
from ...config import ConfigError
from ...errors import DoesNotFit
from ...system import memory, safetensors_codec
from ...system.safetensors_codec import Damaged
from ...system.words import human
from ...types import Vector

_FLOATS = ("F64", "F32", "F16")


def initial(length: int | None, file: str | None) -> Vector:
    """The weights w^0 of `[model] name = "vector"`: `length` zeros, or those in `file`."""
    if (length is None) == (file is None):
        raise ConfigError("[model] vector needs either a length or a file")
    if file is not None:
        return flat(Path(file))
    need, free = 4 * int(length or 0), memory.available()
    if need > free:
        raise DoesNotFit(
            f"{length} weights need {human(need)}, but memory has {human(free)} free; make [model] length smaller"
        )
    return kernels.zeros(int(length or 0), np.float32)


def flat(file: Path) -> Vector:
    """The one tensor of a safetensors file, as a flat vector.

    A file with several tensors is refused: it does not say in which order the clients join them.
    """
    return read(file)[0]


def read(file: Path) -> tuple[Vector, dict[str, str]]:
    """The one tensor of a safetensors file, as a flat vector, and the metadata of the file."""
    try:
        found = safetensors_codec.read(file)
    except (OSError, Damaged) as error:
        raise ConfigError(f"[model] file {file} cannot be read as safetensors: {error}") from None
    if len(found.arrays) != 1:
        raise ConfigError(f"[model] file {file} holds {len(found.arrays)} tensors; expected one with all weights")
    ((name, array),) = found.arrays.items()
    if safetensors_codec.kind(array) not in _FLOATS:
        raise ConfigError(f"[model] file {file}: the tensor {name} is {array.dtype}, expected {', '.join(_FLOATS)}")
    weights: Vector = array.reshape(-1).astype(np.float32)
    return weights, found.metadata


def save(file: Path, vector: Vector, **about: Any) -> None:
    """Writes a model as safetensors: one tensor `weights`, and `about` as metadata."""
    write(file, vector, {key: str(value) for key, value in about.items()})


def write(file: Path, vector: Vector, metadata: Mapping[str, str], *, mode: int = 0o666) -> None:
    """As `save`, with metadata that are strings already, and with the mode of the file."""
    safetensors_codec.write(file, {"weights": np.asarray(vector, np.float32).reshape(-1)}, metadata, mode=mode)
