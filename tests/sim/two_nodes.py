"""A real Ray cluster of two nodes on this machine, on loopback only, that ends with the tests that use it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HEAD, OTHER = "127.0.0.2", "127.0.0.3"


class TwoNodes:
    """The head node and another one; each is a `ray start --block` that this process has started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        port = _free_port()
        self.address = f"{HEAD}:{port}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._start(HEAD, "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}")
        self._wait_until_started(HEAD)
        self.start_other()

    def start_other(self) -> None:
        """Starts the second node, or starts it again."""
        self._start(OTHER, f"--address={self.address}")

    def _start(self, node: str, *options: str) -> None:
        ray = str(Path(sys.executable).parent / "ray")
        command = [ray, "start", *options, f"--node-ip-address={node}", "--num-cpus=1", "--block"]
        command += ["--object-store-memory=150000000", "--disable-usage-stats"]
        with open(self.folder / f"start-{node}.log", "ab") as log:
            self._processes[node] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def _wait_until_started(self, node: str) -> None:
        log = self.folder / f"start-{node}.log"
        deadline = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def kill_other(self) -> None:
        """Kills the second node with all of its processes, as a loss of power would."""
        self._kill(OTHER)

    def _kill(self, node: str) -> None:
        """SIGKILL to the node's whole session; its raylet starts workers in groups of their own."""
        process = self._processes.pop(node)
        for pid in _with_descendants(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """Ends both nodes."""
        for node in list(self._processes):
            self._kill(node)


def _free_port() -> int:
    """Below the range from which the system gives ports: other tests must not get it before the head node has it."""
    while True:
        port = random.randrange(20_000, 30_000)
        with suppress(OSError), socket.socket() as free:
            free.bind(("", port))
            return port


def _with_descendants(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        with suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """Starts a cluster; everything of it is gone afterwards."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}  # also for the programs of the tests
    # Not pytest's folder for temporary files: the paths of Ray's sockets may have 107 characters at most.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    cluster = TwoNodes(folder)
    try:
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
