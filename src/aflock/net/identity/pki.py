"""Keys and certificates: how they are made, signed, read and written; whose they are is for tls.py to say.

`cryptography` is imported where it is used: it is optional and takes a while.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes

_SLOW_CLOCKS = timedelta(hours=1)  # a client whose clock is behind accepts a certificate that was just made
_LABEL = "[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?![0-9]+$){_LABEL}")  # digits alone at the end: a wrong address


def builder(
    name: str, key: EllipticCurvePrivateKey, days: int, extensions: Sequence[x509.ExtensionType]
) -> x509.CertificateBuilder:
    """A certificate for that name and key, yet to be signed."""
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
    """It, signed by an issuer."""
    from cryptography.hazmat.primitives.hashes import SHA256

    return builder.issuer_name(issuer).sign(key, SHA256())


def key_usage(*, authority: bool) -> x509.KeyUsage:
    """What a key may be used for: to sign certificates, or to prove who one is."""
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
    """A subject that has nothing but a common name."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def alternative_names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """The names and addresses a server is reached by."""
    if isinstance(hosts, str) or not hosts:
        raise InputError("no hosts are given; expected a list of the names and addresses clients reach the server by")
    return list(dict.fromkeys(_alternative_name(host) for host in hosts))


def _alternative_name(host: str) -> x509.GeneralName:
    """An address or a name, told apart; an address may be in the brackets it has in a URL."""
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
    """A private key."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: EllipticCurvePrivateKey) -> bytes:
    """A private key as text, without a password."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def pem(certificate: x509.Certificate) -> bytes:
    """A certificate as text."""
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def public_bytes(key: PublicKeyTypes) -> bytes:
    """What tells two keys apart."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def load_certificate(file: Path) -> x509.Certificate:
    """The first of a file: a chain begins with the certificate itself."""
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
        raise InputError(f"the key {file} asks for a password; give one without, readable by its owner only") from None
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"{file} holds no private key; expected PEM text") from None


def read(file: Path) -> bytes:
    """What is in a file, or one sentence why it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(
            f"{file} cannot be read ({error.strerror}); check that it is there and yours to read"
        ) from None


def now() -> datetime:
    """The time, as certificates tell it."""
    return datetime.now(UTC)
