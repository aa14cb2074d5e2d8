"""Checks of the object store: credentials and where they come from, endpoint, one ranged read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastload_common.cli.check import Check, Status
from fastload_common.config import Settings, environment
from fastload_common.errors import AccessDeniedError, ObjectMissingError
from fastload_common.load.listing import only_listing_is_denied
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.units import KIB, format_size

if TYPE_CHECKING:
    from fastload_common.source.base import ObjectSource

__all__ = ["check_credentials", "check_source"]

_PROBE_BYTES = 64 * KIB

_ORIGINS = {
    "env": "environment variables",
    "shared-credentials-file": "the shared credentials file",
    "config-file": "the AWS configuration file",
    "assume-role": "an assumed role of a profile",
    "assume-role-with-web-identity": "a web identity token (IRSA)",
    "sso": "single sign-on",
    "custom-process": "a credential process",
    "container-role": "the container endpoint (ECS, EKS Pod Identity)",
    "iam-role": "the instance's role",
}
"""botocore's names for where credentials came from, in words."""


def check_credentials(uri: str | None, settings: Settings) -> Iterator[Check]:
    """Which credentials the AWS chain finds, and where. Nothing is sent to S3."""
    if uri is not None and not uri.startswith("s3://"):
        return
    if settings.anonymous:
        yield Check("credentials", "ok", "not looked for: FASTLOAD_ANONYMOUS is set")
        return
    import botocore.exceptions
    import botocore.session

    session = botocore.session.get_session()
    profile = session.get_config_variable("profile") or "default"
    remedy = (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role; for a public "
        "bucket set FASTLOAD_ANONYMOUS=1"
    )
    try:
        credentials = session.get_credentials()
        key = credentials.get_frozen_credentials().access_key if credentials else None
    except botocore.exceptions.BotoCoreError as error:
        yield Check("credentials", "fail", f"profile {profile}: {error}", remedy)
        return
    if credentials is None or not key:
        # Without a URI nobody has said that S3 is wanted at all.
        status: Status = "warn" if uri is None else "fail"
        yield Check("credentials", status, f"none found (profile {profile})", remedy)
        return
    origin = _ORIGINS.get(credentials.method, credentials.method)
    yield Check("credentials", "ok", f"key ...{key[-4:]} from {origin}, profile {profile}")


def check_source(uri: str | None, settings: Settings) -> Iterator[Check]:
    """How the source is reached, and one ranged read from it."""
    if uri is None:
        endpoint = environment().get("AWS_ENDPOINT_URL_S3") or environment().get("AWS_ENDPOINT_URL")
        found = f"AWS_ENDPOINT_URL is {endpoint}; " if endpoint else ""
        remedy = "give a URI to try a read: fastload doctor s3://bucket/prefix"
        yield Check("source", "warn", f"{found}not tried", remedy)
        return
    from fastload_common.source.registry import open_source

    with contextlib.closing(open_source(uri, settings)) as source:
        described = source.describe()
        yield Check("source", "ok", f"{described.kind}: {described.root}")
        for name, value in described.facts.items():
            if name in ("credentials", "anonymous"):
                continue  # have a line of their own
            # A source that cannot say how it would be reached says why.
            yield Check(name.replace("_", " "), "fail" if name == "error" else "ok", value)
        layers = _compressed(source, settings)
        if layers is not None:
            yield layers
        yield _read_once(source, _any_layer(source) if layers else _any_object(source))


def _compressed(source: ObjectSource, settings: Settings) -> Check | None:
    """What a load would have to unpack on this node first; nothing is."""
    from fastload_common.clock import SystemClock
    from fastload_common.load.model_root import unpacking_of

    unpacking = unpacking_of(source, settings, SystemClock())
    if unpacking is None:
        return None
    if unpacking.there is not None:
        return Check("layers", "ok", str(unpacking))
    remedy = "push it without compression, and each rank reads only what it needs"
    return Check("layers", "warn", str(unpacking), remedy)


def _any_layer(source: ObjectSource) -> ObjectId | None:
    from fastload_common.source.oci import OciSource

    if not isinstance(source, OciSource):
        return None
    return max((source.blob(layer) for layer in source.layers()), key=_size, default=None)


def _read_once(source: ObjectSource, object_id: ObjectId | None) -> Check:
    if object_id is None:
        remedy = "look at the bucket and prefix; a model has its files directly under the URI"
        return Check("ranged read", "fail", f"no object under {source.root}", remedy)
    # From the middle: a server that ignores ranges would be seen.
    start = object_id.size_bytes // 2
    end = min(start + _PROBE_BYTES, object_id.size_bytes)
    buffer = memoryview(bytearray(end - start))
    with contextlib.closing(source.open_receiver()) as receiver:
        receipt = receiver.receive(object_id, ByteRange(start, end), buffer)
    found = (
        f"{format_size(receipt.size_bytes)} of {object_id.uri}, first byte after "
        f"{receipt.first_byte_s * 1000:.1f} ms, all after {receipt.total_s * 1000:.1f} ms"
    )
    return Check("ranged read", "ok", found)


def _any_object(source: ObjectSource) -> ObjectId | None:
    """An object that is not empty: the largest of a model's own level, as weights are."""
    try:
        listed = [item.object_id for item in source.list(recursive=False)]
    except AccessDeniedError as denied:
        if not only_listing_is_denied(denied):
            raise
        # Some roles may read but not list.
        try:
            return source.stat("config.json")
        except (AccessDeniedError, ObjectMissingError) as refused:
            # A reply to HEAD has no body: what was said to the listing tells more.
            raise denied from refused
    return max((item for item in listed if item.size_bytes), key=_size, default=None)


def _size(object_id: ObjectId) -> int:
    return object_id.size_bytes
