"""Encryption: the federation's own authority and certificates, or those of whoever runs it.

    fed/tls/ca.key, ca.pem           the authority; clients trust it, so it stays for ten years
    fed/tls/server.key, server.pem   the server's certificate; renewed by the authority when it is time (renewal.py)

Files are made in this order, each whole and synced. A start that was cut short therefore leaves a beginning of the
list, and the next one makes the rest. An authority is never replaced: all clients would have to be told.

`cryptography` is imported where it is used (here and in pki.py): it is optional and takes a while.
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

from ..errors import AflockError, InputError
from . import pki
from .members import alone, checked_name, sync_folder, write_private

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_AUTHORITY_DAYS = 3650
_CERTIFICATE_DAYS = 397  # browsers and some systems refuse more
_RENEW_DAYS = 30
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")


@dataclass(frozen=True)
class Certificates:
    """What a server shows; `fingerprint` is that of the authority, or of a certificate that came from elsewhere."""

    certificate: Path
    key: Path
    ca: Path | None
    fingerprint: str


class _Authority(NamedTuple):
    """Who signs; the key may be kept elsewhere while nothing is to be signed."""

    folder: Path
    certificate: x509.Certificate
    key: EllipticCurvePrivateKey | None


def prepare(
    folder: Path, hosts: Sequence[str], *, certificate: Path | None = None, key: Path | None = None
) -> Certificates:
    """The certificates to start a server with that clients reach as `hosts`; made or renewed if need be."""
    _need_cryptography()
    if certificate is not None or key is not None:
        return _own(certificate, key)
    wanted = pki.alternative_names(hosts)
    tls = _tls_folder(folder)
    with alone(tls / "lock"):
        authority = _authority(tls)
        if not _still_serves(authority, wanted):
            _make_server(authority, wanted)
    return Certificates(tls / "server.pem", tls / "server.key", tls / "ca.pem", _fingerprint_of(tls / "ca.pem"))


def ca_text(folder: Path) -> str:
    """The authority's certificate as PEM text, for a token file; made if the server has never been started."""
    _need_cryptography()
    tls = _tls_folder(folder)
    with alone(tls / "lock"):
        _authority(tls)
    return (tls / "ca.pem").read_text()


def issue_client(folder: Path, name: str) -> tuple[bytes, bytes]:
    """A certificate and its key (PEM) by which a client proves its name to a server that asks for one."""
    _need_cryptography()
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    checked_name(name)
    tls = _tls_folder(folder)
    with alone(tls / "lock"):
        authority = _authority(tls)
    key = pki.new_key()
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    return pki.pem(_issued(authority, name, key, [usage])), pki.key_pem(key)


def fingerprint(pem: bytes) -> str:
    """SHA-256 of the first certificate in a PEM text, as `openssl x509 -fingerprint -sha256` writes it."""
    found = _PEM.search(pem)
    try:
        der = ssl.PEM_cert_to_DER_cert(found[0].decode()) if found else b""
    except ValueError:
        der = b""
    if not der:
        raise InputError("there is no certificate to take a fingerprint of; expected PEM text")
    return hashlib.sha256(der).digest().hex(":").upper()


def server_context(certificates: Certificates, client_ca: Path | None = None) -> ssl.SSLContext:
    """How a server speaks TLS; with `client_ca`, only to clients that show a certificate signed by it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # costs the server more than the one who asks for it
    show(context, certificates.certificate, certificates.key)
    if client_ca is not None:
        _trust(context, pki.read(client_ca), str(client_ca))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(ca: str | None, *, certificate: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """How a client speaks TLS: it trusts that authority (PEM text) only, or those of the system if there is none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # asks for a certificate and checks the host in it
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is None:
        context.load_default_certs()
    else:
        _trust(context, ca.encode(errors="replace"), "the ca of the token file")
    if certificate is not None or key is not None:
        show(context, *_both(certificate, key))
    return context


def _need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise AflockError(
            f"certificates are made by cryptography, which cannot be imported ({error}); pip install 'aflock[net]'"
        ) from error


def _own(certificate: Path | None, key: Path | None) -> Certificates:
    certificate, key = _both(certificate, key)
    found = pki.load_certificate(certificate)
    if pki.public_bytes(pki.load_key(key).public_key()) != pki.public_bytes(found.public_key()):
        raise InputError(f"the key {key} does not belong to the certificate {certificate}; give the two that do")
    if found.not_valid_after_utc <= pki.now():
        raise InputError(f"the certificate {certificate} has expired on {found.not_valid_after_utc:%Y-%m-%d}; renew it")
    if found.not_valid_before_utc > pki.now():
        begin = found.not_valid_before_utc
        raise InputError(f"the certificate {certificate} is not valid before {begin:%Y-%m-%d}; check the clock")
    return Certificates(certificate, key, None, _fingerprint_of(certificate))


def _both(certificate: Path | None, key: Path | None) -> tuple[Path, Path]:
    if certificate is None or key is None:
        missing = "certificate" if certificate is None else "key"
        raise InputError(f"a certificate and its key belong together; the {missing} is missing, give both or neither")
    return certificate, key


def _tls_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise InputError(f"the folder {folder} does not exist; expected the folder of a federation")
    tls = folder / "tls"
    if not tls.is_dir():
        tls.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder)
    if tls.stat().st_mode & 0o077:
        tls.chmod(0o700)
    return tls


def _authority(tls: Path) -> _Authority:
    """The authority there is, or a new one; without its certificate it is half-made, without its key it is not."""
    certificate, key = tls / "ca.pem", tls / "ca.key"
    if not certificate.exists():
        _make_authority(certificate, key)
    found = _Authority(tls, pki.load_certificate(certificate), _authority_key(key) if key.exists() else None)
    if found.key and pki.public_bytes(found.key.public_key()) != pki.public_bytes(found.certificate.public_key()):
        raise InputError(f"{key} does not belong to {certificate}; {_way_out(tls)}")
    if found.certificate.not_valid_after_utc - pki.now() < timedelta(days=1):
        raise InputError(f"{certificate} has expired or is about to; {_way_out(tls)}")
    return found


def _make_authority(certificate: Path, key: Path) -> None:
    """The name comes from the key: made a second time for the same key, it vouches for what it has signed before."""
    from cryptography import x509

    if not key.exists():
        if (key.parent / "server.pem").exists():  # no crash leaves this: somebody has removed what clients trust
            raise InputError(f"{certificate} and {key} are missing; {_way_out(key.parent)}")
        write_private(key, pki.key_pem(pki.new_key()))
    secret = _authority_key(key)
    name = f"aflock {hashlib.sha256(pki.public_bytes(secret.public_key())).hexdigest()[:16]}"
    extensions = [x509.BasicConstraints(ca=True, path_length=0), pki.key_usage(authority=True)]
    builder = pki.builder(name, secret, _AUTHORITY_DAYS, extensions)
    write_private(certificate, pki.pem(pki.signed(builder, pki.subject(name), secret)))


def _authority_key(file: Path) -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

    key = pki.load_key(file)
    if not isinstance(key, EllipticCurvePrivateKey):
        raise InputError(f"{file} is not the key aflock has made; {_way_out(file.parent)}")
    return key


def _way_out(tls: Path) -> str:
    return f"put the right files back, or remove {tls} to begin anew (all clients then need new token files)"


def _make_server(authority: _Authority, wanted: list[x509.GeneralName]) -> None:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = pki.new_key()
    extensions = [x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), x509.SubjectAlternativeName(wanted)]
    certificate = _issued(authority, "aflock server", key, extensions)
    write_private(authority.folder / "server.key", pki.key_pem(key))
    write_private(authority.folder / "server.pem", pki.pem(certificate))


def _still_serves(authority: _Authority, wanted: list[x509.GeneralName]) -> bool:
    """Whether the server's certificate is whole, of this authority, for these hosts and good for a while."""
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
    return fits and lasts and set(wanted) <= set(hosts)


def _issued(
    authority: _Authority, name: str, key: EllipticCurvePrivateKey, extensions: Sequence[x509.ExtensionType]
) -> x509.Certificate:
    """A certificate of the authority for somebody who is none."""
    from cryptography import x509

    if authority.key is None:
        raise InputError(f"{authority.folder / 'ca.key'} is missing and needed to sign; {_way_out(authority.folder)}")
    identity = x509.SubjectKeyIdentifier.from_public_key(authority.key.public_key())
    extensions = [
        x509.BasicConstraints(ca=False, path_length=None),
        pki.key_usage(authority=False),
        x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identity),
        *extensions,
    ]
    last = authority.certificate.not_valid_after_utc  # what outlives its authority is refused anyway
    builder = pki.builder(name, key, min(_CERTIFICATE_DAYS, (last - pki.now()).days), extensions)
    return pki.signed(builder, authority.certificate.subject, authority.key)


def _fingerprint_of(file: Path) -> str:
    return fingerprint(pki.read(file))


def show(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """From now on the context proves its name with these."""
    for file in (certificate, key):
        pki.read(file)  # the error of ssl does not say which one it is
    try:
        context.load_cert_chain(certificate, key, password="")  # a key with a password must not ask at a terminal
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or "wrong format"
        raise InputError(
            f"{certificate} and {key} cannot be used ({why}); expected a certificate and its key, both PEM, no password"
        ) from None


def _trust(context: ssl.SSLContext, pem: bytes, what: str) -> None:
    try:
        context.load_verify_locations(cadata=b"\n".join(_PEM.findall(pem)).decode())  # without comments beside them
    except (ssl.SSLError, ValueError):
        raise InputError(f"{what} holds no certificate; expected PEM text of the authority to trust") from None
