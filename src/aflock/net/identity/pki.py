"""Keys and certificates: making, signing, reading and writing them. `tls.py` decides which ones a federation has.

Functions import `cryptography` when they use it, because it is optional and slow to import.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InputError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes

_SLOW_CLOCKS = timedelta(hours=1)  # so that a client whose clock is late accepts a new certificate
_LABEL = "[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?![0-9]+$){_LABEL}")  # a last label of digits is a mistyped address


def builder(
    name: str, key: EllipticCurvePrivateKey, days: int, extensions: Sequence[x509.ExtensionType]
) -> x509.CertificateBuilder:
    """An unsigned certificate for a name and a key."""
    from cryptography import x509

    begin = now() - _SLOW_CLOCKS
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    for extension in extensions:
        must = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
        builder = builder.add_extension(extension, critical=must)
    return builder


def signed(builder: x509.CertificateBuilder, issuer: x509.Name, key: EllipticCurvePrivateKey) -> x509.Certificate:
    """Signs a certificate with the issuer's key."""
    from cryptography.hazmat.primitives.hashes import SHA256

    return builder.issuer_name(issuer).sign(key, SHA256())


def key_usage(*, authority: bool) -> x509.KeyUsage:
    """The extension that limits a key's use: an authority signs certificates, others prove their identity."""
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def subject(common: str) -> x509.Name:
    """A subject with a common name only."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def alternative_names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """The names and addresses of a server, for its certificate; checked, without duplicates."""
    if isinstance(hosts, str) or not hosts:
        raise InputError("no hosts are given; expected a list of the names and addresses clients reach the server by")
    return list(dict.fromkeys(_alternative_name(host) for host in hosts))


def _alternative_name(host: str) -> x509.GeneralName:
    """An IP address (with or without the brackets of a URL), or else a DNS name."""
    from cryptography import x509

    bare = host.removeprefix("[").removesuffix("]").partition("%")[0]
    try:
        return x509.IPAddress(ipaddress.ip_address(bare))
    except ValueError:
        pass
    try:
        name = host.lower().removesuffix(".").encode("idna").decode()
    except UnicodeError:
        name = ""
    if not _HOST.fullmatch(name):
        raise InputError(f"the host {host!r} is not valid; expected a name or an address without scheme and port")
    return x509.DNSName(name)


def new_key() -> EllipticCurvePrivateKey:
    """A new private key."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: EllipticCurvePrivateKey) -> bytes:
    """A private key as PEM, without a password."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def pem(certificate: x509.Certificate) -> bytes:
    """A certificate as PEM."""
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def public_bytes(key: PublicKeyTypes) -> bytes:
    """The public key as bytes; two keys are the same if these are."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def load_certificate(file: Path) -> x509.Certificate:
    """The first certificate of a PEM file; in a chain that is the server's own."""
    from cryptography import x509

    raw = read(file)
    try:
        return x509.load_pem_x509_certificates(raw)[0]
    except ValueError:
        raise InputError(f"{file} holds no certificate; expected PEM text") from None


def load_key(file: Path) -> PrivateKeyTypes:
    """A private key from a file."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    raw = read(file)
    try:
        return load_pem_private_key(raw, None)
    except TypeError:
        raise InputError(
            f"the key {file} is protected by a password; give one without, readable by its owner only"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"{file} holds no private key; expected PEM text") from None


def read(file: Path) -> bytes:
    """The contents of a file; raises an InputError that says why it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(
            f"{file} cannot be read ({error.strerror}); check that it exists and that you may read it"
        ) from None


def now() -> datetime:
    """The present time in UTC; tests replace it."""
    return datetime.now(UTC)
