"""Certificates that are replaced, or run out, while a server runs."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from aflock.net.identity import pki, tls
from aflock.net.server.renewal import Encryption

HOSTS = ["127.0.0.1"]


def made(folder: Path) -> tls.Certificates:
    folder.mkdir()
    return tls.prepare(folder, HOSTS)


def of(certificates: tls.Certificates) -> str:
    return tls.fingerprint(certificates.certificate.read_bytes())


@asynccontextmanager
async def serving(find: Callable[[], tls.Certificates]) -> AsyncIterator[tuple[str, int]]:
    """A server that looks for another certificate all the time; its address."""
    encryption = Encryption(find)
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=encryption.context)
    looking = asyncio.create_task(encryption.renew(0.05))
    try:
        yield server.sockets[0].getsockname()
    finally:
        looking.cancel()
        server.close()


async def shown(address: tuple[str, int]) -> str:
    """What a new connection is shown."""
    return tls.fingerprint((await asyncio.to_thread(ssl.get_server_certificate, address)).encode())


async def until_shown(address: tuple[str, int], expected: str) -> None:
    async with asyncio.timeout(10):
        while await shown(address) != expected:
            await asyncio.sleep(0.05)


async def until_told(log: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(10):
        while text not in log.text:
            await asyncio.sleep(0.05)


def test_a_certificate_that_was_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With half of it in place for a moment: that is told of, and the old one stays."""
    old, new = made(tmp_path / "old"), made(tmp_path / "new")
    certificate, key = tmp_path / "own.pem", tmp_path / "own.key"
    shutil.copy(old.certificate, certificate)
    shutil.copy(old.key, key)

    async def main() -> None:
        async with serving(partial(tls.prepare, tmp_path, HOSTS, certificate=certificate, key=key)) as address:
            assert await shown(address) == of(old)
            shutil.copy(new.certificate, certificate)
            await until_told(caplog, "the server keeps its old certificate")
            assert await shown(address) == of(old)
            shutil.copy(new.key, key)
            await until_shown(address, of(new))

    asyncio.run(main())


def test_a_certificate_that_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = partial(tls.prepare, tmp_path, HOSTS)
    before = of(find())

    async def main() -> None:
        async with serving(find) as address:
            await asyncio.sleep(0.3)
            assert await shown(address) == before  # there is no need yet
            monkeypatch.setattr(pki, "now", lambda: datetime.now(UTC) + timedelta(days=380))
            async with asyncio.timeout(10):
                while await shown(address) == before:
                    await asyncio.sleep(0.05)
            assert await shown(address) == of(find())

    asyncio.run(main())
