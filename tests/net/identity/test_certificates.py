"""The certificates in a federation's folder: made, renewed, broken, restored."""

from __future__ import annotations

import stat
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from aflock.errors import InputError
from aflock.net.identity import tls
from aflock.net.identity.tls import Certificates, client_context, fingerprint, issue_client, prepare, server_context
from tests.net.identity.tls_helpers import (
    HOSTS,
    at_day,
    ca_of,
    contents,
    greeting,
    hosts_of,
    loaded,
    other_key,
)


def test_the_first_start_makes_everything(fed: Path) -> None:
    made = prepare(fed, HOSTS)
    assert made == Certificates(
        fed / "tls/server.pem",
        fed / "tls/server.key",
        fed / "tls/ca.pem",
        fingerprint((fed / "tls/ca.pem").read_bytes()),
    )
    assert set(contents(fed)) == {"ca.key", "ca.pem", "server.key", "server.pem", "lock"}
    assert stat.S_IMODE((fed / "tls").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in (fed / "tls").iterdir()} == {0o600}


def test_the_authority_may_sign_certificates_but_no_authorities(fed: Path) -> None:
    ca = loaded(prepare(fed, HOSTS).certificate.with_name("ca.pem"))
    basic = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    usage = ca.extensions.get_extension_for_class(x509.KeyUsage)
    assert (basic.value.ca, basic.value.path_length, basic.critical) == (True, 0, True)
    assert (usage.value.key_cert_sign, usage.value.digital_signature, usage.critical) == (True, False, True)
    assert ca.not_valid_after_utc - ca.not_valid_before_utc == timedelta(days=3650)
    assert isinstance(ca.public_key(), ec.EllipticCurvePublicKey)


def test_the_server_certificate_is_for_its_hosts(fed: Path) -> None:
    found = loaded(
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
    found.verify_directly_issued_by(loaded(fed / "tls/ca.pem"))


@pytest.mark.parametrize(
    "hosts", [[], "localhost", [""], ["https://a"], ["a:80"], ["a b"], ["256.1.1.1"], ["a..b"], ["x" * 64]]
)
def test_hosts_that_are_none(fed: Path, hosts: list[str]) -> None:
    with pytest.raises(InputError, match=r"no hosts are given; expected|is not valid; expected a name or an address"):
        prepare(fed, hosts)
    assert list(fed.iterdir()) == []


def test_there_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist; expected the data folder of a federation"):
        prepare(tmp_path / "nowhere", HOSTS)


def test_a_client_certificate_bears_its_name(fed: Path) -> None:
    pem, key = issue_client(fed, "alice")
    found = x509.load_pem_x509_certificate(pem)
    assert found.subject.rfc4514_string() == "CN=alice"
    assert list(found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.CLIENT_AUTH
    ]
    assert serialization.load_pem_private_key(key, None).public_key() == found.public_key()
    assert set(contents(fed)) == {"ca.key", "ca.pem", "lock"}
    with pytest.raises(InputError, match="the name 'Alice' is not valid"):
        issue_client(fed, "Alice")


def test_a_second_start_changes_nothing(fed: Path) -> None:
    first = prepare(fed, HOSTS)
    before = contents(fed)
    assert prepare(fed, HOSTS) == first
    assert prepare(fed, HOSTS[:1]) == first
    assert contents(fed) == before


def test_a_new_host_renews_the_certificate_and_not_the_authority(fed: Path) -> None:
    first = prepare(fed, ["localhost"])
    before, trust = contents(fed), ca_of(first)
    second = prepare(fed, HOSTS)
    after = contents(fed)
    assert second == first
    assert [before[name] == after[name] for name in ("ca.pem", "ca.key", "server.pem", "server.key")] == [
        True,
        True,
        False,
        False,
    ]
    assert hosts_of(second.certificate) == HOSTS
    assert greeting(server_context(second), client_context(trust), "127.0.0.1") == b"hello "


@pytest.mark.parametrize(("days", "renewed"), [(366, False), (368, True), (1000, True)])
def test_a_certificate_is_renewed_before_it_ends(
    fed: Path, monkeypatch: pytest.MonkeyPatch, days: int, renewed: bool
) -> None:
    first = prepare(fed, HOSTS)
    before = contents(fed)
    at_day(monkeypatch, days)
    assert prepare(fed, HOSTS) == first
    after = contents(fed)
    assert (after["server.pem"] != before["server.pem"]) == renewed
    assert after["ca.pem"] == before["ca.pem"]


def test_nothing_outlives_the_authority(fed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(fed, HOSTS)
    at_day(monkeypatch, 3600)
    made = prepare(fed, HOSTS)
    assert loaded(made.certificate).not_valid_after_utc <= loaded(fed / "tls/ca.pem").not_valid_after_utc
    at_day(monkeypatch, 3650)
    with pytest.raises(InputError, match=r"ca.pem has expired, .* new token files"):
        prepare(fed, HOSTS)


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_start_that_was_cut_short_is_made_up_for(fed: Path, kept: int) -> None:
    """A start that is cut short leaves the first few files of this order."""
    prepare(fed, HOSTS)
    order = ["ca.key", "ca.pem", "server.key", "server.pem"]
    before = contents(fed)
    for name in order[kept:]:
        (fed / "tls" / name).unlink()
    (fed / "tls/.server.key.tmp").write_text("half")
    made = prepare(fed, HOSTS)
    after = contents(fed)
    assert all(before[name] == after[name] for name in order[: min(kept, 2)])
    assert greeting(server_context(made), client_context(ca_of(made))) == b"hello "


def test_an_authority_whose_certificate_is_lost_still_vouches(fed: Path) -> None:
    trust = ca_of(prepare(fed, HOSTS))
    (fed / "tls/ca.pem").unlink()
    made = prepare(fed, HOSTS)
    assert greeting(server_context(made), client_context(trust)) == b"hello "


@pytest.mark.parametrize("name", ["server.key", "server.pem"])
@pytest.mark.parametrize("content", [None, b"", b"junk"])
def test_a_broken_server_certificate_is_made_anew(fed: Path, name: str, content: bytes | None) -> None:
    trust = ca_of(prepare(fed, HOSTS))
    (fed / "tls" / name).write_bytes(content if content is not None else other_key())
    made = prepare(fed, HOSTS)
    assert greeting(server_context(made), client_context(trust)) == b"hello "


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
    (fed / "tls" / name).write_bytes(content if content is not None else other_key())
    before = contents(fed)
    for call in (lambda: prepare(fed, HOSTS), lambda: issue_client(fed, "alice"), lambda: tls.ca_text(fed)):
        with pytest.raises(InputError, match=why):
            call()
    assert contents(fed) == before


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
    with pytest.raises(InputError, match="is missing, and is needed to sign"):
        prepare(fed, ["another.example"])
    with pytest.raises(InputError, match="is missing, and is needed to sign"):
        issue_client(fed, "alice")


STARTING = """
import sys
from pathlib import Path
from cryptography import x509
from aflock.net.identity.tls import prepare
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
