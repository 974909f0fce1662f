"""The wire format (docs/protocol.md): vectors are raw little-endian numbers in the body, the rest is in headers.

    float32    4d bytes
    float16    2d bytes, IEEE half precision
    int8       a float32 scale s, then d integers q:   v_k = s*q_k,   s = max|v|/127

Client and server both use it; it does no input or output. Every number from the other side goes through `number`, which
accepts decimal digits only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np

from ...errors import InputError, VectorError
from ...types import Outcome, Receipt, Vector

PROTOCOL = 1

JOB = "aflock-job"
VERSION = "aflock-version"
NUMBER = "aflock-number"
FIRST = "aflock-first"
VECTORS = "aflock-vectors"
ENCODING = "aflock-encoding"
HAVE = "aflock-have"
STEPS = "aflock-steps"
EXAMPLES = "aflock-examples"
OUTCOME = "aflock-outcome"
STALENESS = "aflock-staleness"
LAST_STALENESS = "aflock-last-staleness"
REASON = "aflock-reason"
SERVER_VERSION = "aflock-server-version"

_SIZES = {"float32": (4, 0), "float16": (2, 0), "int8": (1, 4)}
"""Bytes per number, and further bytes per vector."""

ENCODINGS = tuple(_SIZES)
_DEFAULT_ENCODING = "float32"

BytesLike = bytes | bytearray | memoryview
Headers = Mapping[str, str]
"""Names in lower case."""

_DIGITS = 18
_LITTLE = np.dtype("<f4")
_IS_LITTLE = np.dtype(np.float32) == _LITTLE
_NAMES = re.compile(r"(?:[a-z][a-z0-9_]{0,31}(?:,[a-z][a-z0-9_]{0,31}){0,7})?", re.ASCII)


class WireError(InputError):
    """A header or a body does not have the form of docs/protocol.md."""


# --- vectors ---------------------------------------------------------------------------------------------------------


def size(encoding: str, length: int) -> int:
    """How many bytes a vector of that many numbers takes."""
    each, more = _SIZES[encoding]
    return each * length + more


def encode(vector: Vector, encoding: str) -> memoryview:
    """The bytes of a vector; for float32 on a little-endian machine its own memory, not a copy."""
    if encoding == "float32":
        return np.ascontiguousarray(vector, "<f4").view(np.uint8).data
    if encoding == "float16":
        with np.errstate(over="ignore"):
            halves = vector.astype("<f2")
        if not np.isfinite(halves).all():
            raise VectorError("the vector has a number that is too large for float16; choose the encoding float32")
        return halves.view(np.uint8).data
    largest = float(np.abs(vector).max()) if vector.size else 0.0
    # A vector of zeros, or of numbers so small that their scale rounds to 0: with the scale 1 the division below gives
    # zeros, and not NaN.
    scale = np.float32(largest / 127) or np.float32(1.0)
    packed = np.empty(4 + vector.size, np.uint8)
    packed[:4] = np.array([scale], "<f4").view(np.uint8)
    packed[4:] = np.clip(np.rint(vector / scale), -127, 127).astype(np.int8).view(np.uint8)
    return packed.data


def bounded(vector: Vector, encoding: str) -> Vector:
    """The vector with every number limited to what the encoding can hold.

    The server sends its models through this: a model that has diverged must not keep it from answering.
    """
    most = {"float32": np.inf, "float16": 65504.0, "int8": float(np.finfo(np.float32).max)}[encoding]
    # `max` of a vector with a NaN is NaN, and NaN <= most is false: such a vector goes through `clip`, too. NaN becomes
    # 0, since int8 has none and `encode` refuses it for float16. float32 holds everything, also NaN and infinity.
    if encoding == "float32" or np.abs(vector).max(initial=0.0) <= most:
        return vector
    return np.clip(np.nan_to_num(vector, nan=0.0), -most, most).astype(np.float32)


def decode(buffer: BytesLike, encoding: str, length: int) -> Vector:
    """The vector in a buffer (float32: a view of it); the same buffer gives the same bits on every machine."""
    if len(buffer) != size(encoding, length):
        raise VectorError(f"a vector has {len(buffer)} bytes; expected {size(encoding, length)} ({encoding})")
    if encoding == "float32":
        return np.frombuffer(buffer, _LITTLE).astype(np.float32, copy=False)
    if encoding == "float16":
        return np.frombuffer(buffer, "<f2").astype(np.float32)
    scale = np.frombuffer(buffer, "<f4", 1)[0]
    with np.errstate(over="ignore", invalid="ignore"):  # any scale may come; the caller checks the numbers
        return np.frombuffer(buffer, np.int8, offset=4).astype(np.float32) * np.float32(scale)


def split(body: BytesLike, names: Sequence[str], encoding: str, length: int) -> dict[str, Vector]:
    """The vectors of a body, which are in the order of `names`."""
    if (
        encoding == "float32" and len(names) == 1 and len(body) == 4 * length and _IS_LITTLE
    ):  # the usual case, without the work below
        return {names[0]: np.frombuffer(body, _LITTLE)}
    each, view = size(encoding, length), memoryview(body)
    if len(view) != each * len(names):
        raise VectorError(f"the body has {len(view)} bytes; expected {each * len(names)} ({len(names)} x {encoding})")
    return {name: decode(view[k * each : (k + 1) * each], encoding, length) for k, name in enumerate(names)}


# --- headers ---------------------------------------------------------------------------------------------------------


def number(headers: Headers, name: str, default: int | None = None) -> int:
    """The number in a header: at most 18 decimal digits."""
    text = headers.get(name)
    return default if text is None and default is not None else _number(text, name)


@lru_cache(1024)
def _number(text: str | None, name: str) -> int:
    if text is None:
        raise WireError(f"the header {name} is missing")
    if not _is_number(text):
        raise WireError(f"the header {name} is not a number")
    return int(text)


def query_number(text: str, name: str) -> int:
    """The number in a parameter of a URL's query, in the same form as in a header."""
    if not _is_number(text):
        raise WireError(f"the query parameter {name} is not a number")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) <= _DIGITS


def names(headers: Headers) -> tuple[str, ...]:
    """The names of the vectors in a body."""
    return _vector_names(headers.get(VECTORS, ""))


@lru_cache(64)
def _vector_names(text: str) -> tuple[str, ...]:
    if not _NAMES.fullmatch(text):
        raise WireError(f"the header {VECTORS} is not a list of names")
    found = tuple(text.split(",")) if text else ()
    if len(set(found)) != len(found):
        raise WireError(f"the header {VECTORS} names a vector twice")
    return found


def encoding(headers: Headers) -> str:
    """How the vectors of a body are encoded."""
    return _checked_encoding(headers.get(ENCODING, _DEFAULT_ENCODING))


def _checked_encoding(encoding: str) -> str:
    if encoding not in ENCODINGS:
        raise WireError(f"the header {ENCODING} names none of {', '.join(ENCODINGS)}")
    return encoding


class JobHead(NamedTuple):
    """A job without its vectors."""

    job: int
    version: int
    number: int
    first: bool
    vectors: tuple[str, ...]
    encoding: str
    staleness: int = 0

    @classmethod
    def parse(cls, headers: Headers) -> Self:
        """From the headers of the answer to a pull or a push."""
        return cls(
            number(headers, JOB),
            number(headers, VERSION),
            number(headers, NUMBER),
            bool(number(headers, FIRST, 0)),
            names(headers),
            encoding(headers),
            number(headers, LAST_STALENESS, 0),
        )


def job_lines(job: int, number: int, staleness: int) -> str:
    """The header lines that differ from job to job."""
    return f"{JOB}: {job}\r\n{NUMBER}: {number}\r\n{LAST_STALENESS}: {staleness}\r\n"


def version_lines(version: int, first: bool, vectors: Sequence[str], encoding: str) -> str:
    """The header lines that all jobs of a version have in common."""
    return f"{VERSION}: {version}\r\n{FIRST}: {first:d}\r\n{VECTORS}: {','.join(vectors)}\r\n{ENCODING}: {encoding}\r\n"


class UpdateHead(NamedTuple):
    """An update without its vectors."""

    version: int
    steps: int
    examples: int
    vectors: tuple[str, ...]
    encoding: str

    def headers(self) -> dict[str, str]:
        """The headers of the request that sends it."""
        return {
            VERSION: str(self.version),
            STEPS: str(self.steps),
            EXAMPLES: str(self.examples),
            VECTORS: ",".join(self.vectors),
            ENCODING: self.encoding,
        }

    @staticmethod
    def parse(headers: Headers) -> UpdateHead:
        """From the headers of the request that sends it."""
        get = headers.get
        return _update_head(get(VERSION), get(STEPS), get(EXAMPLES), get(VECTORS, ""), get(ENCODING, _DEFAULT_ENCODING))


@lru_cache(1024)  # many updates have the same version, and the same headers otherwise
def _update_head(
    version: str | None, steps: str | None, examples: str | None, vectors: str, encoding: str
) -> UpdateHead:
    return UpdateHead(
        _number(version, VERSION),
        _number(steps, STEPS),
        _number(examples, EXAMPLES),
        _vector_names(vectors),
        _checked_encoding(encoding),
    )


def receipt_lines(receipt: Receipt, version: int) -> str:
    """The header lines of a receipt; `version` is the server's."""
    lines = f"{OUTCOME}: {receipt.outcome}\r\n{STALENESS}: {receipt.staleness}\r\n{SERVER_VERSION}: {version}\r\n"
    return f"{lines}{REASON}: {receipt.reason}\r\n" if receipt.reason else lines


def parse_receipt(headers: Headers) -> tuple[Receipt, int]:
    """A receipt, and the server's version when it made the receipt."""
    known: dict[str, Outcome] = {"applied": "applied", "buffered": "buffered", "rejected": "rejected"}
    outcome = known.get(headers.get(OUTCOME, ""))
    if outcome is None:
        raise WireError(f"the header {OUTCOME} is none of {', '.join(known)}")
    receipt = Receipt(outcome, number(headers, STALENESS), headers.get(REASON, ""))
    return receipt, number(headers, SERVER_VERSION)
