"""All that requests to S3 import, imported at once.

For a thread that works while its process may fork: a module that is being imported at that moment
can never be imported in the child, which then waits for a thread that it does not have.
"""

from __future__ import annotations

import contextlib
import importlib

__all__ = ["import_for_s3"]

_MODULES = (
    "fastload_common.source.s3",
    "fastload_common.source.range_receiver",
    "fastload_common.source.small_reads",
    "fastload_common.source.http_tunnel",
    # By the first name that is looked up, the first listing, the first date.
    "encodings.idna",
    "xml.etree.ElementTree",
    "urllib3.connection",
    "concurrent.futures.thread",
)


def import_for_s3() -> None:
    """Import, and make a client that is not used. No request is made; nothing is raised."""
    with contextlib.suppress(Exception):
        for name in _MODULES:
            importlib.import_module(name)
        from fastload_common.source.aws_session import make_client, shared_session

        client = make_client(
            shared_session(),
            service_name="s3",
            region_name="us-east-1",
            # With any other search for credentials there would be requests.
            aws_access_key_id="none",
            aws_secret_access_key="none",
        )
        client.close()
