"""A network client with a strided 1x1 convolution of few channels: a sound heap, the bits of a run."""

from __future__ import annotations

import numpy as np
import torch

from aflock import Update, rng, strategies
from aflock.models.torch_module import TorchModule
from aflock.net.client.client import Client
from tests.models import test_onednn
from tests.models.test_onednn import ChannelsLast, batch
from tests.net.client.fake_server import serving

JOBS = 60


def take_part() -> None:
    """One client trains on a server; then the same arrivals by hand. Called in a process of its own."""
    torch.set_num_threads(1)
    model = TorchModule(ChannelsLast)
    start, (x, y) = model.init(rng.stream(0, "init")), batch(0)
    by_hand = strategies.create("asgd", clients=1, lr=0.1)
    with serving(strategies.create("asgd", clients=1, lr=0.1), start) as server:
        Client(server.url, server.token()).run(model, [(x, y)], steps=1, jobs=JOBS)
        trained = server.strategy.model.copy()
    by_hand.start(start)
    out = np.empty_like(start)
    for _ in range(JOBS):
        job = by_hand.job(client=0)
        model.gradient(job.model, x, y, out)
        by_hand.receive(Update(client=0, version=job.version, vectors={"gradient": out}, steps=1, examples=len(x)))
    assert np.array_equal(trained, by_hand.model)
    assert not np.array_equal(trained, start)


def test_a_client_computes_the_bits_of_a_run() -> None:
    take_part()


def test_a_client_leaves_the_heap_whole_without_avx_512() -> None:
    done = test_onednn.run("take_part", "tests.net.client.test_narrow_client")
    assert (done.returncode, done.stderr) == (0, "")
