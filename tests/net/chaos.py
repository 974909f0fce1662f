"""A storm over a federation: its server and clients are killed, its line is cut, its disk fills up, its clock jumps.

    python -m tests.net.chaos --kills 1000

Eight clients work all the while and write down what they are told. After the storm a calm server lets them finish, and
chaos_checks.py compares what they were told with what the server has in its journal, trace and model.

What happens, at random:

    the server     SIGKILL after 0.05 to 4 seconds, while it starts, or while it stops after SIGTERM
    its journal    is left with a torn batch at its end, as by a kill in the middle of a write
    its disk       is full for a moment (RLIMIT_FSIZE), in the middle of a batch or from the start
    its clock      is minutes off after a restart, either way
    clients        SIGKILL and a new start; SIGSTOP for longer than their lease
    connections    are cut in the middle of requests and answers; answers are lost (chaos_proxy.py)
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from aflock import config
from aflock.net.identity import members
from aflock.net.storage import segment
from aflock.net.storage.journal import Journal
from tests.net import chaos_actors as actors
from tests.net.chaos_actors import CLIENTS, Log, Role
from tests.net.chaos_checks import Numbers, check, check_memories
from tests.net.chaos_proxy import Proxy

READY_SECONDS, CALM_SECONDS = 60.0, 120.0
LIVES = (*[(0.05, 1.5)] * 6, (1.5, 4.0))
"""Seconds from one kill to the next: mostly short; some long enough for leases to run out."""
LEASE = 0.8

_CONTEXT = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Weather:
    """What kind of federation the storm is over."""

    rule: str
    params: dict[str, Any] = field(default_factory=dict)
    length: int = 30_000
    """Weights of the model: an update of so many is what connections are cut in the middle of."""
    archive: bool = False
    keeps: bool = False
    """Whether clients remember on disk."""
    rounds: bool = False
    """Whether nobody goes on before a cohort has reported."""
    federation: dict[str, Any] = field(default_factory=dict)

    def document(self) -> config.Document:
        """The federation file."""
        return {
            "strategy": {"name": self.rule, **self.params},
            "model": {"name": "vector", "length": self.length},
            "federation": {"clients": CLIENTS, **self.federation},
            "server": {"snapshot": 1, "archive": self.archive, "lease": LEASE, "rate": 10_000.0},
        }


WEATHERS = {
    "plain": Weather("fedbuff", {"buffer": 3}, federation={"concurrency": 6}),
    "memory": Weather(
        "ace", {"memory": "client"}, length=3_000, archive=True, keeps=True, federation={"max_staleness": 8}
    ),
    "rows": Weather("ca2fl", {"buffer": 3, "cache": "disk"}, length=10_000, archive=True),
    "rounds": Weather("fedavg", {"buffer": 4}, keeps=True, rounds=True),
}


class Broken(AssertionError):
    """A process has ended that nobody had killed."""


class Storm:
    """One federation and all that befalls it."""

    def __init__(self, weather: Weather, folder: Path, seed: int) -> None:
        self.weather, self.folder, self.seed = weather, folder, seed
        self.draws = random.Random(seed)
        self.happened: Counter[str] = Counter()
        self._fed, self._file = folder / "fed", folder / "fed.toml"
        self._port = _free_port(self.draws)
        self._proxy = Proxy(self._port, 16 * weather.length, self.draws)
        self._server: ForkServerProcess | None = None
        self._is_ready = False
        self._had_no_room = False
        """Whether the disk was full in the server's present life."""
        self._clients: dict[str, ForkServerProcess] = {}
        self._roles: dict[str, Role] = {}

    # -- before, during and after -----------------------------------------------------------------------------------

    async def run(self, kills: int) -> Numbers:
        """So many kills of the server, then calm; raises if anything is amiss afterwards."""
        self._prepare()
        try:
            port = await self._proxy.start()
            url = f"http://127.0.0.1:{port}"
            async with self._troubled(url):
                while self.happened["kills"] < kills:
                    await self._live()
            await self._calm_down(url)
        finally:
            self._end_all()
            self._proxy.close()
        return self._check()

    def _prepare(self) -> None:
        self._fed.mkdir(parents=True)
        self._file.write_text(config.text(self.weather.document()), encoding="utf-8")
        for k in range(CLIENTS):
            name = f"c{k}"
            self._roles[name] = Role(
                name,
                members.invite(self._fed, name),
                self.weather.rule,
                self.weather.params,
                str(self.folder / f"{name}.acks"),
                str(self.folder / f"{name}.out"),
                str(self.folder / f"{name}.state") if self.weather.keeps else None,
            )

    @asynccontextmanager
    async def _troubled(self, url: str) -> AsyncIterator[None]:
        """Inside, clients work and things happen to them and to the disk."""
        for name in self._roles:
            self._start_client(url, name)
        troubles = [self._kill_clients(url), self._freeze_clients(), self._fill_disk()]
        tasks = [asyncio.create_task(trouble) for trouble in troubles]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
        for error in found:
            if isinstance(error, Exception):
                raise error

    async def _calm_down(self, url: str) -> None:
        """A server that nobody kills; every client settles what it had not seen taken, and does two more jobs.

        Where there are rounds, nobody may go before the others are done: the last round would never fill.
        """
        before = self._receipts()
        for name in self._roles:
            self._kill_client(name)
        self._proxy.calm = True
        self._start_server()
        await self._until_ready()
        for name in self._roles:
            self._start_client(url, name, jobs=None if self.weather.rounds else 2)
        await _within(CALM_SECONDS, self._two_more_each(before) if self.weather.rounds else self._all_done())
        assert self._server is not None
        self._server.terminate()
        await _within(CALM_SECONDS, _ended(self._server))
        if self._server.exitcode != 0:
            raise Broken(f"the server ended with {self._server.exitcode}")

    def _receipts(self) -> dict[str, int]:
        return {name: len(Log.read(Path(role.log))) for name, role in self._roles.items()}

    async def _two_more_each(self, before: dict[str, int]) -> None:
        while any(count < before[name] + 2 for name, count in self._receipts().items()):
            self._check_clients()
            await asyncio.sleep(0.1)
        for name in self._roles:
            self._kill_client(name)

    async def _all_done(self) -> None:
        for name, client in self._clients.items():
            await _ended(client)
            if client.exitcode != 0:
                raise Broken(f"{name} ended with {client.exitcode}: {_tail(self.folder / f'{name}.out')}")

    def _check(self) -> Numbers:
        told = [one for role in self._roles.values() for one in Log.read(Path(role.log))]
        self.happened["receipts"] = len(told)
        self.happened.update({f"connections: {fate}": count for fate, count in self._proxy.met.items()})
        numbers = check(self._fed, told, archive=self.weather.archive)
        if self.weather.params.get("memory") == "client":
            check_memories(self._fed, [Path(role.state) for role in self._roles.values() if role.state])
        said = (self.folder / "server.out").read_text(encoding="utf-8", errors="replace")
        assert "Traceback" not in said, said[said.index("Traceback") :][:3000]
        return numbers

    # -- the server -------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        """One life of the server, to its violent end."""
        draws = self.draws
        self._start_server()
        if self.happened["kills"] < 3 or draws.random() < 0.2:  # the first ones: before there is anything
            await asyncio.sleep(draws.uniform(0.0, 0.3))
            self._kill_server("killed while it started")
        elif draws.random() < 0.05:
            await self._start_without_room()
        else:
            await self._until_ready()
            await asyncio.sleep(draws.uniform(*draws.choice(LIVES)))
            await self._end_server()
        if draws.random() < 0.3 and _tear(self._fed / "journal", draws):
            self.happened["torn batches"] += 1
        self._check_clients()

    async def _start_without_room(self) -> None:
        """It may give up, or work as well as it can."""
        self._limit_files(self.draws.choice((0, self.draws.randrange(self._last_segment() + self._update))))
        await asyncio.sleep(self.draws.uniform(0.2, 1.0))
        self._kill_server("killed on a full disk")

    async def _end_server(self) -> None:
        assert self._server is not None
        if self.draws.random() < 0.1:
            self._server.terminate()
            await asyncio.sleep(self.draws.uniform(0.0, 0.2))
            self._kill_server("killed while it stopped")
        else:
            self._kill_server("killed at work")

    def _start_server(self) -> None:
        offset = self.draws.uniform(-300.0, 300.0)
        arguments = (str(self._file), str(self._fed), self._port, str(self.folder / "server.out"), offset)
        self._server = _CONTEXT.Process(target=actors.serve_federation, args=arguments, daemon=True)
        self._server.start()
        self._had_no_room = False

    def _kill_server(self, how: str) -> None:
        server = self._server
        assert server is not None
        self._is_ready = False
        server.kill()
        server.join()
        if server.exitcode == 1 and self._had_no_room:
            self.happened["gave up on a full disk"] += 1
            return
        if server.exitcode not in (0, -signal.SIGKILL):  # 0: it had stopped by itself just before
            raise Broken(f"the server ended with {server.exitcode}: {_tail(self.folder / 'server.out')}")
        self.happened["kills"] += 1
        self.happened[how] += 1

    async def _until_ready(self) -> None:
        await _within(READY_SECONDS, self._answering())
        self._is_ready = True

    async def _answering(self) -> None:
        while not await _says_ready(self._port):
            assert self._server is not None
            if not self._server.is_alive():
                raise Broken(f"the server ended with {self._server.exitcode}: {_tail(self.folder / 'server.out')}")
            await asyncio.sleep(0.01)

    # -- the clients ------------------------------------------------------------------------------------------------

    def _start_client(self, url: str, name: str, jobs: int | None = None) -> None:
        client = _CONTEXT.Process(target=actors.take_part, args=(url, self._roles[name], jobs), daemon=True)
        client.start()
        self._clients[name] = client

    def _kill_client(self, name: str) -> None:
        client = self._clients[name]
        client.kill()
        client.join()
        if client.exitcode != -signal.SIGKILL:
            raise Broken(f"{name} ended with {client.exitcode}: {_tail(self.folder / f'{name}.out')}")

    def _check_clients(self) -> None:
        for name, client in self._clients.items():
            if client.exitcode not in (None, -signal.SIGKILL):
                raise Broken(f"{name} ended with {client.exitcode}: {_tail(self.folder / f'{name}.out')}")

    def _end_all(self) -> None:
        for process in [*self._clients.values(), self._server]:
            if process is not None:
                process.kill()
                process.join()

    # -- what else happens ------------------------------------------------------------------------------------------

    async def _kill_clients(self, url: str) -> None:
        while True:
            await asyncio.sleep(self.draws.uniform(0.1, 1.0))
            name = self.draws.choice(list(self._roles))
            self._kill_client(name)
            self.happened["clients killed"] += 1
            await asyncio.sleep(self.draws.uniform(0.0, 0.3))
            self._start_client(url, name)

    async def _freeze_clients(self) -> None:
        """For a while a client does nothing: its lease may run out while its update is on the way."""
        while True:
            await asyncio.sleep(self.draws.uniform(0.2, 1.5))
            client = self._clients[self.draws.choice(list(self._roles))]
            if client.is_alive() and client.pid is not None:
                os.kill(client.pid, signal.SIGSTOP)
                await asyncio.sleep(self.draws.uniform(0.1, 4.0 * LEASE))
                self.happened["clients frozen"] += 1
                if client.is_alive():
                    os.kill(client.pid, signal.SIGCONT)

    async def _fill_disk(self) -> None:
        """No file of the server can grow beyond some size: everything fails, or the next batch in its middle."""
        while True:
            await asyncio.sleep(self.draws.uniform(0.2, 1.5))
            if not self._is_ready:
                continue
            server = self._server
            room = self._last_segment() + self.draws.randrange(8 * self._update)
            self._limit_files(0 if self.draws.random() < 0.3 else room)
            self.happened["disk full"] += 1
            await asyncio.sleep(self.draws.uniform(0.05, 0.4))
            if server is self._server:
                self._limit_files(resource.RLIM_INFINITY)

    def _limit_files(self, size: int) -> None:
        server = self._server
        assert server is not None
        assert server.pid is not None
        self._had_no_room = True
        if server.is_alive():
            with suppress(ProcessLookupError):
                resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    @property
    def _update(self) -> int:
        return 4 * self.weather.length

    def _last_segment(self) -> int:
        """Bytes of the segment that is written to."""
        try:
            return max((self._fed / "journal").glob("journal-*.log")).stat().st_size
        except (ValueError, OSError):
            return 0


def _tear(folder: Path, draws: random.Random) -> bool:
    """Leaves part of a batch at the end of a dead server's journal, as a kill in the middle of a write would."""
    try:
        path = max(folder.glob("journal-*.log"))
        last = segment.Segment.open(path, int(path.stem.removeprefix("journal-")))
    except (ValueError, OSError, segment.JournalError):
        return False  # the server was killed before there was a segment
    try:
        for _ in last.records(0):
            pass
        batch = [segment.entry(b'{"k":"end","t":0,"why":"torn"}', draws.randbytes(1000))] * draws.randint(1, 3)
        frames = _written(path, last, batch)
        first = len(frames) // len(batch)
        with path.open("r+b") as file:
            file.seek(last.end)
            file.write(frames[: draws.randrange(1, first)])
    finally:
        last.close()
    return True


def _written(path: Path, last: segment.Segment, batch: list[segment.JournalEntry]) -> bytes:
    """What a journal writes behind the last whole record of that segment: it does so to a copy."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / path.name
        shutil.copyfile(path, copy)
        with Journal(Path(name), segment_bytes=1 << 40) as journal:
            for _ in journal.read(last.first - 1):
                pass
            journal.make_writable()
            journal.write(batch)
        return copy.read_bytes()[last.end :]


def _free_port(draws: random.Random) -> int:
    """One that no outgoing connection is ever given: the server must get it again after every kill."""
    while True:
        port = draws.randrange(20_000, 30_000)
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


async def _says_ready(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        line = await reader.readline()
        writer.close()
    except OSError:
        return False
    return b" 200 " in line


async def _ended(process: ForkServerProcess) -> None:
    while process.is_alive():
        await asyncio.sleep(0.02)


async def _within(seconds: float, waiting: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(seconds):
        await waiting


def _tail(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")[-3000:] if file.exists() else "(nothing)"


def main() -> int:
    """A storm of every kind, with so many kills altogether."""
    parser = argparse.ArgumentParser(prog="python -m tests.net.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="of the server, over all kinds of weather (1000)")
    parser.add_argument("--weather", choices=list(WEATHERS), action="append", help="one kind only; default: all")
    parser.add_argument("--seed", type=int, default=None, help="of what happens (not of when); default: any")
    parser.add_argument("--folder", type=Path, help="where everything is kept; default: removed if all is well")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end what was started
    _CONTEXT.set_forkserver_preload([actors.__name__])
    kinds = options.weather or list(WEATHERS)
    for k, kind in enumerate(kinds):
        seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
        kills = options.kills * (k + 1) // len(kinds) - options.kills * k // len(kinds)
        with tempfile.TemporaryDirectory(prefix="aflock-chaos-") as folder:
            _weather(kind, (options.folder or Path(folder)) / kind, seed, kills)
    return 0


def _weather(kind: str, folder: Path, seed: int, kills: int) -> None:
    begun = time.monotonic()
    storm = Storm(WEATHERS[kind], folder, seed)
    try:
        numbers = asyncio.run(storm.run(kills))
    except BaseException:
        sys.stdout.write(f"{kind}, seed {seed}, in {folder}: {dict(storm.happened)}\n")
        raise
    sys.stdout.write(f"{kind}, seed {seed}: {time.monotonic() - begun:.0f} s, {dict(storm.happened)}, {numbers}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
