"""aflock: asynchronous federated learning. Many clients train one model; nobody waits for anybody.

from aflock import Update, strategies

s = strategies.create("ace", clients=5, lr=0.1)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .types import Job, Receipt, Update

if TYPE_CHECKING:
    from . import local, strategies
    from .coordination.coordinator import Coordinator
    from .net.client.client import Client
    from .runs.running import simulate

__version__ = "0.1.0"
__all__ = ["Client", "Coordinator", "Job", "Receipt", "Update", "__version__", "local", "simulate", "strategies"]


def __getattr__(name: str) -> Any:
    """Heavy parts (they import numba) are loaded when first used, so that `import aflock` is quick."""
    if name in ("strategies", "local"):
        return importlib.import_module(f".{name}", __name__)
    if name == "Coordinator":
        return importlib.import_module(".coordination.coordinator", __name__).Coordinator
    if name == "Client":
        return importlib.import_module(".net.client.client", __name__).Client
    if name == "simulate":
        return importlib.import_module(".runs", __name__).simulate
    raise AttributeError(f"module 'aflock' has no attribute {name!r}")
