"""Certificates and the handshakes they are for, over loopback sockets."""

from __future__ import annotations

import socket
import ssl
import stat
import subprocess
import sys
import threading
import traceback
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID

from aflock.errors import AflockError, InputError
from aflock.net import pki, tls
from aflock.net.members import read_token_file, write_token_file
from aflock.net.tls import Certificates, client_context, fingerprint, issue_client, prepare, server_context

HOSTS = ["localhost", "127.0.0.1"]
PATIENCE = 5.0


@pytest.fixture
def fed(tmp_path: Path) -> Path:
    folder = tmp_path / "fed"
    folder.mkdir()
    return folder


def _greeting(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> bytes:
    """What a client hears that says its name over a real socket; what goes wrong on its side is raised."""
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
        plain.close()  # the client hears of it


def _ca(certificates: Certificates) -> str:
    assert certificates.ca is not None
    return certificates.ca.read_text()


def _loaded(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def _hosts(file: Path) -> list[str]:
    names = _loaded(file).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def _contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((folder / "tls").iterdir())}


def _at(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    monkeypatch.setattr(pki, "now", lambda: datetime.now(UTC) + timedelta(days=days))


def _own(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, days: float = 0) -> tuple[Path, Path]:
    """A certificate somebody else has made, some days from now."""
    elsewhere = folder / name
    elsewhere.mkdir()
    with monkeypatch.context() as patch:
        _at(patch, days)
        made = prepare(elsewhere, HOSTS)
    return made.certificate, made.key


def test_the_first_start_makes_everything(fed: Path) -> None:
    made = prepare(fed, HOSTS)
    assert made == Certificates(
        fed / "tls/server.pem",
        fed / "tls/server.key",
        fed / "tls/ca.pem",
        fingerprint((fed / "tls/ca.pem").read_bytes()),
    )
    assert set(_contents(fed)) == {"ca.key", "ca.pem", "server.key", "server.pem", "lock"}
    assert stat.S_IMODE((fed / "tls").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in (fed / "tls").iterdir()} == {0o600}


def test_the_authority_may_sign_certificates_but_no_authorities(fed: Path) -> None:
    ca = _loaded(prepare(fed, HOSTS).certificate.with_name("ca.pem"))
    basic = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    usage = ca.extensions.get_extension_for_class(x509.KeyUsage)
    assert (basic.value.ca, basic.value.path_length, basic.critical) == (True, 0, True)
    assert (usage.value.key_cert_sign, usage.value.digital_signature, usage.critical) == (True, False, True)
    assert ca.not_valid_after_utc - ca.not_valid_before_utc == timedelta(days=3650)
    assert isinstance(ca.public_key(), ec.EllipticCurvePublicKey)


def test_the_server_certificate_is_for_its_hosts(fed: Path) -> None:
    found = _loaded(
        prepare(fed, ["Node1.example", "10.0.0.7", "[::1]", "münchen.example", "node1.example."]).certificate
    )
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["node1.example", "xn--mnchen-3ya.example"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "::1"]
    assert list(found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.SERVER_AUTH
    ]
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert found.not_valid_after_utc - found.not_valid_before_utc == timedelta(days=397)
    assert isinstance(found.public_key(), ec.EllipticCurvePublicKey)
    found.verify_directly_issued_by(_loaded(fed / "tls/ca.pem"))


@pytest.mark.parametrize(
    "hosts", [[], "localhost", [""], ["https://a"], ["a:80"], ["a b"], ["256.1.1.1"], ["a..b"], ["x" * 64]]
)
def test_hosts_that_are_none(fed: Path, hosts: list[str]) -> None:
    with pytest.raises(InputError, match=r"no hosts are given; expected|is not valid; expected a name or an address"):
        prepare(fed, hosts)
    assert list(fed.iterdir()) == []


def test_there_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist; expected the folder of a federation"):
        prepare(tmp_path / "nowhere", HOSTS)


@pytest.mark.parametrize("host", HOSTS)
def test_a_client_that_trusts_the_authority_is_served(fed: Path, host: str) -> None:
    made = prepare(fed, HOSTS)
    client = client_context(_ca(made))
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # what newer Pythons ask for by themselves
    assert _greeting(server_context(made), client, host) == b"hello "


def test_what_a_token_file_carries_is_enough(fed: Path) -> None:
    write_token_file(fed / "alice.token", f"aflock1.alice.{'s' * 43}", tls.ca_text(fed))
    made = prepare(fed, HOSTS)
    assert _greeting(server_context(made), client_context(read_token_file(fed / "alice.token").ca)) == b"hello "


def test_another_authority_is_not_trusted(fed: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    stranger = prepare(tmp_path / "other", HOSTS)
    for client in (client_context(_ca(stranger)), client_context(None)):
        with pytest.raises(ssl.SSLCertVerificationError):
            _greeting(server_context(prepare(fed, HOSTS)), client)


def test_the_authority_is_all_that_is_trusted(fed: Path) -> None:
    context = client_context(_ca(prepare(fed, HOSTS)))
    assert [fingerprint(ssl.DER_cert_to_PEM_cert(der).encode()) for der in context.get_ca_certs(True)] == [
        prepare(fed, HOSTS).fingerprint
    ]


@pytest.mark.parametrize("host", ["example.org", "127.0.0.2"])
def test_another_host_is_refused(fed: Path, host: str) -> None:
    made = prepare(fed, HOSTS)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"mismatch|not valid for"):
        _greeting(server_context(made), client_context(_ca(made)), host)


def test_old_versions_of_tls_are_refused(fed: Path) -> None:
    made = prepare(fed, HOSTS)
    for context in (server_context(made), client_context(_ca(made))):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    client = client_context(_ca(made))
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert _greeting(server_context(made), client) == b"hello "


def _client_files(folder: Path, pair: tuple[bytes, bytes]) -> tuple[Path, Path]:
    certificate, key = folder / "client.pem", folder / "client.key"
    certificate.write_bytes(pair[0])
    key.write_bytes(pair[1])
    return certificate, key


def test_a_server_may_ask_for_a_certificate(fed: Path, tmp_path: Path) -> None:
    made = prepare(fed, HOSTS)
    server = server_context(made, client_ca=made.ca)
    certificate, key = _client_files(tmp_path, issue_client(fed, "alice"))
    assert _greeting(server, client_context(_ca(made), certificate=certificate, key=key)) == b"hello alice"
    with pytest.raises((ssl.SSLError, ConnectionError)):
        _greeting(server, client_context(_ca(made)))


def test_a_certificate_from_elsewhere_is_none(fed: Path, tmp_path: Path) -> None:
    made = prepare(fed, HOSTS)
    server = server_context(made, client_ca=made.ca)
    (tmp_path / "other").mkdir()
    certificate, key = _client_files(tmp_path, issue_client(tmp_path / "other", "alice"))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        _greeting(server, client_context(_ca(made), certificate=certificate, key=key))


def test_the_certificate_of_the_server_is_none_for_a_client_nor_the_other_way_round(fed: Path, tmp_path: Path) -> None:
    made = prepare(fed, HOSTS)
    client = client_context(_ca(made), certificate=made.certificate, key=made.key)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        _greeting(server_context(made, client_ca=made.ca), client)
    certificate, key = _client_files(tmp_path, issue_client(fed, "localhost"))
    posing = Certificates(certificate, key, made.ca, made.fingerprint)
    with pytest.raises(ssl.SSLCertVerificationError):
        _greeting(server_context(posing), client_context(_ca(made)))


def test_a_client_certificate_bears_its_name(fed: Path) -> None:
    pem, key = issue_client(fed, "alice")
    found = x509.load_pem_x509_certificate(pem)
    assert found.subject.rfc4514_string() == "CN=alice"
    assert list(found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.CLIENT_AUTH
    ]
    assert serialization.load_pem_private_key(key, None).public_key() == found.public_key()
    assert set(_contents(fed)) == {"ca.key", "ca.pem", "lock"}
    with pytest.raises(InputError, match="the name 'Alice' is not valid"):
        issue_client(fed, "Alice")


def test_a_second_start_changes_nothing(fed: Path) -> None:
    first = prepare(fed, HOSTS)
    before = _contents(fed)
    assert prepare(fed, HOSTS) == first
    assert prepare(fed, HOSTS[:1]) == first
    assert _contents(fed) == before


def test_a_new_host_renews_the_certificate_and_not_the_authority(fed: Path) -> None:
    first = prepare(fed, ["localhost"])
    before, trust = _contents(fed), _ca(first)
    second = prepare(fed, HOSTS)
    after = _contents(fed)
    assert second == first
    assert [before[name] == after[name] for name in ("ca.pem", "ca.key", "server.pem", "server.key")] == [
        True,
        True,
        False,
        False,
    ]
    assert _hosts(second.certificate) == HOSTS
    assert _greeting(server_context(second), client_context(trust), "127.0.0.1") == b"hello "


@pytest.mark.parametrize(("days", "renewed"), [(366, False), (368, True), (1000, True)])
def test_a_certificate_is_renewed_before_it_ends(
    fed: Path, monkeypatch: pytest.MonkeyPatch, days: int, renewed: bool
) -> None:
    first = prepare(fed, HOSTS)
    before = _contents(fed)
    _at(monkeypatch, days)
    assert prepare(fed, HOSTS) == first
    after = _contents(fed)
    assert (after["server.pem"] != before["server.pem"]) == renewed
    assert after["ca.pem"] == before["ca.pem"]


def test_nothing_outlives_the_authority(fed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(fed, HOSTS)
    _at(monkeypatch, 3600)
    made = prepare(fed, HOSTS)
    assert _loaded(made.certificate).not_valid_after_utc <= _loaded(fed / "tls/ca.pem").not_valid_after_utc
    _at(monkeypatch, 3650)
    with pytest.raises(InputError, match=r"ca.pem has expired .* new token files"):
        prepare(fed, HOSTS)


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_start_that_was_cut_short_is_made_up_for(fed: Path, kept: int) -> None:
    """A crash leaves a beginning of what is made in this order."""
    prepare(fed, HOSTS)
    order = ["ca.key", "ca.pem", "server.key", "server.pem"]
    before = _contents(fed)
    for name in order[kept:]:
        (fed / "tls" / name).unlink()
    (fed / "tls/.server.key.tmp").write_text("half")
    made = prepare(fed, HOSTS)
    after = _contents(fed)
    assert all(before[name] == after[name] for name in order[: min(kept, 2)])
    assert _greeting(server_context(made), client_context(_ca(made))) == b"hello "


def test_an_authority_whose_certificate_is_lost_still_vouches(fed: Path) -> None:
    trust = _ca(prepare(fed, HOSTS))
    (fed / "tls/ca.pem").unlink()
    made = prepare(fed, HOSTS)
    assert _greeting(server_context(made), client_context(trust)) == b"hello "


@pytest.mark.parametrize("name", ["server.key", "server.pem"])
@pytest.mark.parametrize("content", [None, b"", b"junk"])
def test_a_broken_server_certificate_is_made_anew(fed: Path, name: str, content: bytes | None) -> None:
    trust = _ca(prepare(fed, HOSTS))
    (fed / "tls" / name).write_bytes(content if content is not None else _other_key())
    made = prepare(fed, HOSTS)
    assert _greeting(server_context(made), client_context(trust)) == b"hello "


def _other_key() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("ca.pem", b"junk", "holds no certificate"),
        ("ca.key", b"junk", "holds no private key"),
        ("ca.key", None, "does not belong to"),
    ],
)
def test_a_broken_authority_is_never_replaced(fed: Path, name: str, content: bytes | None, why: str) -> None:
    prepare(fed, HOSTS)
    (fed / "tls" / name).write_bytes(content if content is not None else _other_key())
    before = _contents(fed)
    for call in (lambda: prepare(fed, HOSTS), lambda: issue_client(fed, "alice"), lambda: tls.ca_text(fed)):
        with pytest.raises(InputError, match=why):
            call()
    assert _contents(fed) == before


def test_an_authority_that_was_removed_is_asked_for(fed: Path) -> None:
    prepare(fed, HOSTS)
    (fed / "tls/ca.pem").unlink()
    (fed / "tls/ca.key").unlink()
    with pytest.raises(InputError, match="are missing; put the right files back, or remove"):
        prepare(fed, HOSTS)


def test_the_key_of_the_authority_may_be_kept_elsewhere(fed: Path) -> None:
    first = prepare(fed, HOSTS)
    (fed / "tls/ca.key").unlink()
    assert prepare(fed, HOSTS) == first
    with pytest.raises(InputError, match="is missing and needed to sign"):
        prepare(fed, ["another.example"])
    with pytest.raises(InputError, match="is missing and needed to sign"):
        issue_client(fed, "alice")


STARTING = """
import sys
from pathlib import Path
from cryptography import x509
from aflock.net.tls import prepare
sys.stdout.write("ready\\n")
sys.stdout.flush()
for folder in sys.stdin:
    sys.stdout.write(prepare(Path(folder.strip()), ["localhost"]).fingerprint + "\\n")
    sys.stdout.flush()
"""


def test_two_starts_at_once_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTING]
    pipe = subprocess.PIPE
    children = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) for _ in range(3)]
    assert [_line(child) for child in children] == ["ready\n"] * 3
    for k in range(10):
        folder = tmp_path / str(k)
        folder.mkdir()
        for child in children:
            assert child.stdin is not None
            child.stdin.write(f"{folder}\n")
        said = {_line(child).strip() for child in children}
        assert said == {fingerprint((folder / "tls/ca.pem").read_bytes())}
        server_context(prepare(folder, ["localhost"]))
    for child in children:
        child.communicate(timeout=60)
        assert child.returncode == 0


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def test_a_folder_that_is_open_to_others_is_closed(fed: Path) -> None:
    (fed / "tls").mkdir(mode=0o755)
    prepare(fed, HOSTS)
    assert stat.S_IMODE((fed / "tls").stat().st_mode) == 0o700


def test_own_certificates_are_used_as_they_are(fed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = _own(tmp_path, "own", monkeypatch)
    made = prepare(fed, [], certificate=certificate, key=key)
    assert made == Certificates(certificate, key, None, fingerprint(certificate.read_bytes()))
    assert list(fed.iterdir()) == []
    trust = (certificate.parent / "ca.pem").read_text()
    assert _greeting(server_context(made), client_context(trust)) == b"hello "


def test_own_certificates_that_cannot_be_used(fed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = _own(tmp_path, "own", monkeypatch)
    _, other = _own(tmp_path, "other", monkeypatch)
    old, old_key = _own(tmp_path, "old", monkeypatch, days=-1000)
    early, early_key = _own(tmp_path, "early", monkeypatch, days=2)
    cases: list[tuple[Path | None, Path | None, str]] = [
        (certificate, None, "the key is missing, give both"),
        (None, key, "the certificate is missing, give both"),
        (certificate, other, "does not belong to the certificate"),
        (tmp_path / "none.pem", key, r"none.pem cannot be read \(No such file"),
        (certificate, tmp_path / "none.key", r"none.key cannot be read \(No such file"),
        (key, key, "holds no certificate"),
        (certificate, certificate, "holds no private key"),
        (certificate, _with_password(tmp_path, key), "asks for a password"),
        (old, old_key, "has expired on 20"),
        (early, early_key, "is not valid before 20"),
    ]
    for wrong, wrong_key, why in cases:
        with pytest.raises(InputError, match=why):
            prepare(fed, HOSTS, certificate=wrong, key=wrong_key)


def _with_password(folder: Path, plain: Path) -> Path:
    key = serialization.load_pem_private_key(plain.read_bytes(), None)
    (folder / "locked.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    return folder / "locked.key"


def test_contexts_refuse_what_they_cannot_use(fed: Path, tmp_path: Path) -> None:
    made = prepare(fed, HOSTS)
    trust = _ca(made)
    other = tmp_path / "other.key"
    other.write_bytes(_other_key())
    for key in (other, _with_password(tmp_path, made.key), made.certificate):
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
        with pytest.raises(InputError, match="there is no certificate"):
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
    script = "import sys, aflock.net.tls; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
