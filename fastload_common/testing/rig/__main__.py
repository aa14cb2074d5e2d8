"""The rig as a process of its own: ``python -m fastload_common.testing.rig --help``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import IO, Any

from fastload_common.errors import ConfigError
from fastload_common.testing.rig.fault_json import load_faults
from fastload_common.testing.rig.options import make_rig, parser
from fastload_common.testing.rig.server import Rig
from fastload_common.units import parse_size


def main(arguments: Sequence[str], commands: IO[str], replies: IO[str]) -> int:
    """Serve until ``commands`` ends; returns the exit status."""
    options = parser().parse_args(arguments)
    try:
        rig, variables = make_rig(options)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with rig:
        hello = {"port": rig.port, "endpoint": rig.endpoint, "environ": rig.environ() | variables}
        print(json.dumps(hello), file=replies, flush=True)
        for line in commands:
            print(json.dumps(_obey(rig, line.strip())), file=replies, flush=True)
    return 0


def _obey(rig: Rig, command: str) -> Any:
    verb, _, rest = command.partition(" ")
    try:
        match verb:
            case "stats":
                return rig.log.summary()
            case "log":
                return [request.as_dict() for request in rig.log.requests()]
            case "clear":
                rig.log.clear()
            case "release":
                rig.release()
            case "faults":
                rig.arrange(load_faults(rest))
            case "link":
                rig.limit_link(parse_size(rest) if rest else None)
            case _:
                return {"error": f"not a command: {verb!r}"}
    except ConfigError as error:
        return {"error": str(error)}
    return {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin, sys.stdout))
