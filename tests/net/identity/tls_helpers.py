"""What the tests of certificates and of TLS share."""

from __future__ import annotations

import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from aflock.net.identity import pki
from aflock.net.identity.tls import Certificates, prepare

HOSTS = ["localhost", "127.0.0.1"]
PATIENCE = 5.0


def greeting(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> bytes:
    """What the server sends to a client over a real socket: "hello " and the name in its certificate; raises the
    client's errors.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE)
        thread = threading.Thread(target=_greet, args=(listening, server))
        thread.start()
        try:
            with (
                socket.create_connection(listening.getsockname(), PATIENCE) as plain,
                client.wrap_socket(plain, server_hostname=host) as secure,
            ):
                return secure.recv(100)
        finally:
            thread.join(2 * PATIENCE)
            assert not thread.is_alive()


def _greet(listening: socket.socket, context: ssl.SSLContext) -> None:
    plain, _ = listening.accept()
    plain.settimeout(PATIENCE)
    try:
        with plain, context.wrap_socket(plain, server_side=True) as secure:
            subject: Any = (secure.getpeercert() or {}).get("subject", ())
            secure.sendall(b"hello " + ",".join(value for ((_, value),) in subject).encode())
    except OSError:
        plain.close()  # the client gets an error


def ca_of(certificates: Certificates) -> str:
    assert certificates.ca is not None
    return certificates.ca.read_text()


def loaded(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def hosts_of(file: Path) -> list[str]:
    names = loaded(file).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((folder / "tls").iterdir())}


def at_day(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    monkeypatch.setattr(pki, "now", lambda: datetime.now(UTC) + timedelta(days=days))


def made_elsewhere(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, days: float = 0) -> tuple[Path, Path]:
    """A certificate from elsewhere, made so many days from now."""
    elsewhere = folder / name
    elsewhere.mkdir()
    with monkeypatch.context() as patch:
        at_day(patch, days)
        made = prepare(elsewhere, HOSTS)
    return made.certificate, made.key


def client_files(folder: Path, pair: tuple[bytes, bytes]) -> tuple[Path, Path]:
    certificate, key = folder / "client.pem", folder / "client.key"
    certificate.write_bytes(pair[0])
    key.write_bytes(pair[1])
    return certificate, key


def other_key() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def with_password(folder: Path, plain: Path) -> Path:
    key = serialization.load_pem_private_key(plain.read_bytes(), None)
    (folder / "locked.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    return folder / "locked.key"
