"""What came of training, on its way to the server: the vectors that are sent, and what may be remembered of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import MissingVector, VectorError
from ..local import Trained
from ..types import Job, Vector
from . import wire
from .answers import Hello
from .keep import Parcel


def wanted(done: Trained, job: Job, hello: Hello) -> dict[str, Vector]:
    """The vectors the server asks for, and no others: it would refuse them."""
    names = ("gradient",) if job.first else hello.needs
    for name in names:
        if name not in done.vectors:
            raise MissingVector(f"training gave no vector {name!r}; {hello.strategy} needs {', '.join(names)}")
        shape = np.shape(done.vectors[name])
        if shape != (hello.length,):
            raise VectorError(f"training gave a {name} of shape {shape}; expected ({hello.length},)")
    return {name: done.vectors[name] for name in names}


def as_sent(done: Trained, parcel: Parcel) -> dict[str, npt.NDArray[Any]]:
    """What the client may remember: where the encoding rounds, it has told the server the rounded vector.

    What is remembered of a vector is either the vector or a sum of it; in both cases it is off by what was rounded.
    """
    memory = dict(done.memory)
    if parcel.encoding == "float32":
        return memory
    for name, sent in parcel.vectors.items():
        vector = done.vectors[name]
        rounded = wire.decode(sent, parcel.encoding, vector.size) - vector
        for kept in (name, f"told {name}"):
            if kept in memory:
                memory[kept] = memory[kept] + rounded
    return memory
