"""Saved state: one safetensors file, written whole or not at all, read without pickle.

A state is a nested dict whose leaves are NumPy arrays or JSON values. Arrays become tensors named by their path
("strategy/rows/rows/3"); everything else becomes one JSON document in the file's metadata, under the key "aflock".

A checksum covers the whole file (system/safetensors_codec.py). The checksum of format 1, which is still read,
covers the document and the arrays only; of the table of tensors between them the codec checks what it can.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import NewerFormat, StateError
from .system import safetensors_codec
from .system.checksum import crc32
from .system.safetensors_codec import Damaged, Tensors
from .types import State

_KINDS = ("F64", "F32", "I64", "I32", "I8", "U8")
_FORMAT, _FORMAT_WITHOUT_CHECKED_TABLE = 2, 1


def save(path: str | Path, state: State, *, mode: int = 0o666) -> None:
    """Writes a state: to a temporary file beside it first, synced, then renamed."""
    target = Path(path)
    arrays: dict[str, npt.NDArray[Any]] = {}
    document = _split(state, "", arrays)
    for name, array in arrays.items():
        if safetensors_codec.kind(array) not in _KINDS:
            raise StateError(f"the array {name} is {array.dtype}; a state holds {', '.join(_KINDS)}")
    text = json.dumps({"format": _FORMAT, "state": document})
    if not target.parent.is_dir():
        raise StateError(f"the folder {target.parent} does not exist; make it before saving there")
    safetensors_codec.write(target, arrays, {"aflock": text}, mode=mode)


def load(path: str | Path, *, mapped: bool = False) -> State:
    """Reads a state; its arrays are read-only. `mapped`: all processes that read the file share one copy in memory."""
    source = Path(path)
    try:
        found = safetensors_codec.read(source, mapped=mapped)
        document = json.loads(found.metadata["aflock"])
        version = document["format"]
        if version == _FORMAT_WITHOUT_CHECKED_TABLE:
            _check_older(found)
        elif version != _FORMAT:
            raise NewerFormat(
                f"{source} has state format {version}, which this version does not read; use the version of aflock "
                "that wrote it, or a newer one"
            )
        elif not found.checked:
            raise Damaged("it has no checksum")
        state: State = document["state"]
        for name, array in found.arrays.items():
            _insert(state, name.split("/"), array)
    except FileNotFoundError:
        raise StateError(f"{source} does not exist; expected a state saved by aflock") from None
    except (ValueError, KeyError, TypeError, IndexError, IsADirectoryError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"{source} is not a state saved by aflock, or is damaged ({error})") from None
    return state


def _check_older(found: Tensors) -> None:
    """Checks the checksum of format 1; raises `Damaged` if it does not match."""
    whole = crc32(found.data, crc32(found.metadata["aflock"].encode()))
    if found.metadata.get("crc32") != str(whole):
        raise Damaged("its checksum does not match its contents")


def _split(value: Any, path: str, arrays: dict[str, npt.NDArray[Any]]) -> Any:
    """The JSON part of a state, with None for every array; puts the arrays into `arrays` under their paths."""
    if isinstance(value, np.ndarray):
        arrays[path] = value
        return None
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or "/" in key:
                raise StateError(f"the state key {key!r} is not a string without a slash")
        return {key: _split(part, f"{path}/{key}" if path else key, arrays) for key, part in value.items()}
    return value


def _insert(state: Any, path: list[str], array: npt.NDArray[Any]) -> None:
    for key in path[:-1]:
        state = state[key]
    if state[path[-1]] is not None:
        raise Damaged(f"the tensor {'/'.join(path)} is not in its JSON document")
    state[path[-1]] = array
