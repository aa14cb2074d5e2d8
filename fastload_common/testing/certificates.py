"""A private certificate authority for TLS tests, made anew each time and valid for a day."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["PrivateAuthority"]


class PrivateAuthority:
    """Makes certificates that only who is given `bundle` trusts. Needs the package cryptography.

    Args:
        directory: where its files go; must exist.

    Attributes:
        bundle: the authority's certificate, for AWS_CA_BUNDLE and the like.
    """

    def __init__(self, directory: Path) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign("fastload test authority", self._key, None, [])
        self.bundle = directory / "authority.pem"
        self.bundle.write_bytes(_pem(self._certificate))

    def server_context(self, *names: str) -> ssl.SSLContext:
        """A server's context with a certificate for these DNS names (wildcards too) and IPs."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.server_file(*names))
        return context

    def server_file(self, *names: str) -> Path:
        """The same as a file: the private key, then the certificate."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(names[0], key, self._certificate, names)
        file = self._directory / f"server-{certificate.serial_number:x}.pem"
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        file.touch(mode=0o600)
        file.write_bytes(private + _pem(certificate))
        return file

    def _sign(self, name: str, key: Any, issuer: Any, names: Sequence[str]) -> Any:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import NameOID

        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        public = key.public_key()
        is_authority = issuer is None
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if issuer is None else issuer.subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if is_authority:
            usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, critical=True)
        else:
            alternatives = x509.SubjectAlternativeName([_general_name(name) for name in names])
            builder = builder.add_extension(alternatives, critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _general_name(name: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return bytes(certificate.public_bytes(serialization.Encoding.PEM))
