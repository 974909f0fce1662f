"""What the network server costs: against two bare endpoints that only read the body, in turns, in one run.

One is an ASGI application (uvicorn), the other a bare asyncio protocol (endpoint.py), the least that HTTP costs here.
Server and clients share the machine's cores; all servers run on the same loop, without TLS, on loopback. An update is
one request: its body goes up; the receipt and the next job come down, with the model if there is a newer one than the
client has. It is answered when it is on disk. Beside the updates per second stands the CPU time the server took for
each, in all of its threads: it varies less where others use the machine, too.

Memory is the server's peak, less that of a server with a tiny model, what the rule keeps and the current model: what
is left are bodies on their way, and models that became old ones while they were being sent.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .. import strategies
from ..system.files import write_whole
from ..system.optional import need
from .load import Following, Headers, LoadTally, call
from .turns import Progress, aims, judged, machine, quick_note

ROUNDS = 5
_LARGE = 1_000_000
"""Bytes from which a body shows in a process's memory."""

SIZES = ((7_850, 64, 3.0), (1_200_000, 8, 4.0), (11_250_000, 4, 6.0))
"""Weights, clients at a time, seconds of a round: 31 kB, 4.8 MB, 45 MB."""


# --- servers ---------------------------------------------------------------------------------------------------------


@contextmanager
def _server(length: int, clients: int) -> Iterator[tuple[int, list[str], int]]:
    """A durable federation: its port, the clients' tokens and its process."""
    from ..net.identity import members

    with tempfile.TemporaryDirectory(prefix="aflock-bench-", dir=_folder()) as name:
        folder = Path(name)
        document = (
            f'[strategy]\nname = "fedbuff"\nbuffer = 10\n[model]\nname = "vector"\nlength = {length}\n'
            f"[federation]\nclients = 1\n[server]\nport = 0\nrate = 1e6\nlease = 3600\n"
        )
        write_whole(folder / "federation.toml.in", document)
        tokens = [members.invite(folder, f"c{k}") for k in range(clients)]
        command = ["-m", "aflock", "serve", str(folder / "federation.toml.in"), "--data-dir", name, "--http"]
        with _process([*command, "--log-level", "warning"]) as process:
            port = _port(folder / "address.json", process)
            yield port, tokens, process.pid


@contextmanager
def _bare(kind: str) -> Iterator[tuple[int, int]]:
    """A yardstick: its port and its process."""
    with tempfile.TemporaryDirectory(prefix="aflock-bench-") as name:
        file = Path(name) / "address.json"
        with _process(["-m", "aflock.bench.endpoint", str(file), kind]) as process:
            yield _port(file, process), process.pid


@contextmanager
def _process(arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    for _ in range(600):
        if file.is_file():
            port = int(json.loads(file.read_text())["url"].rpartition(":")[2])
            time.sleep(0.3)
            return port
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError("the server did not start")


def _folder() -> str:
    """Where the data folders go: AFLOCK_BENCH_DIR, for machines whose temporary folder is in memory, not on a disk."""
    return os.environ.get("AFLOCK_BENCH_DIR", tempfile.gettempdir())


# --- clients ---------------------------------------------------------------------------------------------------------


def _client(token: str, body: memoryview, until: Callable[[], bool]) -> Following:
    """A client: sends hello, pulls a job, then sends update after update."""
    to = f"Host: x\r\nAuthorization: Bearer {token}\r\n"
    hello = f"POST /v1/hello HTTP/1.1\r\n{to}Content-Length: 0\r\n\r\n".encode()
    pull = f"GET /v1/job?wait=10 HTTP/1.1\r\n{to}\r\n".encode()
    state = {"step": 0}

    def following(status: int, headers: Headers) -> list[bytes | memoryview] | None:
        state["step"] += 1
        if state["step"] == 1:
            return [hello]
        job = headers.get(b"aflock-job")
        if job is None:
            return None if until() else [pull]
        if until():
            return None
        version = headers[b"aflock-version"].decode()
        head = (
            f"POST /v1/jobs/{job.decode()}/update?next=1 HTTP/1.1\r\n{to}Content-Length: {len(body)}\r\n"
            f"Aflock-Version: {version}\r\nAflock-Steps: 1\r\nAflock-Examples: 1\r\nAflock-Vectors: delta\r\n"
            f"Aflock-Have: {version}\r\n\r\n"
        )
        return [head.encode(), body]

    return following


def _poster(body: memoryview, until: Callable[[], bool]) -> Following:
    """The same bodies to the bare endpoint."""
    head = f"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return lambda status, headers: None if until() else [head, body]


def _round(port: int, made: Callable[[Callable[[], bool]], list[Following]], seconds: float) -> tuple[LoadTally, float]:
    """Runs so many seconds of load; returns the answers and how long they took."""
    begun = time.perf_counter()
    tally: LoadTally = _run(call(port, made(lambda: time.perf_counter() - begun > seconds)))
    return tally, time.perf_counter() - begun


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


# --- measurements ----------------------------------------------------------------------------------------------------


class _Rounds:
    """Requests per second and CPU seconds per request of one server, round by round."""

    def __init__(self, port: int, pid: int, made: Callable[[Callable[[], bool]], list[Following]], extra: int) -> None:
        """`extra` requests of a round are not counted: they do not carry a body."""
        self._port, self.pid, self._made, self._extra = port, pid, made, extra
        self.rates: list[float] = []
        self.cpu: list[float] = []

    def round(self, seconds: float) -> None:
        """Runs so many seconds of load."""
        before = _cpu(self.pid)
        tally, took = _round(self._port, self._made, seconds)
        if tally.refused:
            raise RuntimeError(f"{tally.refused} requests were refused: {tally.statuses}")
        count = max(1, tally.answers - self._extra)
        self.rates.append(count / took)
        self.cpu.append((_cpu(self.pid) - before) / count)


def _throughput(length: int, clients: int, seconds: float, rounds: int, base: int) -> dict[str, Any]:
    size = 4 * length
    body = np.full(length, 1e-6, np.float32).view(np.uint8).data

    def posters(until: Callable[[], bool]) -> list[Following]:
        return [_poster(body, until) for _ in range(clients)]

    with _server(length, clients) as (port, tokens, pid), _bare("asgi") as asgi, _bare("protocol") as protocol:
        ours = _Rounds(port, pid, lambda until: [_client(t, body, until) for t in tokens], 2 * clients)
        plain, least = _Rounds(*asgi, posters, 0), _Rounds(*protocol, posters, 0)
        for _ in range(rounds):
            for each in (plain, least, ours):
                each.round(seconds)
        peak = _memory(pid, "VmHWM")
    quotients = [a / b for a, b in zip(ours.rates, plain.rates, strict=True)]
    harder = [a / b for a, b in zip(ours.rates, least.rates, strict=True)]
    return {
        "bytes": size,
        "clients": clients,
        "updates_per_s": float(np.median(ours.rates)),
        "updates_per_s_least": min(ours.rates),
        "updates_per_s_most": max(ours.rates),
        "bare_per_s": float(np.median(plain.rates)),
        "protocol_per_s": float(np.median(least.rates)),
        "mb_per_s": float(np.median(ours.rates)) * size / 1e6,
        "bare_mb_per_s": float(np.median(plain.rates)) * size / 1e6,
        "protocol_mb_per_s": float(np.median(least.rates)) * size / 1e6,
        "ratio": float(np.median(quotients)),
        "least": min(quotients),
        "most": max(quotients),
        "of_protocol": float(np.median(harder)),
        "cpu_us": {
            "aflock": float(np.median(ours.cpu)) * 1e6,
            "asgi": float(np.median(plain.cpu)) * 1e6,
            "protocol": float(np.median(least.cpu)) * 1e6,
        },
        "bodies_in_memory": (peak - base - _kept(length)) / size,
        "peak_mb": peak / 1e6,
    }


def _base() -> int:
    """Memory of a server with a tiny model."""
    body = np.full(100, 1e-6, np.float32).view(np.uint8).data
    with _server(100, 4) as (port, tokens, pid):
        _round(port, lambda until: [_client(t, body, until) for t in tokens], 1.0)
        return _memory(pid, "VmHWM")


def _kept(length: int) -> int:
    """Memory of the rule's own state, and of the model as it is sent."""
    rule = strategies.create("fedbuff", 1)
    rule.open(np.zeros(100, np.float32))
    return (rule.nbytes + 400) * length // 100


def _idle(clients: int, seconds: float) -> dict[str, Any]:
    """CPU time of a server whose clients all wait for a job that none gets."""
    with _server(100, 1) as (port, _, pid):
        found: dict[str, Any] = _run(_wait_about(port, pid, clients, seconds))
    return found


async def _wait_about(port: int, pid: int, clients: int, seconds: float) -> dict[str, Any]:
    lines = [await asyncio.open_connection("127.0.0.1", port) for _ in range(clients)]
    for reader, writer in lines:
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"ok\n")
    before, begun = _cpu(pid), time.perf_counter()
    await asyncio.sleep(seconds)
    share = (_cpu(pid) - before) / (time.perf_counter() - begun)
    for _, writer in lines:
        writer.close()
    return {"clients": clients, "share": share}


def _memory(pid: int, field: str = "VmRSS") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- the whole -------------------------------------------------------------------------------------------------------


def measure(*, quick: bool = False, progress: Progress = lambda text: None) -> dict[str, Any]:
    """The whole measurement; `quick` makes it smaller, and the report says so."""
    need("uvicorn", extra="dev", what="a yardstick of this benchmark")
    rounds = 2 if quick else ROUNDS
    report: dict[str, Any] = {"quick": quick, "machine": machine(), "sizes": []}
    base = _base()
    for length, clients, seconds in SIZES[: 2 if quick else None]:
        progress(f"updates of {4 * length:,} bytes, {clients} clients")
        report["sizes"].append(_throughput(length, clients, seconds / (3 if quick else 1), rounds, base))
    progress("idle clients")
    report["idle"] = _idle(200 if quick else 1_000, 5.0 if quick else 20.0)
    report["machine"]["load_after"] = os.getloadavg()[0]
    return report | {"targets": _targets(report)}


def _targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for size in report["sizes"]:
        aim = 0.7 if size["bytes"] > _LARGE else 0.5
        rows.append((f"{size['bytes']:,} bytes, times bare ASGI", size["ratio"], ">=", aim))
    rows.append(("31 kB updates/s", report["sizes"][0]["updates_per_s"], ">=", 5_000))
    rows.append((f"{report['idle']['clients']} idle clients, share of a core", report["idle"]["share"], "<=", 0.05))
    if len(report["sizes"]) > 2:  # only bodies far larger than the other variations of memory
        rows.append(("45 MB: bodies in memory", round(report["sizes"][2]["bodies_in_memory"], 1), "<=", 3.0))
    return judged(rows)


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    now = report["machine"]
    lines = [
        f"loopback, clients and server on the same {now['cores']} cores; load {now['load']:.2f} before, "
        f"{now['load_after']:.2f} after{quick_note(report)}",
        "",
        f"{'':>53}times bare ASGI   times bare  server CPU per request, us   bodies",
        f"{'update, bytes':>14}{'clients':>9}{'updates/s':>11}{'MB/s':>8}     (least - most)       protocol  "
        f"{'aflock':>9}{'ASGI':>9}{'protocol':>10}   in memory",
    ]
    for size in report["sizes"]:
        cpu = size["cpu_us"]
        ratio = f"{size['ratio']:.2f} ({size['least']:.2f} - {size['most']:.2f})"
        lines.append(
            f"{size['bytes']:>14,}{size['clients']:>9}{size['updates_per_s']:>11,.0f}{size['mb_per_s']:>8,.0f}"
            f"{ratio:>22}{size['of_protocol']:>13.2f}  "
            f"{cpu['aflock']:>9,.0f}{cpu['asgi']:>9,.0f}{cpu['protocol']:>10,.0f}"
            + (f"{size['bodies_in_memory']:>12.1f}" if size["bytes"] > _LARGE else f"{'-':>12}")
        )
    idle = report["idle"]
    lines.append(f"{idle['clients']:,} idle connections: {idle['share']:.1%} of one core")
    return "\n".join([*lines, "", *aims(report["targets"])])
