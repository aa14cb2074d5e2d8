"""An S3-speaking loopback server that does harm where, when and as often as a test says.

`Rig` is the server; a `Fault` says which requests meet which effect; `RequestLog` tells what came.
``python -m fastload_common.testing.rig --help`` runs it as a process of its own.
"""

from fastload_common.testing.rig.effects import (
    ACCESS_DENIED,
    EXPIRED_TOKEN,
    INTERNAL_ERROR,
    KMS_DISABLED,
    NO_SUCH_KEY,
    SLOW_DOWN,
    TOO_MANY_REQUESTS,
    Choice,
    Chunked,
    Close,
    ContentRange,
    Effect,
    Error,
    Etag,
    FirstByte,
    Flip,
    Garbage,
    Headers,
    IgnoreRange,
    Lognormal,
    Rate,
    Redirect,
    Reset,
    Short,
    Shorter,
    Slower,
    Stall,
    Status,
    Unframed,
)
from fastload_common.testing.rig.faults import Fault
from fastload_common.testing.rig.log import LoggedRequest, RequestLog
from fastload_common.testing.rig.objects import Generated, checksum
from fastload_common.testing.rig.process import RigProcess
from fastload_common.testing.rig.server import Rig
from fastload_common.testing.rig.sigv4 import AccessKey
from fastload_common.testing.rig.storm import Storm, random_faults

__all__ = [
    "ACCESS_DENIED",
    "EXPIRED_TOKEN",
    "INTERNAL_ERROR",
    "KMS_DISABLED",
    "NO_SUCH_KEY",
    "SLOW_DOWN",
    "TOO_MANY_REQUESTS",
    "AccessKey",
    "Choice",
    "Chunked",
    "Close",
    "ContentRange",
    "Effect",
    "Error",
    "Etag",
    "Fault",
    "FirstByte",
    "Flip",
    "Garbage",
    "Generated",
    "Headers",
    "IgnoreRange",
    "LoggedRequest",
    "Lognormal",
    "Rate",
    "Redirect",
    "RequestLog",
    "Reset",
    "Rig",
    "RigProcess",
    "Short",
    "Shorter",
    "Slower",
    "Stall",
    "Status",
    "Storm",
    "Unframed",
    "checksum",
    "random_faults",
]
