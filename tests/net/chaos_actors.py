"""Who takes part in a storm (chaos.py): a server and clients, each a process of its own that may be killed any time.

Both are forked from a process that has imported everything already: what a kill costs is the work, not the imports.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import uvloop  # noqa: F401

from aflock import cli, local, strategies
from aflock.local import Memory, Task, Trained
from aflock.net.client import session as transport
from aflock.net.client.client import Client
from aflock.net.client.session import Answer, Session
from aflock.net.client.state import EncodedUpdate
from aflock.net.storage import data_folder as store
from aflock.types import Job

CLIENTS = 8

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


@dataclass(frozen=True)
class Acknowledged:
    """An update the server has told its client to be taken."""

    client: str
    job: int
    outcome: str
    staleness: int
    version: int
    sha256: str


class Log:
    """What a client was told, on disk before it acts upon it."""

    def __init__(self, file: Path, client: str) -> None:
        self._client = client
        self._file = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        whole = os.pread(self._file, 1 << 30, 0).rfind(b"\n") + 1  # the last line of a killed client may be torn
        os.ftruncate(self._file, whole)
        os.lseek(self._file, whole, os.SEEK_SET)

    def add(self, update: EncodedUpdate, answer: Answer) -> None:
        """One more."""
        sha256 = hashlib.sha256(b"".join(bytes(vector) for vector in update.vectors.values())).hexdigest()
        receipt = answer.receipt
        said = Acknowledged(self._client, update.job, receipt.outcome, receipt.staleness, answer.version, sha256)
        os.write(self._file, json.dumps(asdict(said)).encode() + b"\n")
        os.fsync(self._file)

    @staticmethod
    def read(file: Path) -> list[Acknowledged]:
        """All whole lines."""
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        return [Acknowledged(**json.loads(line)) for line in lines]


class Clock:
    """`time.time` of a machine whose clock is wrong by so many seconds."""

    def __init__(self, offset: float) -> None:
        self._offset = offset

    def time(self) -> float:
        """What that machine takes it for."""
        return time.time() + self._offset


def serve_federation(file: str, folder: str, port: int, output: str, offset: float) -> None:
    """`aflock serve`, on a machine whose clock is off."""
    _settle_in(output)
    with mock.patch.object(store, "time", Clock(offset)):
        sys.exit(cli.main(["serve", file, "--data-dir", folder, "--http", f"--set=server.port={port}"]))


@dataclass(frozen=True)
class Role:
    """What a client process is told."""

    name: str
    token: str
    rule: str
    params: dict[str, Any]
    log: str
    output: str
    state: str | None = None
    """Where it remembers; None: in memory only."""
    pause: float = 0.02
    """Seconds it works on a job, at most."""
    seed: int = field(default_factory=lambda: random.randrange(2**31))


def take_part(url: str, role: Role, jobs: int | None) -> None:
    """`aflock.Client`, impatient, until it is killed or so many jobs are done."""
    _settle_in(role.output)
    log, push = Log(Path(role.log), role.name), Session.push

    async def logged(session: Session, update: EncodedUpdate, *, next: bool = False) -> Answer:
        answer = await push(session, update, next=next)
        log.add(update, answer)
        return answer

    def hasty(pause: float) -> float:
        return random.uniform(0.01, 0.15)

    with mock.patch.object(Session, "push", logged), mock.patch.object(transport, "jittered", hasty):
        client = Client(url, role.token, state_dir=role.state, keep=role.state is not None)
        client.run_with(_Trainer(role), examples=10, jobs=jobs)


class _Trainer:
    """Gradients at random, in the form the federation's rule asks for."""

    def __init__(self, role: Role) -> None:
        strategy = strategies.create(role.rule, CLIENTS, **role.params)
        self._needs, self._changes = strategy.needs, strategy.changes
        self._rule = local.made("auto", {}, strategy.client_half)
        self._pause, self._draws = role.pause, np.random.default_rng(role.seed)

    def __call__(self, job: Job, number: int, memory: Memory, delay: float) -> Trained:
        gradient = self._draws.standard_normal(job.model.size).astype(np.float32)
        time.sleep(self._draws.uniform(0, self._pause))
        task = Task(lambda x, k: gradient)
        return self._rule.train(job, task, needs=self._needs, changes=self._changes, memory=memory, delay=delay)


def _settle_in(output: str) -> None:
    """What this process says goes to a file; Ctrl-C is for the one that started it, and none outlives that one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the parent is the process it was forked from,
    keeps_alive: Any = forkserver._forkserver
    os.close(keeps_alive._forkserver_alive_fd)  # which ends when nobody holds this any more
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
