"""The server loads the compiled loops of its rule before it takes the first client."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from aflock import strategies
from tests.net.real_server import SMALL, joined, output, served

ROUNDS = 6
"""Updates of each client, after which every rule has made a step."""


@pytest.mark.parametrize("rule", ["asgd", "ace"])
def test_no_update_waits_for_a_compiled_loop(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numba prints a line for every loop that it compiles or loads from its cache."""
    monkeypatch.setenv("NUMBA_DEBUG_CACHE", "1")
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    folder = tmp_path / "fed"
    with served(folder, {**SMALL, "strategy": {"name": rule}, "federation": {"clients": 2}}) as server:
        ready = _loops(folder)
        assert ready  # else this test sees nothing
        peers = [joined(server, name) for name in ("alice", "bob")]
        needs = peers[0].hello()["needs"]
        for _ in range(ROUNDS):
            for peer in peers:
                if peer.pull()[0] == 200:
                    names = ["gradient"] if peer.job["aflock-first"] == "1" else needs
                    assert peer.push(*[np.ones(8)] * len(names), names=",".join(names))[0] == 200
        assert server.status()["version"] >= 2
        assert _loops(folder) == ready


def _loops(folder: Path) -> list[str]:
    """What numba has said so far about the loops of the server."""
    return [line for line in output(folder, "out").read_text().splitlines() if line.startswith("[cache]")]


LOADED = """
import json, os, sys
import numpy as np
from numba.core.dispatcher import Dispatcher
from aflock import strategies
from aflock.net.protocol.wire import UpdateHead
from aflock.net.server import main, warm_up
from aflock.net.server.bodies import Bodies
from aflock.net.server.settings import Settings

def loaded():
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "aflock"]
    found = {id(loop): loop for module in modules for loop in vars(module).values() if isinstance(loop, Dispatcher)}
    return {f"{loop.__name__}{signature}" for loop in found.values() for signature in loop.signatures}

def work(settings, length, rounds):
    federation, bodies = settings.federation(np.zeros(length, np.float32)), Bodies(1 << 20)
    names = [f"client-{k}" for k in range(settings.section("federation").clients)]
    for name in names:
        federation.apply({"k": "hello", "t": 0.0, "name": name, "gen": 1}, b"")
    for name in names * rounds:
        given = federation.apply({"k": "pull", "t": 0.0, "name": name}, b"")
        if given is None:
            continue
        needs = ("gradient",) if given.job.first else tuple(federation.strategy.needs)
        head, body = UpdateHead(given.job.version, 1, 1, needs, "float32"), bodies.allocate(4 * length * len(needs))
        np.frombuffer(body, np.float32)[:] = 1e-3
        norms = federation.check_vectors(federation.clients[name], head, body)
        record = {"k": "update", "t": 0.0, "name": name, "j": given.id, "v": head.version, "s": 1, "e": 1, "next": 0}
        federation.apply(record | {"n": list(needs), "enc": head.encoding, "norm": norms}, body)
    assert federation.version >= 2, federation.version

def in_child(play):
    # A fork has loaded nothing yet, whatever its siblings have loaded.
    reading, writing = os.pipe()
    if not os.fork():
        os.write(writing, json.dumps(play()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        found = json.loads(answer.read())
    os.wait()
    return found

def late(settings, warm):
    if warm:
        warm_up.load_kernels(settings)
    before = loaded()
    work(settings, 16, int(sys.argv[1]))
    return sorted(loaded() - before)

assert not loaded()
for name in strategies.names():
    document = {"strategy": {"name": name}, "model": {"name": "vector", "length": 16}, "federation": {"clients": 12}}
    settings = Settings.build(document)
    print(json.dumps([name, *(in_child(lambda: late(settings, warm)) for warm in (False, True))]), flush=True)
"""


def test_the_warm_up_of_every_rule_loads_all_that_its_updates_use() -> None:
    found = subprocess.run([sys.executable, "-c", LOADED, str(ROUNDS)], capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert [name for name, _, _ in rows] == list(strategies.names())
    for name, cold, warm in rows:
        assert cold, name  # else this test sees nothing
        assert warm == [], name
