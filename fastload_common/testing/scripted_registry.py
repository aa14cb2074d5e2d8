"""A registry on loopback that does exactly what a test wants, and the store that it redirects to.

For what a real one does not do on demand: tokens that end, signed URLs that end, faults at a known
request, documents that are wrong. It serves the pull side of the distribution protocol.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fastload_common.testing.loopback import LoopbackHandler, LoopbackServer

__all__ = ["Answer", "Asked", "ScriptedRegistry", "ScriptedStorage"]

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]+)")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it came; header names in lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    form: Mapping[str, str] = field(default_factory=dict)

    @property
    def authorization(self) -> str | None:
        return self.headers.get("authorization")


@dataclass(frozen=True, slots=True)
class Answer:
    """What to send. ``cut_bytes``: close the connection after so many bytes of the body."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_bytes: int | None = None


class _Handler(LoopbackHandler):
    def do_GET(self) -> None:  # noqa: N802  (the base class names it)
        self._serve("GET", b"")

    def do_POST(self) -> None:  # noqa: N802
        self._serve("POST", self.rfile.read(int(self.headers.get("Content-Length", "0"))))

    def _serve(self, method: str, body: bytes) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        form = {key: values[0] for key, values in parse_qs(body.decode()).items()}
        headers = {key.lower(): value for key, value in self.headers.items()}
        asked = Asked(method, url.path, query, headers, form)
        answer = self.owner.answer(asked)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if answer.cut_bytes is None:
            self.wfile.write(answer.body)
        else:
            self.wfile.write(answer.body[: answer.cut_bytes])
            self.wfile.flush()
            self.close_connection = True


class _Server(LoopbackServer):
    """Keeps a log, and asks the script first.

    Attributes:
        log: all requests, in order.
        script: tried first; None from it: the usual answer.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(_Handler, tls)
        self.log: list[Asked] = []
        self.script: Callable[[Asked], Answer | None] = lambda asked: None

    @property
    def host(self) -> str:
        """As it stands in references."""
        return f"127.0.0.1:{self.port}"

    def answer(self, asked: Asked) -> Answer:
        self.log.append(asked)
        return self.script(asked) or self.usual(asked)

    def usual(self, asked: Asked) -> Answer:
        raise NotImplementedError


def ranged(data: bytes, asked: Asked, *, ignores: bool = False) -> Answer:
    """A blob, or the range of it that is asked for."""
    match = _RANGE.fullmatch(asked.headers.get("range", ""))
    if match is None or ignores:
        return Answer(200, data)
    start, last = int(match.group(1)), int(match.group(2))
    if start >= len(data):
        return Answer(416)
    part = data[start : last + 1]
    headers = {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(data)}"}
    return Answer(206, part, headers)


class ScriptedRegistry(_Server):
    """Serves what was put in.

    Args:
        tls: a server's context.
        auth: ``none``, ``basic`` or ``bearer``.

    Attributes:
        user, password: what it wants.
        tokens: all that it gave out, in order; those in ``ended`` are refused.
        token_life_s: as it says; None: it says nothing.
        storage: redirect blobs there.
        url_life_s: of its redirects; None: their URLs do not tell.
        honours_ranges: whether blobs are served by range.
    """

    user, password = "somebody", "s3cr3t-pass"

    def __init__(self, tls: ssl.SSLContext | None = None, *, auth: str = "none") -> None:
        super().__init__(tls)
        self.auth = auth
        self.blobs: dict[str, bytes] = {}
        self.documents: dict[str, tuple[bytes, str]] = {}
        self.tokens: list[str] = []
        self.ended: set[str] = set()
        self.token_life_s: int | None = 300
        self.identity_token = "identity-secret"
        self.storage: ScriptedStorage | None = None
        self.url_life_s: int | None = 600
        self.honours_ranges = True

    def put(
        self, data: bytes, media_type: str, annotations: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Have a blob; its descriptor."""
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[digest] = data
        found: dict[str, Any] = {"mediaType": media_type, "digest": digest, "size": len(data)}
        return found | ({"annotations": dict(annotations)} if annotations else {})

    def document(self, name: str, content: Any, media_type: str = MANIFEST) -> str:
        """Have a document under a tag, and under its digest; its digest."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.documents[name] = self.documents[digest] = (data, media_type)
        return digest

    def artifact(self, name: str, layers: Sequence[Mapping[str, Any]], **more: Any) -> str:
        """Have a manifest of these layers under a tag; its digest."""
        config = self.put(b"{}", "application/vnd.oci.empty.v1+json")
        content = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config}
        return self.document(name, content | {"layers": list(layers)} | more)

    def login(self) -> dict[str, Any]:
        """A config.json for it."""
        pair = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        return {"auths": {self.host: {"auth": pair}}}

    def count(self, part: str) -> int:
        """How many requests had this in their path."""
        return sum(part in asked.path for asked in self.log)

    def usual(self, asked: Asked) -> Answer:
        if asked.path == "/token":
            return self._token(asked)
        refused = self._refusal(asked)
        if refused is not None:
            return refused
        kind, name = asked.path.split("/")[-2:]
        if kind == "manifests" and name in self.documents:
            data, media_type = self.documents[name]
            digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
            headers = {"Content-Type": media_type, "Docker-Content-Digest": digest}
            return Answer(200, data, headers)
        if kind == "blobs" and name in self.blobs:
            if self.storage is not None:
                return Answer(307, headers={"Location": self.storage.url(self, name)})
            return ranged(self.blobs[name], asked, ignores=not self.honours_ranges)
        code = "MANIFEST_UNKNOWN" if kind == "manifests" else "BLOB_UNKNOWN"
        return Answer(404, _errors(code, f"{kind} unknown"))

    def _refusal(self, asked: Asked) -> Answer | None:
        sent = asked.authorization
        if self.auth == "none" or (
            self.auth == "basic"
            and sent
            == "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        ):
            return None
        if self.auth == "bearer" and sent is not None:
            token = sent.removeprefix("Bearer ")
            if token in self.tokens and token not in self.ended:
                return None
        challenge = 'Basic realm="test"'
        if self.auth == "bearer":
            repository = asked.path.removeprefix("/v2/").rsplit("/", 2)[0]
            challenge = (
                f'Bearer realm="{self.endpoint}/token",service="test",'
                f'scope="repository:{repository}:pull"'
            )
        body = _errors("UNAUTHORIZED", "authentication required")
        return Answer(401, body, {"WWW-Authenticate": challenge})

    def _token(self, asked: Asked) -> Answer:
        pair = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        is_known = asked.authorization == f"Basic {pair}"
        if asked.method == "POST":
            is_known = asked.form.get("refresh_token") == self.identity_token
        if not is_known:
            return Answer(401, _errors("UNAUTHORIZED", "incorrect username or password"))
        token = f"token-{len(self.tokens)}-of-the-test"
        self.tokens.append(token)
        said: dict[str, Any] = {"token": token}
        if self.token_life_s is not None:
            said["expires_in"] = self.token_life_s
        return Answer(200, json.dumps(said).encode())


class ScriptedStorage(_Server):
    """The store behind a registry. Its URLs are signed; each request for one gives another.

    Attributes:
        blobs: what it has, by digest.
        signatures: all that were given out, in order; those in ``ended`` are refused.
        now_s: the wall clock by which URLs begin.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(tls)
        self.blobs: dict[str, bytes] = {}
        self.signatures: list[str] = []
        self.ended: set[str] = set()
        self.stamp = "20261130T120000Z"

    def url(self, registry: ScriptedRegistry, digest: str) -> str:
        """A new signed URL for a blob of the registry."""
        self.blobs[digest] = registry.blobs[digest]
        signature = f"signature{len(self.signatures)}secret"
        self.signatures.append(signature)
        life = ""
        if registry.url_life_s is not None:
            life = f"X-Amz-Date={self.stamp}&X-Amz-Expires={registry.url_life_s}&"
        return f"{self.endpoint}/store/{digest}?{life}X-Amz-Signature={signature}"

    def usual(self, asked: Asked) -> Answer:
        signature = asked.query.get("X-Amz-Signature", "")
        if signature not in self.signatures or signature in self.ended:
            quoted = f"<Error><Code>AccessDenied</Code><Message>{asked.query}</Message></Error>"
            return Answer(403, quoted.encode())
        return ranged(self.blobs[asked.path.rsplit("/", 1)[1]], asked)


def _errors(code: str, message: str) -> bytes:
    return json.dumps({"errors": [{"code": code, "message": message}]}).encode()
