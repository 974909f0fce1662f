"""A client that is killed or interrupted, as a real process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.net.client.fake_server import SECRET, FakeServer
from tests.net.client.helpers import ROOT, made, one, plain, remembered, remembering

pytestmark = pytest.mark.timeout(60)

CLIENT = """
import logging, os, signal, sys, time
import numpy as np
from aflock import local
from aflock.net.client import session as transport, state
from aflock.net.client.client import Client

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

kept = state.ClientState
methods = [(kept, "store_pending"), (kept, "accept_pending"), (transport.Session, "push"), (os, "replace")]
chance = np.random.default_rng(7)
for _ in range(12):  # at any moment
    pid = child(run)
    time.sleep(chance.uniform(0.02, 0.25))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
for method in methods:
    for before in (True, False):  # and at those where it would hurt
        _, ended = os.waitpid(child(at(*method, before)), 0)
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
            command(server, tmp_path, KILLED), capture_output=True, text=True, timeout=50, cwd=ROOT, check=False
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
        with subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
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
