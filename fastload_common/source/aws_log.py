"""Keeps secrets out of what botocore logs at DEBUG: keys, tokens, signatures.

It writes requests and replies down as they are, those of a token service included.
"""

from __future__ import annotations

import logging
import re

__all__ = ["keep_secrets_out_of_logs"]

# A filter sees what is logged by its own logger only, not below it.
_LOGGERS = (
    "auth",
    "awsrequest",
    "client",
    "credentials",
    "endpoint",
    "hooks",
    "httpsession",
    "parsers",
    "retries.standard",
    "retryhandler",
    "tokens",
    "utils",
)
_SECRET = re.compile(
    r"(secret_?(?:access_?)?key|token|signature|authorization)([^\w<]{1,8}(?:b['\"])?)([^\s'\"<>,&)]+)",
    re.IGNORECASE,
)


class _Redacting(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = _SECRET.sub(r"\1\2***", record.getMessage()), None
        return True


_REDACTING = _Redacting()


def keep_secrets_out_of_logs() -> None:
    """Redact from now on. May be called again."""
    for name in _LOGGERS:
        logging.getLogger(f"botocore.{name}").addFilter(_REDACTING)
