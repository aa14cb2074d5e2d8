"""An advice as what a node or a container reads: TOML, user data, variables, YAML. Pure text.

Values are numbers, words and paths; strings, some of which came from a user, are quoted by
`json.dumps`: JSON strings are TOML and YAML strings as well.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from fastload_common.advise.records import Setting, Value

__all__ = ["al2023_user_data", "bottlerocket_toml", "kubernetes_env", "shell_env"]

_BOTTLEROCKET = "settings.container-runtime-plugins.soci-snapshotter"
_CONFIG = "/etc/soci-snapshotter-grpc/config.toml"
_BOUNDARY = "BOUNDARY"


def bottlerocket_toml(soci: Sequence[Setting]) -> str:
    """User data of a Bottlerocket node, 1.44 or newer."""
    lines = [
        "[settings.container-runtime]",
        'snapshotter = "soci"',
        "",
        f"[{_BOTTLEROCKET}]",
        'pull-mode = "parallel-pull-unpack"',
        "",
        f"[{_BOTTLEROCKET}.parallel-pull-unpack]",
        *(
            f"{setting.name.replace('_', '-')} = {json.dumps(setting.value)}"
            for setting in soci
            if _differs(setting)
        ),
    ]
    return "\n".join(lines) + "\n"


def al2023_user_data(soci: Sequence[Setting]) -> str:
    """User data of an Amazon Linux 2023 node, AMI of 2025-08-21 or newer.

    The feature gate switches parallel pull on. nodeadm has no fields for its thresholds, so a
    script changes them in the snapshotter's file before that starts.
    """
    edits = [
        f"sed -Ei 's/^[[:space:]]*{setting.name}[[:space:]]*=.*/"
        f"{setting.name} = {json.dumps(setting.value)}/' {_CONFIG}"
        for setting in soci
        if _differs(setting)
    ]
    script = ["#!/bin/bash", "set -eu", *edits]
    gate = [
        "apiVersion: node.eks.aws/v1alpha1",
        "kind: NodeConfig",
        "spec:",
        "  featureGates:",
        "    FastImagePull: true",
    ]
    lines = [
        "MIME-Version: 1.0",
        f'Content-Type: multipart/mixed; boundary="{_BOUNDARY}"',
        "",
        f"--{_BOUNDARY}",
        'Content-Type: text/x-shellscript; charset="us-ascii"',
        "",
        *script,
        "",
        f"--{_BOUNDARY}",
        "Content-Type: application/node.eks.aws",
        "",
        *gate,
        "",
        f"--{_BOUNDARY}--",
    ]
    return "\n".join(lines) + "\n"


def shell_env(settings: Sequence[Setting]) -> str:
    """Lines ``NAME=value`` for a shell; what is no variable is left out.

    Only what a shell would take apart is quoted, so an ``--env-file``, which knows no quotes, takes
    the usual values too.
    """
    return "".join(f"{name}={shlex.quote(_text(value))}\n" for name, value in _variables(settings))


def kubernetes_env(settings: Sequence[Setting]) -> str:
    """The list ``env`` of a container in Kubernetes."""
    lines = ["env:"]
    for name, value in _variables(settings):
        lines += [f"  - name: {name}", f"    value: {json.dumps(_text(value))}"]
    return "\n".join(lines) + "\n"


def _differs(setting: Setting) -> bool:
    """Whether it has to be written: -1, no limit over all images, is the default everywhere."""
    return setting.value is not None and setting.value != -1


def _variables(settings: Sequence[Setting]) -> list[tuple[str, Value]]:
    return [
        (setting.name, setting.value)
        for setting in settings
        if setting.value is not None and setting.name.isupper()
    ]


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
