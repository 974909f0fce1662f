"""`aflock serve`: a federation's server, from its file and folder to the last saved byte."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
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

from .. import memory, threads
from ..errors import AflockError, InputError
from ..files import write_whole
from . import room, tls, warm
from .evaluation import Evaluator
from .logs import fields, log
from .members import Members
from .renewal import Encryption
from .service import Service
from .settings import ServerParams, Settings
from .store import Store

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
    settings.advice()  # what no client could follow is refused before anything is made
    _is_secure(server.host, options)
    os.umask(0o077)  # whatever is written is for the one who runs the server
    with contextlib.closing(_listen(server.host, server.port)) as listening:
        return _serve_on(listening, settings, folder, options, say)


def _serve_on(
    listening: socket.socket, settings: Settings, folder: Path, options: Options, say: Callable[[str], None]
) -> int:
    server = settings.section("server")
    secure = _is_secure(server.host, options)
    store = Store(folder, settings)
    members = Members(folder)
    if members.problem:
        raise InputError(members.problem)
    encryption = _encryption(folder, server, options) if secure else None
    if not store.federation.begun:
        room.for_all(settings, store.federation.length)
    warm.up(settings)
    own, url = _urls("https" if secure else "http", server, listening.getsockname()[1])
    certificates = encryption.certificates if encryption else None
    known = {"url": own, "pid": os.getpid(), "ca": bool(certificates and certificates.ca)}
    write_whole(folder / ADDRESS, json.dumps(known))
    log.info("serving at %s", url, extra=fields(event="start", url=url, version=store.federation.version))
    for line in _greeting(store, url, folder, certificates):
        say(line)
    memory.return_large_blocks()
    gc.freeze()  # what is there now stays
    gc.set_threshold(20_000)  # an update leaves no garbage behind that refers to itself
    sys.setswitchinterval(0.0005)  # the journal's thread holds the interpreter for moments only, and must not wait long
    _allow_files(2 * server.connections + 256)  # those too many are told so
    with threads.one_thread():
        return _run(store, members, listening, encryption)


def _encryption(folder: Path, server: ServerParams, options: Options) -> Encryption:
    own = {"certificate": options.certificate, "key": options.key}
    return Encryption(partial(tls.prepare, folder, _hosts(server.host, server.names), **own), options.client_ca)


def _is_secure(host: str, options: Options) -> bool:
    """Whether TLS is spoken; what would show secrets to others, or only seem not to, is refused."""
    if options.plain and not options.insecure and not _is_loopback(host):
        raise InputError(f"plain HTTP on {host} would show tokens to the network; use TLS, or --insecure")
    plain = options.plain or options.insecure
    if plain and (options.certificate or options.key or options.client_ca):
        raise InputError("certificates mean nothing without TLS; leave out --http and --insecure")
    return not plain


def _allow_files(count: int) -> None:
    """Every connection is an open file, and many systems allow a thousand unless asked for more."""
    try:
        import resource
    except ModuleNotFoundError:  # no such thing on this system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < count:
        log.warning("the system allows %d open files; [server] connections asks for %d", most, count)


def _run(store: Store, members: Members, listening: socket.socket, encryption: Encryption | None) -> int:
    try:
        import uvloop
    except ModuleNotFoundError:
        make = asyncio.new_event_loop
    else:
        make = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=make) as runner:
        return runner.run(_serve(store, members, listening, encryption))


async def _serve(store: Store, members: Members, listening: socket.socket, encryption: Encryption | None) -> int:
    from .http import Limits
    from .listen import Server

    settings = store.settings.section("server")
    service = Service(store, members)
    limits = Limits(settings.idle, settings.connections, service.refused)
    server = Server(service, limits, service.intake.begin, encryption and encryption.context)
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
    if encryption is not None:
        helpers.append(loop.create_task(encryption.renew()))
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


def _greeting(store: Store, url: str, folder: Path, certificates: tls.Certificates | None) -> Iterator[str]:
    federation = store.federation
    yield f"aflock serves {federation.settings.section('strategy').name}, {federation.length:,} weights, at {url}"
    if certificates:
        yield f"certificate, sha256: {tls.fingerprint(certificates.certificate.read_bytes())}"
        if certificates.ca:
            yield f"its authority, sha256: {certificates.fingerprint}"
    else:
        yield "plain HTTP: tokens and vectors can be read on the way"
    if store.recovered or federation.version:
        on = "at" if federation.ended else "going on at"
        yield f"{on} version {federation.version}, after {federation.counts.updates} updates"
    if federation.ended:
        yield f"this federation has ended ({federation.ended}): clients are told so; its model: aflock export {folder}"
        return
    yield f"invite a client:  aflock invite {folder} alice"
    yield f"it then runs:     aflock join {url} --token-file alice.token --recipe my_client.py"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio looks for that: no Nagle
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        kind = AflockError if error.errno == errno.EADDRINUSE else InputError  # that may pass; another start may do
        why = error.strerror
        raise kind(f"cannot listen on {host} port {port}: {why}; change [server] host or port") from None
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
    own = [host] if host not in ("0.0.0.0", "::") else [socket.gethostname(), socket.getfqdn()]
    return list(dict.fromkeys([*_given(names), *own, "localhost", "127.0.0.1"]))


def _given(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def _urls(scheme: str, server: ServerParams, port: int) -> tuple[str, str]:
    """Where this machine finds the server, and where others do: by the first of its names, if it has any."""
    first = [*_given(server.names), server.host][0]
    return f"{scheme}://{_shown(server.host)}:{port}", f"{scheme}://{_shown(first)}:{port}"


def _shown(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def address(folder: Path) -> str:
    """The URL of the server that runs in a folder."""
    url = _last_start(folder).get("url")
    if not isinstance(url, str):
        raise AflockError(f"no server has run in {folder} yet; start one with aflock serve")
    return url


def has_own_authority(folder: Path) -> bool:
    """Whether clients must trust the federation's authority: not without TLS, nor with certificates from elsewhere."""
    return bool(_last_start(folder).get("ca", True))  # who is invited before the first start is told, too


def _last_start(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / ADDRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
