"""`aflock serve`: a federation's server, from its file and folder to the last saved byte."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import threads
from ..errors import AflockError, InputError
from ..files import write_whole
from . import tls
from .evaluation import Evaluator
from .members import Members
from .service import Service
from .settings import Settings
from .store import Store

log = logging.getLogger("aflock.server")

ADDRESS = "address.json"
"""Where commands on the same machine find a running server."""


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    insecure: bool = False
    """Plain HTTP, beyond this machine, too."""
    plain: bool = False
    """Plain HTTP, on this machine only."""
    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    """Clients must show a certificate of this authority."""


def serve(settings: Settings, folder: Path, options: Options, say: Callable[[str], None]) -> int:
    """Serves until SIGINT or SIGTERM; the exit code."""
    server = settings.section("server")
    local = _is_loopback(server.host)
    if options.plain and not local and not options.insecure:
        raise InputError(f"plain HTTP on {server.host} would show tokens to the network; use TLS, or --insecure")
    secure = not (options.plain or options.insecure)
    store = Store(folder, settings)
    listening = _listen(server.host, server.port)
    port = listening.getsockname()[1]
    certificates = None
    if secure:
        hosts = _hosts(server.host, server.names)
        certificates = tls.prepare(folder, hosts, certificate=options.certificate, key=options.key)
    url = f"{'https' if secure else 'http'}://{_shown(server.host)}:{port}"
    write_whole(folder / ADDRESS, json.dumps({"url": url, "pid": os.getpid()}))
    for line in _greeting(store, url, folder, certificates.fingerprint if certificates else None):
        say(line)
    context = tls.server_context(certificates, options.client_ca) if certificates else None
    sys.setswitchinterval(0.0005)  # the journal's thread holds the interpreter for moments only, and must not wait long
    with threads.one_thread(), contextlib.closing(listening):
        return _run(store, folder, listening, context)


def _run(store: Store, folder: Path, listening: socket.socket, context: Any) -> int:
    try:
        import uvloop
    except ModuleNotFoundError:
        make = asyncio.new_event_loop
    else:
        make = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=make) as runner:
        return runner.run(_serve(store, folder, listening, context))


async def _serve(store: Store, folder: Path, listening: socket.socket, context: Any) -> int:
    import uvicorn

    from . import http

    settings = store.settings.section("server")
    service = Service(store, Members(folder))
    protocol = http.limited(settings.idle, settings.connections)
    config = http.configured(service, protocol, settings.idle)
    config.load()
    config.ssl = context
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment,method-assign]  # ours are below
    evaluator = Evaluator(store, service)
    service.on_version = evaluator.on_version

    def stop() -> None:
        if server.should_exit:
            server.force_exit = True
        service.stop()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    helpers = [loop.create_task(service.look_after()), loop.create_task(_stop_on_failure(service, stop))]
    try:
        await server.serve(sockets=[listening])
    finally:
        for task in helpers:
            task.cancel()
        await evaluator.close()
        await service.close()
    log.info("stopped at version %d", store.federation.version)
    return 1 if service.failed else 0


async def _stop_on_failure(service: Service, stop: Callable[[], None]) -> None:
    while service.failed is None:
        await asyncio.sleep(0.2)
    stop()


def _greeting(store: Store, url: str, folder: Path, fingerprint: str | None) -> Iterator[str]:
    federation = store.federation
    yield f"aflock serves {federation.settings.section('strategy').name}, {federation.w0.size:,} weights, at {url}"
    if fingerprint:
        yield f"certificate authority, sha256: {fingerprint}"
    else:
        yield "plain HTTP: tokens and vectors can be read on the way"
    if store.recovered or federation.version:
        yield f"going on at version {federation.version}, after {federation.counts.updates} updates"
    yield f"invite a client:  aflock invite {folder} alice"
    yield f"it then runs:     aflock join {url} --token-file alice.token --recipe my_client.py"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise InputError(
            f"cannot listen on {host} port {port}: {error.strerror}; change [server] host or port"
        ) from None
    return listening


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hosts(host: str, names: str | None) -> list[str]:
    """What the certificate is made out to."""
    given = [name.strip() for name in (names or "").split(",") if name.strip()]
    own = [host] if host not in ("0.0.0.0", "::") else [socket.gethostname(), socket.getfqdn()]
    return list(dict.fromkeys([*given, *own, "localhost", "127.0.0.1"]))


def _shown(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger, message."""
        line = {"time": round(record.created, 3), "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(level: str, *, as_json: bool) -> None:
    """Sets up the log of a server."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if as_json else plain)
    logger = logging.getLogger("aflock")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(level.upper())
    for noisy in ("uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy).handlers = [handler]
        logging.getLogger(noisy).setLevel(logging.ERROR)
        logging.getLogger(noisy).propagate = False


def address(folder: Path) -> str:
    """The URL of the server that runs in a folder."""
    try:
        return str(json.loads((folder / ADDRESS).read_text(encoding="utf-8"))["url"])
    except (OSError, ValueError, KeyError):
        raise AflockError(f"no server has run in {folder} yet; start one with aflock serve") from None
