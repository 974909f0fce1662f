"""TLS contexts, and the handshakes they are for, over loopback sockets."""

from __future__ import annotations

import ssl
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from aflock.errors import AflockError, InputError
from aflock.net.identity import tls
from aflock.net.identity.members import read_token_file, token_text
from aflock.net.identity.tls import Certificates, client_context, fingerprint, issue_client, prepare, server_context
from tests.net.identity.tls_helpers import (
    HOSTS,
    ca_of,
    client_files,
    greeting,
    made_elsewhere,
    other_key,
    with_password,
)


@pytest.mark.parametrize("host", HOSTS)
def test_a_client_that_trusts_the_authority_is_served(fed: Path, host: str) -> None:
    made = prepare(fed, HOSTS)
    client = client_context(ca_of(made))
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # what newer Pythons ask for by themselves
    assert greeting(server_context(made), client, host) == b"hello "


def test_what_a_token_file_carries_is_enough(fed: Path) -> None:
    (fed / "alice.token").write_text(token_text(f"aflock1.alice.{'s' * 43}", tls.ca_text(fed)))
    made = prepare(fed, HOSTS)
    assert greeting(server_context(made), client_context(read_token_file(fed / "alice.token").ca)) == b"hello "


def test_another_authority_is_not_trusted(fed: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    stranger = prepare(tmp_path / "other", HOSTS)
    for client in (client_context(ca_of(stranger)), client_context(None)):
        with pytest.raises(ssl.SSLCertVerificationError):
            greeting(server_context(prepare(fed, HOSTS)), client)


def test_the_authority_is_all_that_is_trusted(fed: Path) -> None:
    context = client_context(ca_of(prepare(fed, HOSTS)))
    assert [fingerprint(ssl.DER_cert_to_PEM_cert(der).encode()) for der in context.get_ca_certs(True)] == [
        prepare(fed, HOSTS).fingerprint
    ]


@pytest.mark.parametrize("host", ["example.org", "127.0.0.2"])
def test_another_host_is_refused(fed: Path, host: str) -> None:
    made = prepare(fed, HOSTS)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"mismatch|not valid for"):
        greeting(server_context(made), client_context(ca_of(made)), host)


def test_old_versions_of_tls_are_refused(fed: Path) -> None:
    made = prepare(fed, HOSTS)
    for context in (server_context(made), client_context(ca_of(made))):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    client = client_context(ca_of(made))
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert greeting(server_context(made), client) == b"hello "


def test_a_server_may_ask_for_a_certificate(fed: Path, tmp_path: Path) -> None:
    made = prepare(fed, HOSTS)
    server = server_context(made, client_ca=made.ca)
    certificate, key = client_files(tmp_path, issue_client(fed, "alice"))
    assert greeting(server, client_context(ca_of(made), certificate=certificate, key=key)) == b"hello alice"
    with pytest.raises((ssl.SSLError, ConnectionError)):
        greeting(server, client_context(ca_of(made)))


def test_a_certificate_from_elsewhere_is_none(fed: Path, tmp_path: Path) -> None:
    made = prepare(fed, HOSTS)
    server = server_context(made, client_ca=made.ca)
    (tmp_path / "other").mkdir()
    certificate, key = client_files(tmp_path, issue_client(tmp_path / "other", "alice"))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        greeting(server, client_context(ca_of(made), certificate=certificate, key=key))


def test_the_certificate_of_the_server_is_none_for_a_client_nor_the_other_way_round(fed: Path, tmp_path: Path) -> None:
    made = prepare(fed, HOSTS)
    client = client_context(ca_of(made), certificate=made.certificate, key=made.key)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        greeting(server_context(made, client_ca=made.ca), client)
    certificate, key = client_files(tmp_path, issue_client(fed, "localhost"))
    posing = Certificates(certificate, key, made.ca, made.fingerprint)
    with pytest.raises(ssl.SSLCertVerificationError):
        greeting(server_context(posing), client_context(ca_of(made)))


def test_own_certificates_are_used_as_they_are(fed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = made_elsewhere(tmp_path, "own", monkeypatch)
    made = prepare(fed, [], certificate=certificate, key=key)
    assert made == Certificates(certificate, key, None, fingerprint(certificate.read_bytes()))
    assert list(fed.iterdir()) == []
    trust = (certificate.parent / "ca.pem").read_text()
    assert greeting(server_context(made), client_context(trust)) == b"hello "


def test_own_certificates_that_cannot_be_used(fed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = made_elsewhere(tmp_path, "own", monkeypatch)
    _, other = made_elsewhere(tmp_path, "other", monkeypatch)
    old, old_key = made_elsewhere(tmp_path, "old", monkeypatch, days=-1000)
    early, early_key = made_elsewhere(tmp_path, "early", monkeypatch, days=2)
    cases: list[tuple[Path | None, Path | None, str]] = [
        (certificate, None, "the key is missing, give both"),
        (None, key, "the certificate is missing, give both"),
        (certificate, other, "does not belong to the certificate"),
        (tmp_path / "none.pem", key, r"none.pem cannot be read \(No such file"),
        (certificate, tmp_path / "none.key", r"none.key cannot be read \(No such file"),
        (key, key, "holds no certificate"),
        (certificate, certificate, "holds no private key"),
        (certificate, with_password(tmp_path, key), "is protected by a password"),
        (old, old_key, "expired on 20"),
        (early, early_key, "is not valid before 20"),
    ]
    for wrong, wrong_key, why in cases:
        with pytest.raises(InputError, match=why):
            prepare(fed, HOSTS, certificate=wrong, key=wrong_key)


def test_contexts_refuse_what_they_cannot_use(fed: Path, tmp_path: Path) -> None:
    made = prepare(fed, HOSTS)
    trust = ca_of(made)
    other = tmp_path / "other.key"
    other.write_bytes(other_key())
    for key in (other, with_password(tmp_path, made.key), made.certificate):
        with pytest.raises(InputError, match=r"cannot be used \(.*\); expected a certificate and its key"):
            server_context(Certificates(made.certificate, key, None, ""))
        with pytest.raises(InputError, match=r"cannot be used \(.*\); expected a certificate and its key"):
            client_context(trust, certificate=made.certificate, key=key)
    with pytest.raises(InputError, match="give both or neither"):
        client_context(trust, certificate=made.certificate)
    with pytest.raises(InputError, match="cannot be read"):
        server_context(made, client_ca=tmp_path / "none.pem")
    with pytest.raises(InputError, match="holds no certificate"):
        server_context(made, client_ca=made.key)


@pytest.mark.parametrize("ca", ["", "junk", "\udc80", "-----BEGIN CERTIFICATE-----\nQUJD\n-----END CERTIFICATE-----\n"])
def test_a_ca_that_is_none_is_never_taken_for_the_system_store(ca: str) -> None:
    with pytest.raises(InputError, match="holds no certificate"):
        client_context(ca)


def test_fingerprints(fed: Path) -> None:
    pem = tls.ca_text(fed).encode()
    shown = fingerprint(b"a comment\n" + pem)
    assert shown == x509.load_pem_x509_certificate(pem).fingerprint(SHA256()).hex(":").upper()
    assert len(shown) == 95
    for junk in (b"", b"junk", b"-----BEGIN CERTIFICATE-----\nQ\n-----END CERTIFICATE-----"):
        with pytest.raises(InputError, match="the text holds no certificate"):
            fingerprint(junk)


def test_keys_are_in_no_error_and_no_repr(fed: Path) -> None:
    made = prepare(fed, HOSTS)
    lines = [line for line in made.key.read_text().splitlines() if "-----" not in line]
    assert not any(line in repr(made) for line in lines)
    made.key.write_text(made.key.read_text().replace("-----END", "-----BEND"))
    for call in (lambda: server_context(made), lambda: prepare(fed, [], certificate=made.certificate, key=made.key)):
        with pytest.raises(InputError) as caught:
            call()
        shown = "".join(traceback.format_exception(caught.value))
        assert not any(line in shown for line in lines)


def test_without_cryptography_it_says_what_to_install(fed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for call in (lambda: prepare(fed, HOSTS), lambda: issue_client(fed, "alice"), lambda: tls.ca_text(fed)):
        with pytest.raises(AflockError, match=r"pip install 'aflock\[net\]'"):
            call()


def test_importing_does_not_import_cryptography() -> None:
    script = "import sys, aflock.net.identity.tls; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
