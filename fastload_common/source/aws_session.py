"""The botocore session of this process, shared by all sources: one search for credentials.

Knows botocore's sessions and the ``AWS_*`` variables, no buckets.
"""

from __future__ import annotations

import hashlib
import os
import threading
from typing import Any

from fastload_common.config import environment
from fastload_common.source.aws_credentials import CredentialChain
from fastload_common.source.aws_log import keep_secrets_out_of_logs

__all__ = ["discard_session", "make_client", "shared_session"]

_STS_ATTEMPTS = 8


def shared_session() -> Any:
    """This process's session for the present environment; made when first asked for."""
    process = _process()
    key = _fingerprint()
    with process.lock:
        if key not in process.sessions:
            import botocore.session

            keep_secrets_out_of_logs()
            session = botocore.session.Session()
            for other in process.sessions.values():
                # botocore's data files do not depend on the environment, and take long to parse.
                session.register_component("data_loader", other.get_component("data_loader"))
                break
            chain = session.get_component("credential_provider")
            session.register_component("credential_provider", CredentialChain(chain))
            if session.get_config_variable("max_attempts") is None:
                # Of the calls to STS: many pods start at one moment, and it throttles them.
                session.set_config_variable("max_attempts", _STS_ATTEMPTS)
            process.sessions[key] = session
        return process.sessions[key]


def make_client(session: Any, **parameters: Any) -> Any:
    """``session.create_client``, which is not safe for several threads by itself."""
    with _process().lock:
        return session.create_client(**parameters)


def discard_session(session: Any) -> None:
    """Have the next caller get a new session, which finds its credentials anew."""
    process = _process()
    with process.lock:
        for key, known in list(process.sessions.items()):
            if known is session:
                del process.sessions[key]


class _Process:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.sessions: dict[str, Any] = {}


# By process: a lock or a session that was in use when the process was forked is of no use.
_processes: dict[int, _Process] = {}


def _process() -> _Process:
    pid = os.getpid()
    return _processes.get(pid) or _processes.setdefault(pid, _Process())


def _fingerprint() -> str:
    """A digest of what a session depends on, so that no secret is kept a second time."""
    named = sorted(
        (name, value) for name, value in environment().items() if name.startswith(("AWS_", "HOME"))
    )
    return hashlib.sha256(repr(named).encode()).hexdigest()
