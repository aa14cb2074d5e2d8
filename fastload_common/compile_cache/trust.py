"""Who made a bundle: Ed25519 signatures over manifests, which name everything else by digest.

A bundle holds code that the engine runs. Digests find damage; only a signature says that it comes
from somebody who has the operator's private key. `cryptography` is imported when a key is set.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastload_common.errors import BundleUntrustedError, ConfigError

__all__ = ["Keys", "Signature", "load_keys"]

_LARGEST_KEY_FILE_BYTES = 64 * 1024
_KEY_ID_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature, and the first digits of the public key's digest, for messages."""

    key_id: str
    value: bytes


class Keys:
    """The operator's key. With the private part it signs; it always verifies.

    Args:
        public: an ``Ed25519PublicKey``.
        private: its ``Ed25519PrivateKey``, where this process may sign.
        file: what messages call it.
    """

    def __init__(self, public: Any, private: Any | None, file: Path) -> None:
        self._public = public
        self._private = private
        self.file = file
        raw: bytes = public.public_bytes_raw()
        self.key_id = hashlib.sha256(raw).hexdigest()[:_KEY_ID_CHARACTERS]

    @property
    def may_sign(self) -> bool:
        return self._private is not None

    def sign(self, message: bytes) -> Signature:
        """Sign.

        Raises:
            BundleUntrustedError: there is only the public key.
        """
        if self._private is None:
            raise BundleUntrustedError(
                "nothing can be published with a public key",
                hint="give the private one to those who publish, or let them publish nothing",
                file=str(self.file),
            )
        return Signature(self.key_id, self._private.sign(message))

    def verify(self, message: bytes, signature: Signature | None) -> None:
        """Accept the message, or raise.

        Raises:
            BundleUntrustedError: not signed, with another key, or not this message.
        """
        from cryptography.exceptions import InvalidSignature

        if signature is None:
            raise BundleUntrustedError(
                "the entry is not signed, and FASTLOAD_COMPILE_CACHE_SIGNING_KEY_FILE is set",
                hint="publish it again with the private key",
            )
        if signature.key_id != self.key_id:
            raise BundleUntrustedError(
                f"the entry is signed with the key {signature.key_id}, ours is {self.key_id}"
            )
        try:
            self._public.verify(signature.value, message)
        except InvalidSignature:
            raise BundleUntrustedError(
                "the entry's signature is not that of its content",
                hint="somebody without the key may have changed it: see who can write there",
            ) from None


def load_keys(file: Path | None) -> Keys | None:
    """Read the key file: PEM, private or public; None where none is set.

    Raises:
        ConfigError: it cannot be read, holds no Ed25519 key, or `cryptography` is not installed.
            Never with anything of what is in it.
    """
    if file is None:
        return None
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import (
            Ed25519PrivateKey,
            Ed25519PublicKey,
        )
        from cryptography.hazmat.primitives.serialization import (
            load_pem_private_key,
            load_pem_public_key,
        )
    except ImportError:
        raise ConfigError(
            "signatures of the compile cache need the package cryptography",
            hint="pip install cryptography",
        ) from None
    data = _read(file)
    for load in (lambda: load_pem_private_key(data, None), lambda: load_pem_public_key(data)):
        try:
            key: object = load()
        except (ValueError, TypeError, UnsupportedAlgorithm):
            continue
        if isinstance(key, Ed25519PrivateKey):
            return Keys(key.public_key(), key, file)
        if isinstance(key, Ed25519PublicKey):
            return Keys(key, None, file)
    raise ConfigError(
        f"{file} holds no Ed25519 key in PEM without a passphrase",
        hint="make one: openssl genpkey -algorithm ed25519 -out key.pem; its public part: "
        "openssl pkey -in key.pem -pubout -out public.pem",
    )


def _read(file: Path) -> bytes:
    try:
        with open(file, "rb") as stream:
            return stream.read(_LARGEST_KEY_FILE_BYTES)
    except OSError as error:
        raise ConfigError(
            f"cannot read FASTLOAD_COMPILE_CACHE_SIGNING_KEY_FILE {file}: {error.strerror}"
        ) from None
