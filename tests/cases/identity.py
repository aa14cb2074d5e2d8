"""Who gives credentials to pods and instances, on loopback: STS, a container's endpoint, IMDS."""

from __future__ import annotations

import datetime
import itertools
import json
import threading
import time

from fastload_common.testing.loopback import LoopbackHandler, LoopbackServer
from fastload_common.testing.rig import AccessKey, Rig

__all__ = ["IdentityService"]

HOURS_S = 6 * 3600.0


class IdentityService(LoopbackServer):
    """Issues keys that the rig knows, a new one at each call.

    Attributes:
        calls: what was asked for: ``sts``, ``container``, ``imds``.
        authorizations: headers of the calls to the container's endpoint.
        failures: status and code of the next replies, instead of keys.
        always: the same for all replies after those.
        lifetime_s: of the keys.
    """

    def __init__(self, rig: Rig) -> None:
        super().__init__(_Handler)
        self.calls: list[str] = []
        self.authorizations: list[str | None] = []
        self.failures: list[tuple[int, str]] = []
        self.always: tuple[int, str] | None = None
        self.lifetime_s = HOURS_S
        self.issued: list[AccessKey] = []
        self._rig = rig
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def issue(self) -> tuple[AccessKey, str]:
        """A new key, and when it expires, as the services write it."""
        with self._lock:
            number = next(self._numbers)
            end_s = time.time() + self.lifetime_s
            key = AccessKey(f"KEY{number}", f"secret{number}", f"token{number}", end_s)
            self._rig.keys[key.access_key] = key
            self.issued.append(key)
        end = datetime.datetime.fromtimestamp(end_s, datetime.UTC)
        return key, end.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class _Handler(LoopbackHandler):
    owner: IdentityService

    def do_GET(self) -> None:  # noqa: N802
        if self.path.startswith("/pod"):
            self.owner.authorizations.append(self.headers.get("Authorization"))
            self._answer("container", self._keys())
        elif self.path.endswith("/security-credentials/"):
            self._answer("imds", lambda: "node-role")
        else:
            self._answer("imds", self._keys())

    def do_PUT(self) -> None:  # noqa: N802
        self._answer("imds", lambda: "metadata-token")

    def do_POST(self) -> None:  # noqa: N802
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer("sts", self._assumed)

    def _answer(self, call: str, body: object) -> None:
        owner = self.owner
        owner.calls.append(call)
        failure = owner.failures.pop(0) if owner.failures else owner.always
        if failure is not None:
            status, code = failure
            text = (
                f"<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code>"
                f"<Message>{code} says the stub</Message></Error></ErrorResponse>"
            )
        else:
            assert callable(body)
            status, text = 200, body()
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _keys(self) -> object:
        def keys() -> str:
            key, end = self.owner.issue()
            return json.dumps(
                {
                    "Code": "Success",
                    "AccessKeyId": key.access_key,
                    "SecretAccessKey": key.secret_key,
                    "Token": key.token,
                    "Expiration": end,
                }
            )

        return keys

    def _assumed(self) -> str:
        key, end = self.owner.issue()
        return (
            "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
            f"<AccessKeyId>{key.access_key}</AccessKeyId>"
            f"<SecretAccessKey>{key.secret_key}</SecretAccessKey>"
            f"<SessionToken>{key.token}</SessionToken><Expiration>{end}</Expiration>"
            "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
        )
