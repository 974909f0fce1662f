"""`aflock serve`: opens a federation's data folder, listens, serves until a signal, and saves everything."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import AflockError, InputError
from ...system import memory, threads
from ...system.files import write_whole
from ...system.words import counted
from ..identity import tls
from ..identity.members import Members
from ..protocol.urls import is_loopback
from ..storage.data_folder import DataFolder
from . import capacity, warm_up
from .app import App
from .evaluation import Evaluator
from .logs import fields, log
from .renewal import Encryption
from .settings import ServerParams, Settings

ADDRESS = "address.json"
"""The file in the data folder in which commands on the same machine find the URL of the running server."""


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    insecure: bool = False
    """Plain HTTP on any address."""
    plain: bool = False
    """Plain HTTP, on a loopback address only."""
    certificate: Path | None = None
    """The server's certificate; None: the federation's own authority makes one."""
    key: Path | None = None
    client_ca: Path | None = None
    """Clients must show a certificate of this authority."""
    accept_loss: bool = False
    """Go on although acknowledged updates are missing from the journal."""


def serve(settings: Settings, folder: Path, options: Options, say: Callable[[str], None]) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit code. `say` prints a line for the operator."""
    server = settings.section("server")
    settings.advice()  # raises if no client could follow the advice, before anything is written
    _is_secure(server.host, options)
    os.umask(0o077)  # only the user who runs the server may read its files
    with contextlib.closing(_listen(server.host, server.port)) as listening:
        return _serve_on(listening, settings, folder, options, say)


def _serve_on(
    listening: socket.socket, settings: Settings, folder: Path, options: Options, say: Callable[[str], None]
) -> int:
    server = settings.section("server")
    secure = _is_secure(server.host, options)
    store = DataFolder(folder, settings, accept_loss=options.accept_loss)
    members = Members(folder)
    if members.problem:
        raise InputError(members.problem)
    encryption = _encryption(folder, server, options) if secure else None
    if not store.federation.begun:
        capacity.check_initial_clients(settings, store.federation.length)
    warm_up.load_kernels(settings)
    own, url = _urls("https" if secure else "http", server, listening.getsockname()[1])
    certificates = encryption.certificates if encryption else None
    running = {"url": own, "pid": os.getpid(), "ca": bool(certificates and certificates.ca)}
    write_whole(folder / ADDRESS, json.dumps(running))
    log.info("serving at %s", url, extra=fields(event="start", url=url, version=store.federation.version))
    for line in _greeting(store, url, folder, certificates):
        say(line)
    memory.return_large_blocks()
    gc.freeze()  # the objects that exist now live until the end: the garbage collector need not look at them again
    gc.set_threshold(20_000)  # an update leaves no cycles behind, so the garbage collector finds little
    sys.setswitchinterval(0.0005)  # the journal's thread needs the interpreter often and briefly: it must not wait 5 ms
    _allow_files(2 * server.connections + 256)  # also for connections beyond the limit, which get a refusal
    with threads.one_thread():
        return _run(store, members, settings, listening, encryption)


def _encryption(folder: Path, server: ServerParams, options: Options) -> Encryption:
    own = {"certificate": options.certificate, "key": options.key}
    return Encryption(
        partial(tls.prepare, folder, _certificate_names(server.host, server.names), **own), options.client_ca
    )


def _is_secure(host: str, options: Options) -> bool:
    """Whether the server uses TLS; refuses plain HTTP beyond this machine, and certificates without TLS."""
    if options.plain and not options.insecure and not is_loopback(host):
        raise InputError(f"plain HTTP on {host} would send tokens unencrypted; use TLS, or allow it with --insecure")
    plain = options.plain or options.insecure
    if plain and (options.certificate or options.key or options.client_ca):
        raise InputError("certificates are not used without TLS; leave out --http and --insecure, or the certificates")
    return not plain


def _allow_files(count: int) -> None:
    """Raises the limit of open files: every connection is one, and many systems allow a process only 1024."""
    try:
        import resource
    except ModuleNotFoundError:  # this system has no such limits
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < count:
        log.warning("the system allows %d open files, but [server] connections needs %d", most, count)


def _run(
    store: DataFolder, members: Members, settings: Settings, listening: socket.socket, encryption: Encryption | None
) -> int:
    try:
        import uvloop
    except ModuleNotFoundError:
        make = asyncio.new_event_loop
    else:
        make = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=make) as runner:
        return runner.run(_serve(store, members, settings, listening, encryption))


async def _serve(
    store: DataFolder, members: Members, settings: Settings, listening: socket.socket, encryption: Encryption | None
) -> int:
    from .http.limits import ConnectionLimits
    from .http.server import Server

    params = settings.section("server")
    app = App(store, members, settings)
    limits = ConnectionLimits(params.idle, params.connections)
    server = Server(app, limits, app.clock, encryption.context if encryption else None)
    evaluator = Evaluator(store, app)
    app.on_version = evaluator.on_version

    def stop() -> None:
        app.stop()
        server.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    tasks = [loop.create_task(app.check_every_second()), loop.create_task(_stop_on_failure(app, stop))]
    if encryption is not None:
        tasks.append(loop.create_task(encryption.renew()))
    try:
        await server.serve([listening])
    finally:
        for task in tasks:
            task.cancel()
        await evaluator.close()
        await app.close()
    log.info("stopped at version %d", store.federation.version)
    return 1 if app.failed else 0


async def _stop_on_failure(app: App, stop: Callable[[], None]) -> None:
    """Stops a server whose journal has failed: after a restart, it recovers from the disk."""
    while app.failed is None:
        await asyncio.sleep(0.2)
    stop()


def _greeting(store: DataFolder, url: str, folder: Path, certificates: tls.Certificates | None) -> Iterator[str]:
    federation = store.federation
    yield f"aflock serves {federation.strategy.name}, {federation.length:,} weights, at {url}"
    if certificates:
        yield f"certificate, sha256: {tls.fingerprint(certificates.certificate.read_bytes())}"
        if certificates.ca:
            yield f"its authority, sha256: {certificates.fingerprint}"
    else:
        yield "plain HTTP: tokens and vectors travel unencrypted"
    if store.recovered or federation.version:
        state = "at" if federation.ended else "going on at"
        yield f"{state} version {federation.version}, after {federation.counts.updates} updates"
    if federation.ended:
        yield f"this federation has ended ({federation.ended}); get its model with: aflock export {folder}"
        return
    missing = federation.p.clients - len(federation.gathered)
    if not federation.begun and federation.p.clients > 1:
        has = "has" if missing == 1 else "have"
        yield f"the server gives the first jobs when {counted(missing, 'more client')} {has} joined"
    yield f"invite a client:  aflock invite {folder} alice"
    yield f"it then runs:     aflock join {url} --token-file alice.token --client-file my_client.py"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # so asyncio sets TCP_NODELAY
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        kind = AflockError if error.errno == errno.EADDRINUSE else InputError  # a later start may find the port free
        why = error.strerror
        raise kind(f"cannot listen on {host} port {port}: {why}; change [server] host or port") from None
    return listening


def _certificate_names(host: str, names: str | None) -> list[str]:
    """The names and addresses for which the server's certificate is made."""
    own = [host] if host not in ("0.0.0.0", "::") else [socket.gethostname(), socket.getfqdn()]
    return list(dict.fromkeys([*_split(names), *own, "localhost", "127.0.0.1"]))


def _split(names: str | None) -> list[str]:
    """The names in the key `names` of [server], which commas separate."""
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def _urls(scheme: str, server: ServerParams, port: int) -> tuple[str, str]:
    """The server's URL for this machine, and the one for others: with the first of its names, if it has any."""
    first = [*_split(server.names), server.host][0]
    return f"{scheme}://{_url_host(server.host)}:{port}", f"{scheme}://{_url_host(first)}:{port}"


def _url_host(host: str) -> str:
    """A host as a URL needs it: a name for "all addresses", and brackets around IPv6."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def address(folder: Path) -> str:
    """The URL of the server that runs, or last ran, in a data folder."""
    url = _last_start(folder).get("url")
    if not isinstance(url, str):
        raise AflockError(f"no server has run in {folder} yet; start one with aflock serve")
    return url


def has_own_authority(folder: Path) -> bool:
    """Whether clients need the certificate of the federation's authority.

    They do not without TLS, nor if the operator gave the server a certificate.
    """
    return bool(_last_start(folder).get("ca", True))  # before the first start, an invitation includes it to be safe


def _last_start(folder: Path) -> dict[str, Any]:
    """What the last start of a server has written about itself."""
    try:
        found = json.loads((folder / ADDRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
