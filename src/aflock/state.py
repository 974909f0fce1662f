"""Saved state: one safetensors file, written whole or not at all, read without pickle.

A state is a nested dict whose leaves are NumPy arrays or JSON values. Arrays become tensors named by their path
("strategy/rows/rows/3"); everything else becomes one JSON document in the file's metadata, under the key "aflock".

The format is eight bytes of header length, a JSON header, then the raw arrays: writing it here takes fewer lines than
calling the library, streams arrays larger than memory from their memory map, and `safetensors` itself can read it.
A checksum over the document and the arrays stands beside the document: what has changed on the disk is not loaded.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .checksum import crc32
from .errors import StateError
from .files import write_through
from .types import State

_CODES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}
_NAMES = {dtype: code for code, dtype in _CODES.items()}
_FORMAT = 1


def save(path: str | Path, state: State) -> None:
    """Writes a state: to a temporary file beside it first, synced, then moved into place."""
    target = Path(path)
    arrays: dict[str, npt.NDArray[Any]] = {}
    document = _split(state, "", arrays)
    arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))  # wide first: every array is aligned
    header = _header(arrays, json.dumps({"format": _FORMAT, "state": document}))
    if not target.parent.is_dir():
        raise StateError(f"the folder {target.parent} does not exist; make it before saving there")
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            write_through(file.fileno(), struct.pack("<Q", len(header)) + header)
            for array in arrays.values():
                write_through(file.fileno(), _bytes(array))
            os.fchmod(file.fileno(), 0o666 & ~_umask())  # mkstemp is stricter than the user asked for
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def load(path: str | Path) -> State:
    """Reads a state; arrays are read-only views of the file, mapped, not copied."""
    source = Path(path)
    try:
        raw = np.memmap(source, np.uint8, "r").view(np.ndarray)
        length = int(raw[:8].view("<u8")[0])
        header = json.loads(raw[8 : 8 + length].tobytes())
        about = header.pop("__metadata__")
        document = json.loads(about["aflock"])
        if document["format"] != _FORMAT:
            raise StateError(f"{source} has state format {document['format']}; this version reads {_FORMAT}")
        state: State = document["state"]
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            flat = raw[8 + length + begin : 8 + length + end].view(_CODES[entry["dtype"]])
            _place(state, name.split("/"), flat.reshape(entry["shape"]))
        whole = crc32(raw[8 + length :].data, crc32(about["aflock"].encode()))
        if about.get("crc32", str(whole)) != str(whole):  # older files have none
            raise StateError(f"{source} has changed since it was saved: its checksum is another")
    except FileNotFoundError:
        raise StateError(f"{source} does not exist; expected a state saved by aflock") from None
    except (ValueError, KeyError, TypeError, IndexError, IsADirectoryError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"{source} is not a state saved by aflock, or is cut off ({error})") from None
    return state


def _split(value: Any, path: str, arrays: dict[str, npt.NDArray[Any]]) -> Any:
    """The JSON part of a state; its arrays go to `arrays` under their paths."""
    if isinstance(value, np.ndarray):
        arrays[path] = value
        return None
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or "/" in key:
                raise StateError(f"the state key {key!r} is not a string without a slash")
        return {key: _split(part, f"{path}/{key}" if path else key, arrays) for key, part in value.items()}
    return value


def _place(state: Any, path: list[str], array: npt.NDArray[Any]) -> None:
    for key in path[:-1]:
        state = state[key]
    state[path[-1]] = array


def _header(arrays: dict[str, npt.NDArray[Any]], document: str) -> bytes:
    whole = reduce(lambda sum, array: crc32(_bytes(array), sum), arrays.values(), crc32(document.encode()))
    entries: dict[str, Any] = {"__metadata__": {"aflock": document, "crc32": str(whole)}} | dict(_entries(arrays))
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _entries(arrays: dict[str, npt.NDArray[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    offset = 0
    for name, array in arrays.items():
        code = _NAMES.get(array.dtype.newbyteorder("<"))
        if code is None:
            raise StateError(f"the array {name} is {array.dtype}; a state holds {', '.join(_CODES)}")
        end = offset + array.nbytes
        yield name, {"dtype": code, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
