"""From the result of training to what is sent: the vectors of an update, and the memory that fits what was sent.

`run.py` calls both functions after every job.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import MissingVector, VectorError
from ...local import Trained, first_vector
from ...types import Job, Vector
from ..protocol import wire
from .answers import Hello
from .state import EncodedUpdate


def requested_vectors(trained: Trained, job: Job, hello: Hello) -> dict[str, Vector]:
    """The vectors that the strategy needs, and no others: the server refuses an update with further vectors."""
    names = (first_vector(hello.needs),) if job.first else hello.needs
    for name in names:
        if name not in trained.vectors:
            raise MissingVector(f"training gave no vector {name!r}; {hello.strategy} needs {', '.join(names)}")
        shape = np.shape(trained.vectors[name])
        if shape != (hello.length,):
            raise VectorError(f"training gave a {name} of shape {shape}; expected ({hello.length},)")
    return {name: trained.vectors[name] for name in names}


def memory_as_sent(trained: Trained, update: EncodedUpdate) -> dict[str, npt.NDArray[Any]]:
    """The client's memory after the update, corrected by what the encoding rounded off the vectors that are sent.

    Client and server must agree on what was sent, and the server has the rounded vector. The memory holds either the
    vector itself (under its name) or the sum of all that were sent (under "told NAME"); the rounding error of this
    update is added to both.
    """
    memory = dict(trained.memory)
    if update.encoding == "float32":
        return memory
    for name, sent in update.vectors.items():
        vector = trained.vectors[name]
        rounded = wire.decode(sent, update.encoding, vector.size) - vector
        for kept in (name, f"told {name}"):
            if kept in memory:
                memory[kept] = memory[kept] + rounded
    return memory
