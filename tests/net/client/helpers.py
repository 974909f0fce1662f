"""What the tests of the client share: servers with a usual rule, clients, training functions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from aflock import local, state, strategies
from aflock.local import Memory, Trained
from aflock.net.client import client as clients
from aflock.net.client.client import Client
from aflock.types import Job
from tests.net.client.fake_server import FakeServer, serving

D = 5
ZERO = np.zeros(D, np.float32)
ROOT = Path(__file__).parents[3]


def plain(clients: int = 1, **options: Any) -> Any:
    """A server whose rule needs no memory at the client."""
    return serving(strategies.create("asgd", clients=clients, lr=0.1), ZERO, **options)


def remembering(**options: Any) -> Any:
    """A server whose rule adds up the changes of the gradient that its one client sends."""
    return serving(strategies.create("ace", clients=1, lr=0.1, memory="client"), ZERO, **options)


def made(server: FakeServer, folder: Path | None = None, name: str = "alice", **options: Any) -> Client:
    return Client(server.url, server.token(name), state_dir=folder, keep=folder is not None, **options)


def one(job: Job, number: int, memory: Memory, delay: float) -> Trained:
    return Trained({"gradient": np.ones(D, np.float32)}, 1)


def changing(needs: tuple[str, ...] = ("gradient",), changes: tuple[str, ...] = ("gradient",)) -> clients.Train:
    """Training that gives a random gradient in every job, and sends its change since the job before."""
    rule = local.create("sgd")

    def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
        draws = np.random.default_rng([number, time.monotonic_ns()])
        task = local.Task(lambda x, k: draws.standard_normal(x.size).astype(np.float32))
        return rule.train(job, task, 1, needs=needs, changes=changes, memory=memory)

    return train


def remembered(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = state.load(folder / "memory.safetensors")["memory"]
    return found


def blobs(count: int = 120) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    y = torch.randint(3, (count,), generator=draws)
    x = torch.randn(count, 4, generator=draws) + 3 * nn.functional.one_hot(y, 4)
    return x, y
