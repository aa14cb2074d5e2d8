"""The one way in which certificates are verified. Only the standard library."""

from __future__ import annotations

import ssl

from fastload_common.errors import ConfigError

__all__ = ["BUNDLE_HINT", "verifying_context"]

BUNDLE_HINT = "AWS_CA_BUNDLE, the profile's ca_bundle, REQUESTS_CA_BUNDLE or SSL_CERT_FILE names it"


def verifying_context(ca_file: str) -> ssl.SSLContext:
    """A context that trusts the authorities in this file, and checks host names.

    Raises:
        ConfigError: it holds no certificate, or cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca_file)
    except OSError as error:
        raise ConfigError(
            f"no certificates could be loaded from the CA bundle: {error}",
            hint=BUNDLE_HINT,
            ca_bundle=ca_file,
        ) from error
    return context
