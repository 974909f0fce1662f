"""The client: it trains, it insists, it remembers, and it agrees with the server whenever it is killed."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from aflock import cli, data, local, models, rng, state, strategies
from aflock.errors import AflockError, CountError, InputError, MissingVector, ParameterError, StateError
from aflock.local import Memory, Trained
from aflock.models.torch_module import TorchModule
from aflock.net import client as clients
from aflock.net import feed, tls, transport
from aflock.net import run as running
from aflock.net.client import Client, Occupied, Progress, Session, as_sent
from aflock.net.join import TrainingFailed
from aflock.net.keep import Keep, Parcel
from aflock.net.refusals import Refused
from aflock.net.transport import Nonsense, Unavailable, Untrusted, address, jittered, status
from aflock.sim.experiment import Experiment
from aflock.sim.parts import assemble
from aflock.sim.simulation import Simulation
from aflock.threads import one_thread
from aflock.types import Job, Vector
from net.fake_server import SECRET, FakeServer, Sorry, serving

pytestmark = pytest.mark.timeout(60)

D = 5
ZERO = np.zeros(D, np.float32)
TESTS = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long in a test."""
    monkeypatch.setattr(transport, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(transport, "LONGEST_WAIT", 0.05)
    monkeypatch.setattr(running, "PULL_SECONDS", 1.0)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the client would have waited between attempts; it does not."""
    asked: list[float] = []

    async def hurried(self: Session, pause: float) -> bool:
        asked.append(pause)
        return False

    monkeypatch.setattr(Session, "_hurried", hurried)
    return asked


def plain(clients: int = 1, **options: Any) -> Any:
    """A server with a rule that remembers nothing."""
    return serving(strategies.create("asgd", clients=clients, lr=0.1), ZERO, **options)


def remembering(**options: Any) -> Any:
    """A server that adds up what its one client says has changed."""
    return serving(strategies.create("ace", clients=1, lr=0.1, memory="client"), ZERO, **options)


def made(server: FakeServer, folder: Path | None = None, name: str = "alice", **options: Any) -> Client:
    return Client(server.url, server.token(name), state_dir=folder, keep=folder is not None, **options)


def one(job: Job, number: int, memory: Memory, delay: float) -> Trained:
    return Trained({"gradient": np.ones(D, np.float32)}, 1)


def changing(needs: tuple[str, ...] = ("gradient",), changes: tuple[str, ...] = ("gradient",)) -> clients.Train:
    """Another gradient in every job, told as its change."""
    rule = local.create("sgd")

    def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
        draws = np.random.default_rng([number, time.monotonic_ns()])
        task = local.Task(lambda x, k: draws.standard_normal(x.size).astype(np.float32))
        return rule.train(job, task, 1, needs=needs, changes=changes, memory=memory)

    return train


def remembered(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = state.load(folder / "memory.safetensors")["memory"]
    return found


# --- training --------------------------------------------------------------------------------------------------------


def blobs(count: int = 120) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    y = torch.randint(3, (count,), generator=draws)
    x = torch.randn(count, 4, generator=draws) + 3 * nn.functional.one_hot(y, 4)
    return x, y


def test_a_torch_module_learns_in_a_dozen_lines(tmp_path: Path) -> None:
    x, y = blobs()
    net = nn.Linear(4, 3)
    net.eval()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=20, shuffle=True)
    before = nn.functional.cross_entropy(net(x), y).item()
    lines: list[Progress] = []
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
        ({"batches": iter([])}, ParameterError, "can be gone through again and again"),
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
    monkeypatch.setattr(feed, "MOST_COUNTED", 100)
    usual: dict[str, Any] = {"model": nn.Linear(4, 3), "batches": [blobs(10)], "jobs": 1}
    with serving(strategies.create("asgd", clients=1), np.zeros(15, np.float32)) as server:
        with pytest.raises(error, match=says):
            made(server).run(**(usual | options))
        assert not server.coordinator.working  # what had been pulled was given back


def test_a_module_is_not_trained_for_a_model_with_another_order_of_weights() -> None:
    """As many weights in another order would be measured wrongly, and nobody would notice."""
    own = models.create("mlp", data.load("synthetic", examples=20, features=4, classes=3), hidden=4)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    x, y = blobs(10)
    with serving(strategies.create("asgd", clients=1), np.zeros(own.length, np.float32)) as server:
        server.greeting |= {"model": "mlp", "order": "own" if not own.torch_order else "torch"}
        with pytest.raises(ParameterError, match="another order than a torch module"):
            made(server).run(net, [(x, y)], jobs=1)
        made(server).run(own, [(x.numpy(), y.numpy())], jobs=1)


# --- the same as the simulator ---------------------------------------------------------------------------------------


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
    for client, seat in simulation.engine.seats.items():
        found = remembered(tmp_path / f"c{client}")
        assert {key: value.tobytes() for key, value in found.items()} == {
            key: value.tobytes() for key, value in seat.memory.items()
        }


def _work_as(server: FakeServer, experiment: Experiment, client: int, folder: Path) -> None:
    workshop = assemble(experiment).workshop

    def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
        assert job.client == client
        return workshop.train(job, number, workshop.steps_of(client, number), memory, delay)

    name = f"c{client}"
    made(server, folder / name, name).run_with(train, examples=workshop.examples(client))


@pytest.mark.parametrize("encoding", ["float16", "int8"])
def test_what_is_remembered_is_what_was_sent_also_where_it_was_rounded(encoding: str, tmp_path: Path) -> None:
    with remembering(encoding=encoding) as server:
        made(server, tmp_path).run_with(changing(), jobs=30)
        np.testing.assert_allclose(server.strategy.total, remembered(tmp_path)["told gradient"], atol=1e-9)


def test_a_control_variate_is_rounded_as_it_was_sent() -> None:
    sent = clients.Pulled(Job(0, 0, ZERO), 7, 0, 0, "int8")
    done = Trained({"control": np.array([1, 0.013], np.float32)}, 1, {"control": np.array([3, 1.013], np.float32)})
    parcel = sent.pack(done.vectors, 1, 1)
    np.testing.assert_allclose(as_sent(done, parcel)["control"], [3, 1 + 2 / 127], rtol=1e-6)


# --- a bad line ------------------------------------------------------------------------------------------------------


def test_what_is_sent_again_counts_once(tmp_path: Path) -> None:
    with remembering() as server:
        server.trouble["hello"] = ["drop before", "hang", "cut"]
        server.trouble["job"] = ["cut", "drop after", Sorry(429, "too-fast", after=0.01)]
        server.trouble["update"] = [
            "drop after", "drop after", "", "drop before", "cut", "", Sorry(503), Sorry(500), Sorry(408, "slow"), "",
            "hang",
        ]  # fmt: skip
        summary = made(server, tmp_path, timeout=0.3).run_with(changing(), jobs=8)
        assert summary.jobs == 8
        assert len(server.taken) == 8
        assert set(server.taken.values()) == {1}
        np.testing.assert_allclose(server.strategy.total, remembered(tmp_path)["told gradient"], atol=1e-9)


def test_the_server_goes_away_and_comes_back(tmp_path: Path) -> None:
    with remembering() as server:

        def restart(progress: Progress) -> None:
            if progress.jobs in (3, 6):
                server.stop()
                threading.Timer(0.2, server.start).start()

        summary = made(server, tmp_path).run_with(changing(), jobs=9, progress=restart)
        assert summary.jobs == 9
        assert set(server.taken.values()) == {1}
        np.testing.assert_allclose(server.strategy.total, remembered(tmp_path)["told gradient"], atol=1e-9)


def test_pauses_are_what_the_server_says_or_grow(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "FIRST_WAIT", 0.5)
    monkeypatch.setattr(transport, "LONGEST_WAIT", 3.0)
    with plain() as server:
        server.trouble["hello"] = [Sorry(503)] * 5 + [Sorry(429, after=7), Sorry(503, after=1e9)]
        made(server).run_with(one, jobs=0)
    expected = [0.5, 1, 2, 3, 3, 7, 3600]
    assert len(pauses) == len(expected)
    assert all(base <= pause <= 1.5 * base for base, pause in zip(expected, pauses, strict=True))
    assert len({jittered(1.0) for _ in range(9)}) > 1


def test_a_client_may_give_up() -> None:
    with plain() as server:
        url, token = server.url, server.token()
    begun = Client(url, token, keep=False, give_up=0.1)
    with pytest.raises(Unavailable, match="no answer from http"):
        begun.run_with(one)


def test_a_job_that_is_no_longer_the_clients_is_void(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with remembering() as server:
        server.trouble["update"] = ["", Sorry(409, "unknown-job", "gone"), "", Sorry(422, "unusable", "too long"), ""]
        summary = made(server, tmp_path).run_with(changing(), jobs=3)
        assert (summary.jobs, server.taken.total(), len(server.happened("pull"))) == (3, 3, 5)
        np.testing.assert_allclose(server.strategy.total, remembered(tmp_path)["told gradient"], atol=1e-9)
        assert not (tmp_path / "pending.safetensors").exists()
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert ["gone" in said[0], "too long" in said[1]] == [True, True]


def test_what_was_rejected_is_not_remembered(tmp_path: Path) -> None:
    strategy: Any = strategies.create("ace", clients=2, memory="client")
    with serving(strategy, ZERO, max_staleness=0) as server:
        begun, slow = threading.Event(), threading.Event()

        def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
            if (job.client, number) == (1, 1):
                begun.set()
                slow.wait(10)
            elif (job.client, number) == (0, 1):
                begun.wait(10)
            return changing()(job, number, memory, delay)

        other = threading.Thread(target=lambda: made(server, tmp_path / "c1", "c1").run_with(train, jobs=3))
        other.start()
        made(server, tmp_path / "c0", "c0").run_with(train, jobs=4)
        slow.set()
        other.join(20)
        assert [event.outcome for event in server.happened("arrival") if event.client == 1][1] == "rejected"
        told = sum(remembered(tmp_path / name)["told gradient"] for name in ("c0", "c1"))
        np.testing.assert_allclose(strategy.total, told, atol=1e-9)


def test_the_end_of_the_federation_ends_the_run() -> None:
    with plain(uploads=3) as server:
        assert made(server).run_with(one).why == "ended"
        assert made(server).run_with(one).jobs == 0
        assert server.taken.total() == 3


@pytest.mark.parametrize(
    ("kind", "refusal", "says"),
    [
        ("hello", Sorry(401, "token", "the token is not valid"), "the token is not valid"),
        ("job", Sorry(403, "suspended", "you are\x1b[31m suspended"), r"you are \[31m suspended"),
        ("update", Sorry(403, "revoked", "your invitation was revoked"), "was revoked"),
        ("update", Sorry(413, "too-large", "at most 20 bytes"), "at most 20 bytes"),
        ("job", Sorry(404, "path", "there is no such path"), "no such path"),
        ("heartbeat", Sorry(403, "suspended", "you are suspended"), "you are suspended"),
    ],
)
def test_refusals_are_told_at_once_in_the_servers_words(kind: str, refusal: Sorry, says: str, tmp_path: Path) -> None:
    def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
        if kind == "heartbeat":
            while "heartbeat" not in server.kinds():
                time.sleep(0.01)
            time.sleep(0.3)
        return one(job, number, memory, delay)

    with plain(lease=0.1) as server:
        server.trouble[kind] = [refusal]
        with pytest.raises(Refused, match=says) as raised:
            made(server, tmp_path).run_with(train, jobs=2)
        assert raised.value.status == refusal.status
        assert server.kinds().count(kind) == 1
    assert (tmp_path / "pending.safetensors").exists() == (refusal.code == "revoked")


def test_who_was_let_go_joins_again_and_begins_anew(tmp_path: Path) -> None:
    with remembering() as server:

        def forgotten(progress: Progress) -> None:
            if progress.jobs == 2:
                server.forget("alice")

        summary = made(server, tmp_path).run_with(changing(), jobs=4, progress=forgotten)
        assert summary.jobs == 4
        assert server.kinds().count("hello") == 2
        assert [event.first for event in server.happened("arrival")] == [True, False, True, False]


def test_large_bodies_go_through_in_pieces(tmp_path: Path) -> None:
    d = 700_000
    w0 = np.arange(d, dtype=np.float32)
    with serving(strategies.create("fedasync", clients=1), w0) as server:
        server.trouble["update"] = ["drop after", "", "cut"]
        seen: list[Vector] = []

        def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
            seen.append(job.model)
            assert not job.model.flags.writeable
            return Trained({"model": job.model + 1}, 1)

        made(server, tmp_path).run_with(train, jobs=3)
        assert set(server.taken.values()) == {1}
        assert seen[0].tobytes() == w0.tobytes()
        assert "100-continue" in {headers.get("expect") for kind, headers in server.asked if kind == "update"}
        assert not any("transfer-encoding" in headers for _, headers in server.asked)


def test_a_version_is_not_sent_twice() -> None:
    with serving(strategies.create("masfl", clients=1, buffer=3, beta=0.5), ZERO) as server:
        extras: list[Any] = []

        def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
            extras.append((job.version, job.first, {name: vector.tobytes() for name, vector in job.extras.items()}))
            return Trained({"gradient": np.full(D, number + 1, np.float32)}, 1)

        made(server).run_with(train, jobs=8)
        have = [headers.get("aflock-have") for kind, headers in server.asked if kind in ("job", "update")]
    assert [(version, first) for version, first, _ in extras] == [(0, True)] + [(k // 3, False) for k in range(7)]
    assert extras[0][2] == {}
    assert len({extras[k][2]["momentum"] for k in (1, 2, 3)}) == 1
    assert extras[4][2] != extras[3][2]
    assert have[:2] == [None, None]  # the first job brought the model alone
    assert have[2:6] == ["0", "0", "0", "1"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"protocol": 2}, "speaks protocol 2, this client 1"),
        ({"length": D + 1}, "a body of 20 bytes comes where 24 are due"),
        ({"length": -1}, "`length` is not a whole number"),
        ({"length": True}, "`length` is not a whole number"),
        ({"federation": "../../etc"}, "the name of the federation is none"),
        ({"needs": []}, "`needs` and `changes`"),
        ({"changes": ["delta"]}, "`needs` and `changes`"),
        ({"needs": ["Gradient!"]}, "not a list of names"),
        ({"encoding": "pickle"}, "`encoding` is none of"),
        ({"lease": 0}, "`lease` is not a positive number"),
        ({"lease": None}, "`lease` is not a positive number"),
        ({"local": {"eta_l": 1}}, "`local` names no rule"),
        ({"state": 3}, "`state` is not a text"),
    ],
)
def test_nonsense_is_an_error_in_one_sentence(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with plain() as server:
        server.greeting |= change
        with pytest.raises(Nonsense, match=says):
            made(server, tmp_path).run_with(one)


def test_a_client_without_a_number_is_told_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aflock.client")
    with plain() as server:
        made(server).run_with(one, jobs=1)
        assert "alice is client 0 of federation" in caplog.text
        assert "(jobs): 1 job, version 1" in caplog.text
        server.greeting |= {"number": None, "state": "gathering"}
        made(server, name="bob").run_with(one, jobs=0)
    assert re.search("bob takes part in federation .*, which waits for more clients: asgd, version 1", caplog.text)
    assert "None" not in caplog.text


def test_a_model_that_is_not_finite_is_not_trained() -> None:
    with serving(strategies.create("asgd", clients=1), ZERO) as server:
        server.strategy.w[0] = np.nan
        with pytest.raises(Nonsense, match="has diverged"):
            made(server).run_with(one)
        assert server.kinds()[-1] == "decline"


# --- while it trains -------------------------------------------------------------------------------------------------


def test_heartbeats_keep_a_job_alive() -> None:
    with plain(lease=0.09) as server:
        server.trouble["heartbeat"] = ["", "drop before", Sorry(503), ""]

        def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
            while server.kinds().count("heartbeat") < 6:
                time.sleep(0.01)
            return one(job, number, memory, delay)

        assert made(server).run_with(train, jobs=1).jobs == 1
        assert server.taken.total() == 1


def test_the_result_of_a_void_job_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    with plain(lease=0.06) as server:

        def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
            if number == 0:
                server.trouble["heartbeat"] = [Sorry(409, "unknown-job", "gone")]
                while "is void: gone" not in caplog.text:
                    time.sleep(0.01)
                time.sleep(0.05)
            return one(job, number, memory, delay)

        made(server).run_with(train, jobs=1)
        assert server.kinds().count("update") == 1
        assert [event.job for event in server.happened("arrival")] == [1]


def test_an_error_in_training_gives_the_job_back(tmp_path: Path) -> None:
    def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
        raise ZeroDivisionError("my own")

    with plain() as server:
        with pytest.raises(ZeroDivisionError, match="my own"):
            made(server, tmp_path).run_with(train)
        assert server.kinds() == ["hello", "job", "decline"]
        assert not server.coordinator.working


@pytest.mark.parametrize(
    ("vectors", "says"), [({"delta": ZERO}, "gave no vector 'gradient'"), ({"gradient": ZERO[:2]}, r"of shape \(2,\)")]
)
def test_vectors_the_server_cannot_use_are_not_sent(vectors: dict[str, Vector], says: str) -> None:
    with plain() as server:
        with pytest.raises(InputError, match=says):
            made(server).run_with(lambda *_: Trained(vectors, 1))
        assert server.kinds()[-1] == "decline"


def test_vectors_the_server_has_not_asked_for_are_not_sent(tmp_path: Path) -> None:
    steps: Any = np.int64(2)
    with plain(encoding="int8") as server:
        done = Trained({"control": ZERO, "gradient": ZERO, "delta": ZERO}, steps, {"control": ZERO})
        assert made(server, tmp_path).run_with(lambda *_: done, jobs=1).jobs == 1
        assert [headers["aflock-vectors"] for kind, headers in server.asked if kind == "update"] == ["gradient"]


@pytest.mark.parametrize("where", ["training", "waiting", "pushing", "silence"])
def test_stop_ends_a_run_wherever_it_is(where: str, tmp_path: Path) -> None:
    x, y = blobs(10)
    reached = threading.Event()

    def batches() -> Iterator[Any]:
        while True:
            if where == "training":
                reached.set()
                time.sleep(0.01)
            yield x, y

    strategy = strategies.create("asgd", clients=1)
    with serving(strategy, np.zeros(15, np.float32), order=[] if where == "pushing" else None) as server:
        if where == "waiting":
            server.coordinator.pull = lambda client, now, *, waits=True: None  # type: ignore[method-assign]
        if where == "silence":
            server.trouble["update"] = ["drop before"] * 1000
        client = made(server, tmp_path)
        summaries: list[clients.Summary] = []
        steps = 10**9 if where == "training" else 1
        model = nn.Linear(4, 3)
        run = threading.Thread(target=lambda: summaries.append(client.run(model, batches, steps=steps, examples=10)))
        run.start()
        kind = {"waiting": "job", "pushing": "update", "silence": "update", "training": "job"}[where]
        while kind not in server.kinds() or (where == "training" and not reached.is_set()):
            time.sleep(0.005)
        client.stop()
        if where == "pushing":  # the request that is on its way is awaited
            time.sleep(0.1)
            assert run.is_alive()
            assert server.order is not None
            server.order.append(0)
        run.join(10)
        assert [summary.why for summary in summaries] == ["stopped"]
        assert [summary.jobs for summary in summaries] == [1 if where == "pushing" else 0]
        assert ("decline" in server.kinds()) == (where in ("training", "pushing"))  # a push brings the next job
        assert (tmp_path / "pending.safetensors").exists() == (where == "silence")
        if where == "silence":
            server.trouble["update"].clear()
            assert made(server, tmp_path).run_with(one, jobs=0).jobs == 0
            assert server.taken.total() == 1


def test_stop_before_a_run_counts_and_counts_once() -> None:
    with plain() as server:
        client = made(server)
        client.stop()
        assert client.run_with(one).why == "stopped"
        assert client.run_with(one, jobs=1).why == "jobs"


def test_a_run_inside_an_event_loop_has_a_thread_of_its_own() -> None:
    """As in a notebook."""

    async def cell() -> str:
        return made(server).run_with(one, jobs=2).why

    with plain() as server:
        assert asyncio.run(cell()) == "jobs"


# --- killed ----------------------------------------------------------------------------------------------------------

CLIENT = """
import logging, os, signal, sys, time
import numpy as np
from aflock import local
from aflock.net import client as clients, keep, transport
from aflock.net.client import Client

transport.FIRST_WAIT = 0.01
url, token, folder, *rest = sys.argv[1:]
rule, draws = local.create("sgd"), np.random.default_rng()

def train(job, number, memory, delay):
    task = local.Task(lambda x, k: draws.standard_normal(x.size).astype(np.float32))
    return rule.train(job, task, 1, needs=("gradient",), changes=("gradient",), memory=memory)

def run(**options):
    return Client(url, token, state_dir=folder).run_with(train, **options)
"""

KILLED = """
def child(work):
    pid = os.fork()
    if pid == 0:
        draws.bit_generator.state = np.random.default_rng(os.getpid()).bit_generator.state
        work()
        os._exit(0)
    return pid

def dying(cls, name, before, after):
    method = getattr(cls, name)
    def wrapped(*arguments, **options):
        dying.left -= 1
        if dying.left <= 0 and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = method(*arguments, **options)
        if dying.left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    dying.left = 4
    setattr(cls, name, wrapped)

def at(cls, name, before):
    def work():
        dying(cls, name, before, not before)
        run()
    return work

chance = np.random.default_rng(7)
for _ in range(12):  # at any moment
    pid = child(run)
    time.sleep(chance.uniform(0.02, 0.25))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
for place in [(keep.Keep, "hold"), (keep.Keep, "take"), (transport.Session, "_transfer"), (os, "replace")]:
    for before in (True, False):  # and at those where it would hurt
        _, ended = os.waitpid(child(at(*place, before)), 0)
        assert os.WTERMSIG(ended) == signal.SIGKILL, ended
print(run(jobs=0).why)
"""

INTERRUPTED = """
logging.basicConfig(level=logging.INFO, format="%(message)s")

def train(job, number, memory, delay):
    print("training", flush=True)
    time.sleep(float(rest[0]))
    return local.Trained({"gradient": np.ones(job.model.size, np.float32)}, 1)

print(Client(url, token, state_dir=folder).run_with(train).why)
"""


def command(server: FakeServer, folder: Path, script: str, *rest: str) -> list[str]:
    return [sys.executable, "-c", CLIENT + script, server.url, server.token(), str(folder), *rest]


def test_a_client_killed_at_any_moment_agrees_with_the_server(tmp_path: Path) -> None:
    with remembering() as server:
        done = subprocess.run(
            command(server, tmp_path, KILLED), capture_output=True, text=True, timeout=50, cwd=TESTS, check=False
        )
        assert (done.stdout, done.returncode) == ("jobs\n", 0), done.stderr
        assert server.taken.total() > 10
        assert set(server.taken.values()) == {1}
        assert remembered(tmp_path)["told gradient"].tobytes() == server.strategy.total.tobytes()
        assert sorted(file.name for file in tmp_path.iterdir()) == ["lock", "memory.safetensors"]


@pytest.mark.parametrize(("times", "number"), [(1, signal.SIGINT), (1, signal.SIGTERM), (2, signal.SIGINT)])
def test_ctrl_c_gives_the_job_back(times: int, number: signal.Signals, tmp_path: Path) -> None:
    with plain() as server:
        script = command(server, tmp_path, INTERRUPTED, "0.3" if times == 1 else "30")
        with subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=TESTS) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "training\n"
                process.send_signal(number)
                while not server.happened("drop"):
                    time.sleep(0.01)
                if times == 2:
                    process.send_signal(number)
                out, err = process.communicate(timeout=20)
            finally:
                process.kill()
        assert not server.coordinator.working
        assert server.kinds()[-1] == "decline"
        if times == 1:
            assert (process.returncode, out) == (0, "stopped\n")
            assert "Traceback" not in err
        else:
            assert process.returncode == -signal.SIGINT
            assert SECRET not in err


def test_signals_are_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with plain() as server:
        made(server).run_with(one, jobs=1)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# --- what stays on disk ----------------------------------------------------------------------------------------------


def test_an_update_that_was_not_seen_taken_is_sent_first(tmp_path: Path) -> None:
    """Also without a memory; the client that sent it was told nothing."""
    with plain() as server:
        server.trouble["update"] = ["drop after", *[Sorry(503)] * 1000]
        with pytest.raises(Unavailable):
            made(server, tmp_path, give_up=0.05).run_with(one)
        assert server.taken.total() == 1
        server.trouble["update"].clear()
        assert made(server, tmp_path).run_with(one, jobs=1).jobs == 1
        assert list(server.taken.values()) == [1, 1]
        assert server.kinds()[-3:-1] == ["update", "job"]


def test_an_update_whose_job_was_dropped_meanwhile_is_void(tmp_path: Path) -> None:
    with plain() as server:
        server.trouble["update"] = ["drop before"] * 1000
        with pytest.raises(Unavailable):
            made(server, tmp_path, give_up=0.05).run_with(one)
        server.trouble["update"].clear()
        server.coordinator.drop(0, time.monotonic())
        assert made(server, tmp_path).run_with(one, jobs=1).jobs == 1
        assert server.taken.total() == 1


def test_files_are_the_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "state"
    modes: set[int] = set()

    def look(progress: Progress) -> None:
        modes.update(stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir())

    with remembering() as server:
        server.trouble["update"] = ["", "", *[Sorry(503)] * 1000]
        with pytest.raises(Unavailable):
            made(server, folder, give_up=0.05).run_with(changing(), progress=look)
    modes.update(stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir())
    assert {file.name for file in folder.iterdir()} == {"lock", "memory.safetensors", "pending.safetensors"}
    assert modes == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    found = state.load(folder / "pending.safetensors")
    assert (found["federation"], found["encoding"], list(found["vectors"])) == ("f00d", "float32", ["gradient"])


def test_the_state_has_a_place_of_its_own_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with plain() as server:
        Client(server.url, server.token()).run_with(one, jobs=1)
    assert [file.name for file in (tmp_path / "aflock" / "f00d" / "alice").iterdir()] == ["lock"]
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert clients._state_home() == tmp_path / "home" / ".local" / "state" / "aflock"


def test_two_processes_cannot_be_the_same_client(tmp_path: Path) -> None:
    first = Keep(tmp_path, "f00d")
    with plain() as server, pytest.raises(Occupied, match="another process works in"):
        made(server, tmp_path).run_with(one)
    first.close()
    Keep(tmp_path, "f00d").close()


def test_a_memory_of_another_federation_is_left_alone(tmp_path: Path) -> None:
    keep = Keep(tmp_path, "f00d")
    keep.hold(Parcel(1, 0, 1, 1, "float32", {"gradient": b"1234"}), {"told gradient": np.ones(1)})
    keep.take()
    keep.close()
    with pytest.raises(StateError, match="belongs to another federation"):
        Keep(tmp_path, "beef")
    again = Keep(tmp_path, "f00d")
    assert again.memory["told gradient"].tolist() == [1.0]
    assert again.pending is None
    again.forget()
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]
    again.close()


def test_a_full_disk_gives_the_job_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with plain() as server:
        monkeypatch.setattr(state, "save", full)
        with pytest.raises(StateError, match="No space left on device"):
            made(server, tmp_path).run_with(one)
        assert server.kinds()[-1] == "decline"


def test_a_lost_memory_is_told_and_leaving_is_the_way_out(tmp_path: Path) -> None:
    x, y = blobs(10)
    with serving(strategies.create("masfl", clients=1, buffer=1, beta=0.5), np.zeros(15, np.float32)) as server:
        made(server, tmp_path).run(nn.Linear(4, 3), [(x, y)], jobs=3)
        (tmp_path / "memory.safetensors").unlink()
        with pytest.raises(StateError, match=r"is gone .*; put its state_dir back, or call leave\(\)"):
            made(server, tmp_path).run(nn.Linear(4, 3), [(x, y)], jobs=1)
        made(server, tmp_path).leave()
        assert server.kinds()[-1] == "leave"
        made(server, tmp_path).run(nn.Linear(4, 3), [(x, y)], jobs=2)
        assert [event.first for event in server.happened("arrival")] == [True, False, False, True, False]


def test_a_rule_that_misses_something_else_says_so() -> None:
    x, y = blobs(10)
    strategy, says = strategies.create("asgd", clients=1), "needs the job's extra vector 'momentum'"
    with serving(strategy, np.zeros(15, np.float32)) as server, pytest.raises(MissingVector, match=says):
        made(server).run(nn.Linear(4, 3), [(x, y)], local="masfl")


# --- secrets and certificates ----------------------------------------------------------------------------------------


def test_the_token_is_never_shown(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.DEBUG)
    shown = []
    with plain() as server:
        client = made(server, give_up=0.3, timeout=0.2)
        server.trouble["hello"] = ["drop before", "cut", "hang"]
        server.trouble["job"] = [Sorry(302), "cut"]
        for _ in range(3):
            try:
                client.run_with(one, jobs=1)
            except AflockError as error:
                shown += [repr(error), str(error), repr(error.__cause__), str(error.__traceback__)]
        shown += [repr(client), repr(Session(server.url, server.token()))]
    with pytest.raises(ParameterError) as raised:
        Client(server.url, f"aflock1.alice.{SECRET}\u00e9")
    assert SECRET not in "".join([*shown, str(raised.value), caplog.text, *capfd.readouterr()])
    assert "alice" in repr(client)


def test_a_token_file_brings_the_token_and_the_authority(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "alice.token"
    with plain() as server:
        file.write_text(server.token() + "\n")
        file.chmod(0o644)
        assert Client(server.url, file, keep=False).run_with(one, jobs=1).jobs == 1
        assert Client(server.url, str(file), keep=False).name == "alice"
    assert "run chmod 600" in caplog.text
    with pytest.raises(InputError, match="there is no token file"):
        Client(server.url, "nobody.token")


@pytest.mark.parametrize(
    "url", ["", "host:8443", "ftp://host", "https://", "http://host:1", "https://user:word@host", "http://h/?q=1", "http://127.0.0.1:x"]
)  # fmt: skip
def test_an_address_must_be_one_and_keep_the_token_to_itself(url: str) -> None:
    with pytest.raises(ParameterError, match=r"URL|token unencrypted"):
        Client(url, f"aflock1.alice.{SECRET}")


def test_plain_http_is_for_this_machine_or_by_demand() -> None:
    for host in ("localhost", "127.0.0.1", "127.8.8.8", "[::1]"):
        address(f"http://{host}:80")
    assert address("http://example.org", insecure=True).hostname == "example.org"
    Client("http://example.org", f"aflock1.alice.{SECRET}", insecure=True)


def test_a_proxy_is_not_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert transport._proxy(address("http://example.org", insecure=True)) == "http://127.0.0.1:9"
    with plain() as server:
        assert made(server).run_with(one, jobs=1).jobs == 1


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tls.Certificates:
    return tls.prepare(tmp_path_factory.mktemp("fed"), ["127.0.0.1"])


def test_an_encrypted_line_to_a_server_that_proves_itself(certificates: tls.Certificates) -> None:
    assert certificates.ca is not None
    with plain(tls=tls.server_context(certificates)) as server:
        server.trouble["update"] = ["drop after", "cut", "drop before"]
        for ca in (certificates.ca, certificates.ca.read_text()):
            assert made(server, ca=ca).run_with(one, jobs=2).jobs == 2
        with pytest.raises(Untrusted, match="check the URL, the ca"):
            made(server).run_with(one)


def test_a_client_without_the_certificate_it_needs_is_told(certificates: tls.Certificates, tmp_path: Path) -> None:
    assert certificates.ca is not None
    own = tls.issue_client(certificates.ca.parent.parent, "alice")
    pair: dict[str, Any] = {"certificate": tmp_path / "alice.pem", "key": tmp_path / "alice.key"}
    for file, content in zip(pair.values(), own, strict=True):
        file.write_bytes(content)
    with plain(tls=tls.server_context(certificates, certificates.ca)) as server:
        assert made(server, ca=certificates.ca, **pair).run_with(one, jobs=1).jobs == 1
        with pytest.raises(Unavailable, match="if it asks for certificates, give this client certificate= and key="):
            made(server, ca=certificates.ca, give_up=0.1).run_with(one)


def test_https_to_a_server_without_it_is_told() -> None:
    with plain() as server, pytest.raises(Untrusted, match=r"WRONG_VERSION_NUMBER|wrong version"):
        Client(server.url.replace("http", "https"), server.token(), keep=False, give_up=0.5).run_with(one)


def test_http_to_a_server_with_tls_is_told(certificates: tls.Certificates) -> None:
    with plain(tls=tls.server_context(certificates)) as server:
        url = server.url.replace("https", "http")
        with pytest.raises(Unavailable, match=r"the connection broke; is it https://\?"):
            Client(url, server.token(), keep=False, give_up=0.1).run_with(one)
        with pytest.raises(Unavailable, match=r"is it https://\?"):
            status(url)
    with plain() as server:  # who has had an answer knows what is spoken
        server.trouble["job"] = ["drop before"] * 1000
        with pytest.raises(Unavailable, match=r"the connection broke$"):
            made(server, give_up=0.1).run_with(one)


def test_the_status_says_whom_it_has_spoken_to(certificates: tls.Certificates) -> None:
    with plain() as server:
        assert status(server.url) == {"version": 0, "state": "running", "certificate": None, "verified": False}
        server.trouble["status"] = [Sorry(401, "token", "send your token")]
        with pytest.raises(Refused, match="send your token"):
            status(server.url)
    with pytest.raises(Unavailable):
        status(server.url, timeout=1)
    shown = tls.fingerprint(certificates.certificate.read_bytes())
    with plain(tls=tls.server_context(certificates)) as server:
        assert status(server.url)["verified"] is False
        assert status(server.url)["certificate"] == shown
        assert status(server.url, ca=certificates.ca)["verified"] is True
        assert status(server.url, fingerprint=shown.replace(":", "").lower())["verified"] is True
        with pytest.raises(Untrusted, match="shows the certificate"):
            status(server.url, fingerprint="00" * 32)
        with pytest.raises(Untrusted, match="not of that authority"):
            status(server.url, ca=_other_authority())


def _other_authority() -> str:
    return ssl.DER_cert_to_PEM_cert(next(iter(_system_authorities())))


def _system_authorities() -> list[bytes]:
    context = ssl.create_default_context()
    return context.get_ca_certs(binary_form=True)


# --- the session on its own ------------------------------------------------------------------------------------------


def test_sessions_side_by_side() -> None:
    """The way a benchmark uses them."""

    async def client(server: FakeServer, number: int) -> int:
        async with Session(server.url, server.token(f"c{number}")) as session:
            await session.hello()
            pulled, count = await session.pull(wait=1), 0
            while pulled is not None and count < 5:
                parcel = pulled.pack({"gradient": np.full(D, number, np.float32)}, steps=1, examples=1)
                answer = await session.push(parcel, next=True)
                pulled, count = answer.next, count + 1
            if pulled is not None:
                assert await session.heartbeat(pulled.id) == 60.0
                await session.decline(pulled.id)
            return count

    async def all_of(server: FakeServer) -> list[int]:
        return list(await asyncio.gather(*(client(server, k) for k in range(16))))

    with plain(clients=16) as server:
        assert asyncio.run(all_of(server)) == [5] * 16
        assert Counter(event.client for event in server.happened("arrival")) == dict.fromkeys(range(16), 5)
        assert len(server.happened("drop")) == 16


def test_a_session_asks_for_the_model_and_the_status_and_leaves() -> None:
    async def look(server: FakeServer) -> None:
        async with Session(server.url, server.token()) as session:
            with pytest.raises(InputError, match="call hello"):
                await session.pull()
            hello = await session.hello()
            assert (hello.number, hello.strategy, hello.length) == (0, "asgd", D)
            found = await session.model()
            assert found is not None
            assert (found[0], found[1].tobytes()) == (0, ZERO.tobytes())
            assert await session.model(have=0) is None
            assert (await session.status())["version"] == 0
            server.coordinator.suspend(0, time.monotonic())
            assert await session.pull(wait=0) is None
            await session.leave()
        with pytest.raises(InputError, match="the session is closed"):
            await session.hello()

    with plain() as server:
        asyncio.run(look(server))


def test_a_client_that_is_running_cannot_be_run_again() -> None:
    with plain() as server:
        client = made(server)
        errors: list[str] = []

        def again(progress: Progress) -> None:
            thread = threading.Thread(target=lambda: _raises(errors, lambda: client.run_with(one)))
            thread.start()
            thread.join(10)

        client.run_with(one, jobs=1, progress=again)
        assert errors == ["this client is running already; make another one, with a token of its own"]


def _raises(errors: list[str], call: Callable[[], Any]) -> None:
    try:
        call()
    except InputError as error:
        errors.append(str(error))


# --- aflock join -----------------------------------------------------------------------------------------------------

RECIPE = """
import torch
from torch import nn

model = nn.Linear(4, 3)
batches = [(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))]
"""


def join(server: FakeServer, folder: Path, recipe: str, *options: str) -> int:
    """`aflock join`; its exit code."""
    (folder / "my_client.py").write_text(RECIPE + recipe)
    (folder / "token").write_text(server.token())
    (folder / "token").chmod(0o600)
    files = ["--token-file", str(folder / "token"), "--recipe", str(folder / "my_client.py")]
    return cli.main([*options, "join", server.url, *files, "--state-dir", str(folder / "state"), "--jobs", "1"])


def fifteen(**options: Any) -> Any:
    return serving(strategies.create("asgd", clients=1), np.zeros(15, np.float32), **options)


@pytest.mark.parametrize(
    ("recipe", "code", "says"),
    [
        ("batches = [(torch.ones(2, 5), torch.zeros(2, dtype=torch.long))]", 1, "RuntimeError: mat1 and mat2 shapes"),
        (
            "def batches():\n    raise KeyError('mine')",
            1,
            "training failed in .*my_client.py, line 8: KeyError: 'mine'",
        ),
        (
            "def batches():\n    return open('no.csv')",
            1,
            "failed in .*my_client.py, line 8: FileNotFoundError: .*no.csv",
        ),
        ("def steps():\n    raise BrokenPipeError('mine')", 1, "my_client.py, line 8: BrokenPipeError: mine"),
        ("def loss(output, y):\n    raise ValueError('a\\nb')", 1, "ValueError: a b\\n"),
        ("def model():\n    raise KeyError('mine')", 2, "my_client.py cannot be run: KeyError: 'mine'"),
        ("1 / 0", 2, "cannot be run: ZeroDivisionError: division by zero"),
        ("model = nn.Linear(4, 4)", 2, "has 20 weights, the federation's 15"),
        ("buffers = 'loca'", 2, "loca"),
    ],
)
def test_a_recipe_that_fails_says_so_in_one_line(
    recipe: str, code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fifteen() as server:
        assert join(server, tmp_path, recipe) == code
        assert not server.coordinator.working
    err = capsys.readouterr().err
    assert (err.startswith("aflock: "), err.count("\n")) == (True, 1)
    assert re.search(says, err)


def test_the_traceback_of_a_recipe_is_to_be_had(tmp_path: Path) -> None:
    with fifteen() as server, pytest.raises(TrainingFailed) as caught:
        join(server, tmp_path, "def batches():\n    raise KeyError('mine')", "--debug")
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_error_in_training_comes_without_a_story_about_event_loops() -> None:
    def train(job: Job, number: int, memory: Memory, delay: float) -> Trained:
        raise ZeroDivisionError("my own")

    with plain() as server, pytest.raises(ZeroDivisionError) as caught:
        made(server).run_with(train)
    assert caught.value.__context__ is None


def test_a_recipe_may_have_a_loss_and_buffers(tmp_path: Path) -> None:
    recipe = """
model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3))
buffers = "local"

def loss(output, y):
    return 2 * output.sum()
"""
    with fifteen() as server:
        assert join(server, tmp_path, recipe) == 0
        bias = server.strategy.model[-3:].copy()
    assert bias[0] == bias[2] != 0  # no cross-entropy of class 0 is like that
    assert (tmp_path / "state" / "memory.safetensors").exists()
