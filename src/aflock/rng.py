"""One seed, many named streams.

    stream(seed, "schedule")                 the order of clients
    stream(seed, "client", 3, "job", 17)     the batches of client 3 in its 17th job

Streams with different names are independent, and a stream depends on its own name alone: adding a client, a rule or a
consumer changes nobody else's draws. There is no global random state anywhere in aflock.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from .errors import StateError

Name = str | int


def key(seed: int, *name: Name) -> int:
    """128 bits that depend on the seed and the whole name, the same on every machine and Python version."""
    parts = (f"s{part}" if isinstance(part, str) else f"i{int(part)}" for part in name)
    text = "\x1f".join([str(int(seed)), *parts])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def stream(seed: int, *name: Name) -> np.random.Generator:
    """The stream of that name."""
    return np.random.Generator(np.random.PCG64(key(seed, *name)))


def get_state(generator: np.random.Generator) -> dict[str, Any]:
    """The stream's position as JSON values."""
    return dict(generator.bit_generator.state)


def set_state(generator: np.random.Generator, state: dict[str, Any]) -> None:
    """Puts a stream where `get_state` found it."""
    try:
        generator.bit_generator.state = state
    except (TypeError, ValueError, KeyError) as error:
        raise StateError(f"a saved random stream is not one of PCG64: {error}") from None
