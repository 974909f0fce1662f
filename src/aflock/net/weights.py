"""Weights in files: what a federation begins with, and what it gives back."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from .. import kernels, memory
from ..config import ConfigError
from ..errors import DoesNotFit
from ..files import write_whole
from ..memory import human
from ..types import Vector

_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def initial(length: int | None, file: str | None) -> Vector:
    """The weights of `[model] name = "vector"`: zeros, or what is in the file."""
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
    """The one tensor of a safetensors file; of several, nobody could tell in which order the clients have them."""
    return read(file)[0]


def read(file: Path) -> tuple[Vector, dict[str, str]]:
    """The one tensor of a safetensors file, and what the file says about it."""
    try:
        raw = file.read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        header: dict[str, Any] = json.loads(raw[8 : 8 + size])
        about = header.pop("__metadata__", {})
        parts = [_tensor(raw, 8 + size, name, entry) for name, entry in header.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"[model] file {file} cannot be read as safetensors: {error}") from None
    if len(parts) != 1:
        raise ConfigError(f"[model] file {file} holds {len(parts)} tensors; expected one with all weights")
    weights: Vector = parts[0].astype(np.float32)
    return weights, about


def _tensor(raw: bytes, start: int, name: str, entry: dict[str, Any]) -> Any:
    if entry["dtype"] not in _FLOATS:
        raise ValueError(f"the tensor {name} is {entry['dtype']}, expected {', '.join(_FLOATS)}")
    begin, end = entry["data_offsets"]
    return np.frombuffer(raw[start + begin : start + end], _FLOATS[entry["dtype"]])


def save(file: Path, vector: Vector, **about: Any) -> None:
    """A model as safetensors: one tensor `weights`, and what is known about it as metadata."""
    entry = {"dtype": "F32", "shape": [int(vector.size)], "data_offsets": [0, int(vector.nbytes)]}
    header = json.dumps({"__metadata__": {key: str(value) for key, value in about.items()}, "weights": entry}).encode()
    header += b" " * (-len(header) % 8)
    write_whole(file, struct.pack("<Q", len(header)) + header, np.ascontiguousarray(vector, "<f4").view(np.uint8).data)
