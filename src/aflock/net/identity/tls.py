"""The certificates of a federation, and the TLS contexts of server and client.

    fed/tls/ca.key, ca.pem           the federation's own authority; clients trust it, so it is valid for ten years
    fed/tls/server.key, server.pem   the server's certificate, signed by the authority; server/renewal.py renews it

An operator may use a certificate from elsewhere instead. The files are written in the order above, each one whole and
synced, so a start that is cut short leaves the first few of them, and the next start makes the rest. An authority is
never replaced, because every client would need a new token file.

Functions import `cryptography` when they use it (here and in pki.py), because it is optional and slow to import.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...errors import AflockError, InputError
from ...system.files import PRIVATE, alone, remove_leftovers, sync_folder, write_whole
from . import pki
from .members import checked_name, existing

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_AUTHORITY_DAYS = 3650
_CERTIFICATE_DAYS = 397  # some TLS libraries refuse a server certificate that is valid for longer
_RENEW_DAYS = 30
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")


@dataclass(frozen=True)
class Certificates:
    """The files a server uses; `fingerprint` is the authority's, or that of a certificate from elsewhere."""

    certificate: Path
    key: Path
    ca: Path | None
    fingerprint: str


class _Authority(NamedTuple):
    """The federation's authority; `key` is None if the operator keeps ca.key elsewhere, and then it cannot sign."""

    folder: Path
    certificate: x509.Certificate
    key: EllipticCurvePrivateKey | None


def prepare(
    folder: Path, hosts: Sequence[str], *, certificate: Path | None = None, key: Path | None = None
) -> Certificates:
    """The certificates for a server that clients reach as `hosts`; makes or renews them if necessary.

    With `certificate` and `key`, checks and returns these instead.
    """
    _need_cryptography()
    if certificate is not None or key is not None:
        return _check_given(certificate, key)
    names = pki.alternative_names(hosts)
    tls = _tls_folder(folder)
    with alone(tls / "lock"):
        authority = _authority(tls)
        if not _is_usable(authority, names):
            _make_server(authority, names)
    return Certificates(tls / "server.pem", tls / "server.key", tls / "ca.pem", _fingerprint_of(tls / "ca.pem"))


def ca_text(folder: Path) -> str:
    """The authority's certificate as PEM text, for a token file; makes the authority if there is none yet."""
    _need_cryptography()
    tls = _tls_folder(folder)
    with alone(tls / "lock"):
        _authority(tls)
    return (tls / "ca.pem").read_text()


def issue_client(folder: Path, name: str) -> tuple[bytes, bytes]:
    """A certificate and its key (PEM), with which a client proves its name to a server that asks for one (mTLS)."""
    _need_cryptography()
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    checked_name(name)
    tls = _tls_folder(folder)
    with alone(tls / "lock"):
        authority = _authority(tls)
    key = pki.new_key()
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    return pki.pem(_issue(authority, name, key, [usage])), pki.key_pem(key)


def fingerprint(pem: bytes) -> str:
    """SHA-256 of the first certificate in a PEM text, as `openssl x509 -fingerprint -sha256` writes it."""
    found = _PEM.search(pem)
    try:
        der = ssl.PEM_cert_to_DER_cert(found[0].decode()) if found else b""
    except ValueError:
        der = b""
    if not der:
        raise InputError("the text holds no certificate; expected PEM text")
    return der_fingerprint(der)


def der_fingerprint(der: bytes) -> str:
    """As `fingerprint`, of a certificate in the binary form."""
    return hashlib.sha256(der).digest().hex(":").upper()


def server_context(certificates: Certificates, client_ca: Path | None = None) -> ssl.SSLContext:
    """The server's TLS context; with `client_ca`, clients need a certificate signed by that authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # renegotiation costs the server more than the client that asks for it
    show(context, certificates.certificate, certificates.key)
    if client_ca is not None:
        _trust(context, pki.read(client_ca), str(client_ca))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(ca: str | None, *, certificate: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """A client's TLS context: trusts that authority (PEM text) only, or the system's authorities if `ca` is None."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # requires a certificate and checks the host name
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is None:
        context.load_default_certs()
    else:
        _trust(context, ca.encode(errors="replace"), "the ca of the token file")
    if certificate is not None or key is not None:
        show(context, *_check_pair(certificate, key))
    return context


def _need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise AflockError(
            f"certificates need the package cryptography, which cannot be imported ({error}); pip install 'aflock[net]'"
        ) from error


def _check_given(certificate: Path | None, key: Path | None) -> Certificates:
    certificate, key = _check_pair(certificate, key)
    found = pki.load_certificate(certificate)
    if pki.public_bytes(pki.load_key(key).public_key()) != pki.public_bytes(found.public_key()):
        raise InputError(f"the key {key} does not belong to the certificate {certificate}; give the key that does")
    if found.not_valid_after_utc <= pki.now():
        raise InputError(f"the certificate {certificate} expired on {found.not_valid_after_utc:%Y-%m-%d}; renew it")
    if found.not_valid_before_utc > pki.now():
        begin = found.not_valid_before_utc
        raise InputError(f"the certificate {certificate} is not valid before {begin:%Y-%m-%d}; check the clock")
    return Certificates(certificate, key, None, _fingerprint_of(certificate))


def _check_pair(certificate: Path | None, key: Path | None) -> tuple[Path, Path]:
    if certificate is None or key is None:
        missing = "certificate" if certificate is None else "key"
        raise InputError(f"a certificate and its key belong together; the {missing} is missing, give both or neither")
    return certificate, key


def _tls_folder(folder: Path) -> Path:
    tls = existing(folder) / "tls"
    if not tls.is_dir():
        tls.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder)
    if tls.stat().st_mode & 0o077:
        tls.chmod(0o700)
    return tls


def _authority(tls: Path) -> _Authority:
    """Loads the authority, or makes it; the caller holds the lock of the folder.

    A start that was cut short leaves ca.key without ca.pem: the certificate is then made for that key. ca.pem without
    ca.key is an authority whose key the operator keeps elsewhere.
    """
    certificate, key = tls / "ca.pem", tls / "ca.key"
    remove_leftovers(tls, "*.pem", "*.key")
    if not certificate.exists():
        _make_authority(certificate, key)
    found = _Authority(tls, pki.load_certificate(certificate), _authority_key(key) if key.exists() else None)
    if found.key and pki.public_bytes(found.key.public_key()) != pki.public_bytes(found.certificate.public_key()):
        raise InputError(f"{key} does not belong to {certificate}; {_how_to_repair(tls)}")
    if found.certificate.not_valid_after_utc - pki.now() < timedelta(days=1):
        raise InputError(f"{certificate} has expired, or expires within a day; {_how_to_repair(tls)}")
    return found


def _make_authority(certificate: Path, key: Path) -> None:
    """Makes ca.key if it is missing, and ca.pem.

    The authority's name is derived from its key, so a ca.pem made again for the same key verifies the certificates that
    were signed before.
    """
    from cryptography import x509

    if not key.exists():
        if (key.parent / "server.pem").exists():  # no interrupted start leaves this: the files were removed
            raise InputError(f"{certificate} and {key} are missing; {_how_to_repair(key.parent)}")
        write_whole(key, pki.key_pem(pki.new_key()), mode=PRIVATE)
    private = _authority_key(key)
    name = f"aflock {hashlib.sha256(pki.public_bytes(private.public_key())).hexdigest()[:16]}"
    extensions = [x509.BasicConstraints(ca=True, path_length=0), pki.key_usage(authority=True)]
    builder = pki.builder(name, private, _AUTHORITY_DAYS, extensions)
    write_whole(certificate, pki.pem(pki.signed(builder, pki.subject(name), private)), mode=PRIVATE)


def _authority_key(file: Path) -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

    key = pki.load_key(file)
    if not isinstance(key, EllipticCurvePrivateKey):
        raise InputError(f"{file} is not a key that aflock made; {_how_to_repair(file.parent)}")
    return key


def _how_to_repair(tls: Path) -> str:
    return f"put the right files back, or remove {tls} to make a new authority (all clients then need new token files)"


def _make_server(authority: _Authority, names: list[x509.GeneralName]) -> None:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = pki.new_key()
    extensions = [x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), x509.SubjectAlternativeName(names)]
    certificate = _issue(authority, "aflock server", key, extensions)
    write_whole(authority.folder / "server.key", pki.key_pem(key), mode=PRIVATE)
    write_whole(authority.folder / "server.pem", pki.pem(certificate), mode=PRIVATE)


def _is_usable(authority: _Authority, names: list[x509.GeneralName]) -> bool:
    """Whether server.pem and server.key fit each other, the authority and the hosts, and need no renewal yet."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    try:
        certificate = pki.load_certificate(authority.folder / "server.pem")
        key = pki.load_key(authority.folder / "server.key")
        certificate.verify_directly_issued_by(authority.certificate)
        hosts = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (InputError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    fits = pki.public_bytes(key.public_key()) == pki.public_bytes(certificate.public_key())
    lasts = (
        certificate.not_valid_before_utc <= pki.now() < certificate.not_valid_after_utc - timedelta(days=_RENEW_DAYS)
    )
    return fits and lasts and set(names) <= set(hosts)


def _issue(
    authority: _Authority, name: str, key: EllipticCurvePrivateKey, extensions: Sequence[x509.ExtensionType]
) -> x509.Certificate:
    """A certificate signed by the authority, for a server or a client."""
    from cryptography import x509

    if authority.key is None:
        raise InputError(
            f"{authority.folder / 'ca.key'} is missing, and is needed to sign; {_how_to_repair(authority.folder)}"
        )
    identity = x509.SubjectKeyIdentifier.from_public_key(authority.key.public_key())
    extensions = [
        x509.BasicConstraints(ca=False, path_length=None),
        pki.key_usage(authority=False),
        x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identity),
        *extensions,
    ]
    last = authority.certificate.not_valid_after_utc  # a certificate that outlives its authority would be refused
    builder = pki.builder(name, key, min(_CERTIFICATE_DAYS, (last - pki.now()).days), extensions)
    return pki.signed(builder, authority.certificate.subject, authority.key)


def _fingerprint_of(file: Path) -> str:
    return fingerprint(pki.read(file))


def show(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Makes the context use this certificate and key for new connections."""
    for file in (certificate, key):
        pki.read(file)  # the error of `load_cert_chain` does not name the file that cannot be read
    try:
        # password="": for a key with a password, OpenSSL would otherwise ask at the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or "wrong format"
        raise InputError(
            f"{certificate} and {key} cannot be used ({why}); expected a certificate and its key, both PEM, no password"
        ) from None


def _trust(context: ssl.SSLContext, pem: bytes, what: str) -> None:
    try:
        # Only the certificates themselves: a PEM file may have comments in any encoding between them.
        context.load_verify_locations(cadata=b"\n".join(_PEM.findall(pem)).decode())
    except (ssl.SSLError, ValueError):
        raise InputError(f"{what} holds no certificate; expected PEM text of the authority to trust") from None
