"""Every error that fastload raises, split by whose fault it is.

    FastloadError
    ├── ConfigError                 the operator's settings
    ├── EngineUnsupportedError      this engine version lacks a hook that we need
    ├── SourceError                 the object store or the file system
    │   ├── ObjectMissingError      no such bucket, key or directory
    │   ├── AccessDeniedError       credentials absent, wrong, expired or not allowed
    │   ├── ObjectChangedError      replaced while it was being read
    │   ├── RangeMismatchError      the reply is not the range that was asked
    │   ├── ChecksumMismatchError   the bytes are not those whose checksum the store keeps
    │   └── SourceUnavailableError  network, TLS, throttling, server faults
    ├── CheckpointError             the model's files
    │   ├── NoWeightsError          nothing that we can load under this URI
    │   ├── HeaderInvalidError      not a safetensors file, or a damaged one
    │   ├── HeaderTooLargeError     the length field claims more than is allowed
    │   ├── ShardMissingError       the index names an object that is not there
    │   ├── ShardTruncatedError     an object is shorter than its header says
    │   ├── TensorMissingError      the index or the model names a tensor that no file has
    │   └── TensorMismatchError     shape or dtype do not fit
    ├── TraceError                  the engine did what a lazy tensor cannot stand for
    ├── PeerError                   another rank of this host, which loads together with this one
    ├── CompileCacheError           the compile cache; the engine compiles instead
    │   ├── FactorsInvalidError     what a key is made of is incomplete, unknown or noise
    │   ├── BundleInvalidError      damaged, or not what a bundle may be
    │   ├── BundleUnfitError        sound, and not for this process
    │   ├── BundleUntrustedError    not signed with the operator's key
    │   └── StoreUnsafeError        other users can write where entries are kept
    ├── PullError                   what `fastload pull` fetches, or where it puts it
    │   ├── ArchiveInvalidError     a layer is no sound archive: damaged, cut off, or contradictory
    │   └── ArchiveUnsafeError      a layer asks for what an archive may not do
    ├── StagingError                host memory, and the way from it into the model's
    │   ├── OutOfBudgetError        the budget cannot hold what must be held at once
    │   └── DeviceCopyError         a copy to a GPU or another device failed
    └── DeadlineError               the load as a whole took longer than allowed

Knows nothing but the standard library. A message says what was asked, what came and
what to do. It never holds a credential, a signature or a signed URL: whoever raises passes
object URIs (``s3://bucket/key``), never request URLs.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "AccessDeniedError",
    "ArchiveInvalidError",
    "ArchiveUnsafeError",
    "BundleInvalidError",
    "BundleUnfitError",
    "BundleUntrustedError",
    "CheckpointError",
    "ChecksumMismatchError",
    "CompileCacheError",
    "ConfigError",
    "DeadlineError",
    "DeviceCopyError",
    "EngineUnsupportedError",
    "FactorsInvalidError",
    "FastloadError",
    "HeaderInvalidError",
    "HeaderTooLargeError",
    "NoWeightsError",
    "ObjectChangedError",
    "ObjectMissingError",
    "OutOfBudgetError",
    "PeerError",
    "PullError",
    "RangeMismatchError",
    "ShardMissingError",
    "ShardTruncatedError",
    "SourceError",
    "SourceUnavailableError",
    "StagingError",
    "StoreUnsafeError",
    "TensorMismatchError",
    "TensorMissingError",
    "TraceError",
]


class FastloadError(Exception):
    """Base of all errors of fastload.

    Args:
        what: one sentence: what was asked and what came instead.
        hint: one sentence: what to do about it; appended to the message.
        fields: facts for machines and for the report (object, range, status, attempts, ...).
            Shown in the message as ``key=value`` where the value is not None.

    Attributes:
        is_said: whether the log has it already.
    """

    retryable: ClassVar[bool] = False
    """Whether asking again may help without anybody changing anything."""

    def __init__(self, what: str, *, hint: str = "", **fields: Any) -> None:
        self.what = what
        self.hint = hint
        self.fields = {name: value for name, value in fields.items() if value is not None}
        self.is_said = False
        super().__init__(what)

    def __str__(self) -> str:
        parts = [self.what]
        if self.fields:
            parts.append("[" + ", ".join(f"{k}={v}" for k, v in self.fields.items()) + "]")
        if self.hint:
            parts.append(f"-> {self.hint}")
        return " ".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        # Engines send worker errors between processes; keyword arguments need this.
        # The state holds the notes and what was set afterwards, such as received_bytes.
        return (_rebuild, (type(self), self.what, self.hint, self.fields), vars(self))


def _rebuild(
    kind: type[FastloadError], what: str, hint: str, fields: dict[str, Any]
) -> FastloadError:
    return kind(what, hint=hint, **fields)


class ConfigError(FastloadError):
    """A setting is unknown, ill-typed, out of range, or contradicts another one."""


class EngineUnsupportedError(FastloadError):
    """This version of the engine lacks a name that the adapter needs."""


class SourceError(FastloadError):
    """The object store or file system did not give what was asked.

    ``received_bytes`` is how many good bytes at the start of the buffer arrived before the
    failure, so that a retry asks for the rest only.
    """

    received_bytes: int = 0


class ObjectMissingError(SourceError):
    """No such bucket, key or directory."""


class AccessDeniedError(SourceError):
    """Credentials are absent, wrong, expired, or do not allow this."""


class ObjectChangedError(SourceError):
    """The object was replaced or deleted while it was being read; bytes must not be mixed."""


class RangeMismatchError(SourceError):
    """The reply is not the range that was asked (status, Content-Range, length)."""


class ChecksumMismatchError(SourceError):
    """The bytes that arrived are not those whose checksum the store keeps."""


class SourceUnavailableError(SourceError):
    """Network, TLS, throttling or server fault."""

    retryable = True


class CheckpointError(FastloadError):
    """The model's files are not what they must be."""


class NoWeightsError(CheckpointError):
    """Nothing that can be loaded stands under the URI."""


class HeaderInvalidError(CheckpointError):
    """Not a safetensors file, or one whose header is damaged."""


class HeaderTooLargeError(HeaderInvalidError):
    """The header's length field claims more than the format allows or the object has."""


class ShardMissingError(CheckpointError):
    """The index names a shard that is not there."""


class ShardTruncatedError(CheckpointError):
    """A shard's size is not what its header says."""


class TensorMissingError(CheckpointError):
    """A tensor is named that no shard has."""


class TensorMismatchError(CheckpointError):
    """A tensor's shape or dtype does not fit."""


class TraceError(FastloadError):
    """The engine did what a lazy tensor cannot stand for; reading eagerly still works."""


class PeerError(FastloadError):
    """Another rank, which loads together with this one, has failed; the message is that rank's.

    ``failure`` is what it told, for whoever must pass it on.
    """

    failure: Any = None


class CompileCacheError(FastloadError):
    """The compile cache could not be used; never a reason to end a server."""


class FactorsInvalidError(CompileCacheError):
    """What a key is made of is incomplete, unknown, or would differ without a reason."""


class BundleInvalidError(CompileCacheError):
    """A bundle or its manifest is damaged, or asks for what a bundle may not do."""


class BundleUnfitError(CompileCacheError):
    """A bundle is more than this process may unpack, or of another version; others can use it."""


class BundleUntrustedError(CompileCacheError):
    """A bundle is not signed with the operator's key."""


class StoreUnsafeError(CompileCacheError):
    """Other users can write where entries are kept, and so could run code in the engine."""


class PullError(FastloadError):
    """What is pulled cannot be put where it should be; nothing has appeared there."""


class ArchiveInvalidError(PullError):
    """A layer is no sound archive: damaged, cut off, too long, or it contradicts itself."""


class ArchiveUnsafeError(PullError):
    """A layer asks for what an archive may not do: leave its place, make devices, fill the disk."""


class StagingError(FastloadError):
    """Host memory for staging could not be had, or not be copied from."""


class OutOfBudgetError(StagingError):
    """The memory budget cannot hold what must be held at once."""


class DeviceCopyError(StagingError):
    """A copy to the device failed; the model is not whole, and the device may be of no use now."""


class DeadlineError(FastloadError):
    """The whole load took longer than the configured deadline."""
