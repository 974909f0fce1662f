"""The one reader and writer of safetensors files: eight bytes of header length, a JSON header, the raw arrays.

Writing the format here takes fewer lines than calling the library, streams arrays larger than memory from their memory
map, and `safetensors` itself can read the file.

The header of a file written here begins with a checksum of fixed width, CRC-32 in hexadecimal, at a fixed offset. It is
taken over the whole file, with zeros for its own digits. `read` raises `Damaged` if the checksum does not match; for a
file without one (from another program, or an older version) `Tensors.checked` is false.

A file is read, not mapped: a bad sector under a memory map kills the process, where a read returns an error. Only a
file that would leave too little memory, or that several processes are to share, is mapped, after it was read through.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import files, memory
from .checksum import crc32

Array = npt.NDArray[Any]

CODES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}
"""The kinds of numbers a file can hold."""

_NAMES = {dtype: code for code, dtype in CODES.items()}
_CHECKSUM = "checksum"
_START = b'{"__metadata__":{"checksum":"'
_ZEROS = b"00000000"
_CHECKSUM_OFFSET = 8 + len(_START)
"""Offset of the checksum's digits in the file."""
_PIECE = 8 << 20


class Damaged(ValueError):
    """The file is not a complete safetensors file; the message says what is wrong with it."""


class Tensors(NamedTuple):
    """What is in a file; the arrays are read-only."""

    arrays: dict[str, Array]
    metadata: dict[str, str]
    checked: bool
    """Whether the file has a checksum over all of it; `read` has compared it."""
    data: memoryview
    """The bytes of all arrays, in order."""


def kind(array: Array) -> str | None:
    """The format's name for what an array holds; None if it has none."""
    return _NAMES.get(array.dtype.newbyteorder("<"))


def write(file: Path, arrays: Mapping[str, Array], metadata: Mapping[str, str], *, mode: int = 0o666) -> None:
    """Writes a file, whole or not at all; the arrays must be of a `kind` the format has."""
    ordered = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))  # wide first: every array is aligned
    head = _head(ordered, metadata)
    whole = reduce(lambda total, array: crc32(_bytes(array), total), ordered.values(), crc32(head))
    head = head[:_CHECKSUM_OFFSET] + b"%08x" % whole + head[_CHECKSUM_OFFSET + len(_ZEROS) :]
    files.write_whole(file, head, *map(_bytes, ordered.values()), mode=mode)


def read(file: Path, *, mapped: bool = False) -> Tensors:
    """Reads a file. Raises `Damaged` if it is not complete, OSError if it cannot be opened."""
    with open(file, "rb", buffering=0) as source:
        size = os.fstat(source.fileno()).st_size
        try:
            too_large = size > _PIECE and 2 * size > memory.available()  # whoever loads it makes a copy
            raw = _mapped(source, size) if mapped or too_large else _read(source, size)
        except OSError as error:  # a bad sector
            raise Damaged(f"it cannot be read: {error.strerror}") from None
    return _parsed(raw)


def _head(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {_CHECKSUM: _ZEROS.decode(), **metadata}}
    offset = 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        entries[name] = {"dtype": kind(array), "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data


def _read(source: Any, size: int) -> Array:
    raw = np.empty(size, np.uint8)
    rest = raw.data
    while rest:
        count = source.readinto(rest[:_PIECE])
        if not count:
            raise Damaged("the file became shorter while it was read")
        rest = rest[count:]
    raw.setflags(write=False)
    return raw


def _mapped(source: Any, size: int) -> Array:
    """Maps the file after reading all of it, so that a bad sector raises an error here and not SIGBUS later."""
    piece, offset = bytearray(_PIECE), 0
    while offset < size:
        count = os.preadv(source.fileno(), [piece], offset)
        if not count:
            raise Damaged("the file became shorter while it was read")
        offset += count
    return np.memmap(source, np.uint8, "r").view(np.ndarray) if size else np.empty(0, np.uint8)


def _parsed(raw: Array) -> Tensors:
    try:
        checked = _check(raw)
        header, begin = _header(raw)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise Damaged("its metadata is not a JSON object")
        if checked:
            del metadata[_CHECKSUM]
        data = raw[begin:]
        return Tensors(_arrays(header, data), metadata, checked, data.data)
    except Damaged:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise Damaged(f"its header is not valid: {error}") from None


def _header(raw: Array) -> tuple[dict[str, Any], int]:
    """The header, and where the data begin."""
    if raw.size < 8:
        raise Damaged("it is too short for a header")
    end = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    if end > raw.size:
        raise Damaged("it ends before its header does")
    header = json.loads(raw[8:end].tobytes())
    if not isinstance(header, dict):
        raise Damaged("its header is not a JSON object")
    return header, end


def _check(raw: Array) -> bool:
    """Whether the file has a checksum; raises `Damaged` if that does not match its contents."""
    digits = slice(_CHECKSUM_OFFSET, _CHECKSUM_OFFSET + len(_ZEROS))
    if raw[8:_CHECKSUM_OFFSET].tobytes() != _START:
        return False
    whole = crc32(raw[digits.stop :].data, crc32(_ZEROS, crc32(raw[:_CHECKSUM_OFFSET].tobytes())))
    if raw[digits].tobytes() != b"%08x" % whole:
        raise Damaged("its checksum does not match its contents")
    return True


def _arrays(header: Mapping[str, Any], data: Array) -> dict[str, Array]:
    """Every array, in the order of the file; together they must be all of the data, without a gap or an overlap."""
    found: dict[str, Array] = {}
    offset = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if entry["dtype"] not in CODES:
            raise Damaged(f"the tensor {name} is {entry['dtype']}, expected {', '.join(CODES)}")
        dtype, shape = CODES[entry["dtype"]], entry["shape"]
        if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
            raise Damaged(f"the shape or the data_offsets of the tensor {name} are not all integers of at least 0")
        if begin != offset or end != begin + math.prod(shape) * dtype.itemsize:
            raise Damaged(f"the data_offsets of the tensor {name} leave a gap, overlap or do not fit its shape")
        found[name] = data[begin:end].view(dtype).reshape(shape)
        offset = end
    if offset != data.size:
        raise Damaged(f"{data.size - offset} bytes behind the last tensor belong to no tensor")
    return found
