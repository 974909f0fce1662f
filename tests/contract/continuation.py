"""Run as a process of its own: loads saved states, goes on, and answers with hashes. One JSON request per line.

{"file": ..., "name": ..., "params": ..., "seed": ..., "begin": ..., "end": ...}   ->   sha256 of the whole state
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from aflock import state
from tests.contract.cases import Arrivals, Case


def digest(value: Any) -> str:
    """A hash over every array and number of a state."""
    hasher = hashlib.sha256()

    def walk(part: Any, path: str) -> None:
        hasher.update(path.encode())
        if isinstance(part, dict):
            for key in part:
                walk(part[key], f"{path}/{key}")
        elif isinstance(part, np.ndarray):
            hasher.update(np.ascontiguousarray(part).tobytes())
        else:
            hasher.update(json.dumps(part).encode())

    walk(value, "")
    return hasher.hexdigest()


def answer(request: dict[str, Any]) -> str:
    s = Case(request["name"], request["params"]).create()
    s.load_state_dict(state.load(request["file"]))
    Arrivals(request["seed"]).feed(s, request["begin"], request["end"])
    return digest(s.state_dict())


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(answer(json.loads(line)) + "\n")
        sys.stdout.flush()
