"""`Client.run` trains what the user gave it, and gives the same bits as the simulator."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from aflock import data, local, models, rng, strategies
from aflock.errors import CountError, InputError, ParameterError
from aflock.local import Memory, Trained
from aflock.models.torch_module import TorchModule
from aflock.net.client import batches
from aflock.net.client import client as clients
from aflock.net.client.client import JobReport
from aflock.net.client.outgoing import memory_as_sent
from aflock.sim.experiment import Experiment
from aflock.sim.parts import assemble
from aflock.sim.simulation import Simulation
from aflock.system.threads import one_thread
from aflock.types import Job
from tests.net.client.fake_server import FakeServer, serving
from tests.net.client.helpers import ZERO, blobs, changing, made, remembered, remembering

pytestmark = pytest.mark.timeout(60)


def test_a_torch_module_learns_in_a_dozen_lines(tmp_path: Path) -> None:
    x, y = blobs()
    net = nn.Linear(4, 3)
    net.eval()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=20, shuffle=True)
    before = nn.functional.cross_entropy(net(x), y).item()
    lines: list[JobReport] = []
    with serving(strategies.create("fedbuff", clients=1, buffer=2), np.zeros(15, np.float32)) as server:
        client = made(server, tmp_path)
        summary = client.run(net, loader, local="sgd", steps=lambda: 5, jobs=30, progress=lines.append)
        pulled = server.happened("pull")
    after = nn.functional.cross_entropy(net(x), y).item()
    assert after < 0.5 * before
    assert (summary.why, summary.jobs, summary.version) == ("jobs", 30, 15)
    assert [line.jobs for line in lines] == list(range(1, 31))
    assert [line.job for line in lines] == [event.job for event in pulled]
    assert all(line.steps == 5 and line.seconds > 0 for line in lines)
    assert not net.training
    assert summary.model is not None
    flat = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    assert flat.numpy().tobytes() == summary.model.tobytes()
    assert {event.examples for event in server.happened("arrival")} == {120}


def test_the_servers_advice_is_what_a_client_does_by_itself() -> None:
    x, y = blobs(30)
    batches = [(x[k : k + 10].numpy(), y[k : k + 10].numpy()) for k in range(0, 30, 10)]
    results = []
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"local": {"name": "sgd", "eta_l": 0.05}, "steps": 3},
        {"local": local.create("sgd"), "steps": 3},
    )
    for options in ways:
        strategy = strategies.create("fedbuff", clients=1, buffer=1)
        with serving(strategy, np.zeros(15, np.float32), advice={"eta_l": 0.05}, steps=3) as server:
            made(server).run(TorchModule(nn.Linear(4, 3)), batches, jobs=4, **options)
            results.append(server.strategy.model.tobytes())
            assert {(event.steps, event.examples) for event in server.happened("arrival")} == {(3, 30)}
    assert results[0] == results[1] != results[2]


def test_batches_may_be_a_function_and_steps_epochs() -> None:
    x, y = blobs(30)
    begun = []

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        begun.append(1)
        yield from ((x[k : k + 10], y[k : k + 10]) for k in range(0, 30, 10))

    with serving(strategies.create("asgd", clients=1), np.zeros(15, np.float32)) as server:
        made(server).run(nn.Linear(4, 3), batches, steps=local.Epochs(2), jobs=2)
        assert [(event.steps, event.examples) for event in server.happened("arrival")] == [(6, 30), (6, 30)]
    assert len(begun) == 1 + 4  # one pass to count them


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_batch_norm_comes_along(buffers: Any, tmp_path: Path) -> None:
    x, y = blobs(40)
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    length = 23 + (8 if buffers == "average" else 0)
    start = np.ones(length, np.float32)
    with serving(strategies.create("fedbuff", clients=1, buffer=1), start) as server:
        made(server, tmp_path).run(net, [(x, y)], buffers=buffers, jobs=3)
    mean = net[0].running_mean
    assert isinstance(mean, torch.Tensor)
    assert float(mean.abs().max()) > 0
    assert (tmp_path / "memory.safetensors").exists()  # the count of batches stays here in both cases


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"model": nn.Linear(2, 2)}, ParameterError, "has 6 weights, the federation's 15"),
        ({"model": "net"}, ParameterError, "model is a str"),
        ({"batches": iter([])}, ParameterError, "can be iterated over repeatedly"),
        ({"batches": [1]}, ParameterError, "expected a pair"),
        ({"batches": []}, ParameterError, "batches is empty"),
        ({"batches": [], "examples": 3}, ParameterError, "batches is empty"),
        ({"batches": lambda: iter(lambda: (torch.ones(1), 0), None)}, ParameterError, "say how many examples"),
        ({"steps": "five"}, ParameterError, "steps is 'five'"),
        ({"steps": 0}, CountError, "steps is 0"),
        ({"steps": lambda: 0}, CountError, "steps is 0"),
        ({"local": "sdg"}, InputError, "sgd"),
        ({"local": {"eta_l": 1}}, ParameterError, "expected a rule's name"),
        ({"jobs": -1}, CountError, "jobs is -1"),
        ({"loss": None, "model": nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))}, InputError, "buffers"),
    ],
)
def test_what_cannot_be_trained_is_an_error_in_one_sentence(
    options: dict[str, Any], error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MOST_COUNTED", 100)
    usual: dict[str, Any] = {"model": nn.Linear(4, 3), "batches": [blobs(10)], "jobs": 1}
    with serving(strategies.create("asgd", clients=1), np.zeros(15, np.float32)) as server:
        with pytest.raises(error, match=says):
            made(server).run(**(usual | options))
        assert not server.coordinator.working  # what had been pulled was given back


def test_a_module_is_not_trained_for_a_model_with_another_order_of_weights() -> None:
    """The server would evaluate as many weights in another order wrongly, without an error."""
    own = models.create("mlp", data.load("synthetic", examples=20, features=4, classes=3), hidden=4)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    x, y = blobs(10)
    with serving(strategies.create("asgd", clients=1), np.zeros(own.length, np.float32)) as server:
        server.greeting |= {"model": "mlp", "order": "own" if not own.torch_order else "torch"}
        with pytest.raises(ParameterError, match="another order than a torch module"):
            made(server).run(net, [(x, y)], jobs=1)
        made(server).run(own, [(x.numpy(), y.numpy())], jobs=1)


@pytest.mark.parametrize("name", ["masfl", "afa-cd+scaffold", "ace:memory=client"])
def test_the_network_gives_the_same_bits_as_the_simulator(name: str, tmp_path: Path) -> None:
    small = [
        "data.name=synthetic", "data.examples=120", "data.features=4", "data.classes=3", "partition.clients=3",
        "budget.uploads=40", "training.batch=8", "training.steps=2", "evaluation.every=100",
    ]  # fmt: skip
    experiment = Experiment.build({}, small).variant(name, 0)
    order: list[int] = []
    simulation = Simulation(experiment, on_event=lambda e: order.append(int(e.client or 0)) if e.outcome else None)
    simulation.run()

    parts = assemble(experiment)
    w0 = parts.model.init(rng.stream(experiment.section("seeds").training, "model"))
    with one_thread(), serving(parts.strategy, w0, order=list(order), uploads=len(order)) as server:
        runs = [threading.Thread(target=_work_as, args=(server, experiment, k, tmp_path)) for k in range(3)]
        for run in runs:
            run.start()
        for run in runs:
            run.join(100)
        assert not any(run.is_alive() for run in runs)
        server.coordinator.finish(time.monotonic())
        assert server.strategy.version == simulation.strategy.version
        assert server.strategy.model.tobytes() == simulation.strategy.model.tobytes()
    for client, seat in simulation.engine.records.items():
        found = remembered(tmp_path / f"c{client}")
        assert {key: value.tobytes() for key, value in found.items()} == {
            key: value.tobytes() for key, value in seat.memory.items()
        }


def _work_as(server: FakeServer, experiment: Experiment, client: int, folder: Path) -> None:
    client_training = assemble(experiment).client_training

    def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
        assert job.client == client
        return client_training.train(job, number, client_training.steps_of(client, number), memory, delay)

    name = f"c{client}"
    made(server, folder / name, name).run_with(train, examples=client_training.examples(client))


@pytest.mark.parametrize("encoding", ["float16", "int8"])
def test_what_is_remembered_is_what_was_sent_also_where_it_was_rounded(encoding: str, tmp_path: Path) -> None:
    with remembering(encoding=encoding) as server:
        made(server, tmp_path).run_with(changing(), jobs=30)
        np.testing.assert_allclose(server.strategy.total, remembered(tmp_path)["told gradient"], atol=1e-9)


def test_a_control_variate_is_rounded_as_it_was_sent() -> None:
    sent = clients.Pulled(Job(0, 0, ZERO), 7, 0, 0, "int8")
    done = Trained({"control": np.array([1, 0.013], np.float32)}, 1, {"control": np.array([3, 1.013], np.float32)})
    update = sent.pack(done.vectors, 1, 1)
    np.testing.assert_allclose(memory_as_sent(done, update)["control"], [3, 1 + 2 / 127], rtol=1e-6)
