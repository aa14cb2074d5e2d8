"""The fields of a load's report, and its phases; docs/report.md is generated from them."""

from __future__ import annotations

__all__ = ["PHASES", "SCHEMA", "SCHEMA_VERSION"]

SCHEMA_VERSION = 1

PHASES: tuple[str, ...] = (
    "pull",
    "list",
    "headers",
    "trace",
    "plan",
    "agree",
    "fetch",
    "verify",
    "place",
    "finish",
)
"""The phases of a load in their usual order; fetch, verify and place interleave.

In ``pull`` a registry is asked what the layers are, and compressed ones are unpacked on this node,
or another process that does it is waited for. In ``agree`` a rank meets the others of its host, and
waits until they have told what they need.
"""

SCHEMA: dict[str, tuple[str, str]] = {
    "schema": ("integer", "Version of this form; grows when a field changes its meaning."),
    "fastload_version": ("string", "Version of fastload."),
    "started_at": ("string", "UTC time when the load began, ISO 8601."),
    "status": ("string", "`ok`, `failed`, or `running` where the load never ended."),
    "error": ("string or null", "Class and message of the error that ended the load."),
    "engine": ("string", "Engine that asked for the load, such as `vllm`."),
    "engine_version": ("string", "Version of that engine."),
    "uri": ("string", "The model: `s3://bucket/prefix`, an `oci://` URI or a directory."),
    "rank": ("integer", "Rank of this process among those that load the model."),
    "world_size": ("integer", "How many ranks load the model."),
    "wall_s": ("number", "Seconds from the start of the load to its end."),
    "cpu_s": (
        "number",
        "CPU seconds (user and system) of this process and its ended children in that time.",
    ),
    "phases_s": (
        "object",
        "Seconds per phase: " + ", ".join(f"`{name}`" for name in PHASES) + ". A phase that "
        "runs inside another one counts for itself only. Phases in other threads may overlap. In "
        "`pull` a registry is asked what the layers are, and compressed ones are unpacked; in "
        "`agree` a rank meets the others of its host and waits for what they need.",
    ),
    "model_bytes": ("integer", "Size of all tensors of the checkpoint."),
    "needed_bytes": ("integer", "Bytes of the checkpoint that this rank needs."),
    "fetched_bytes": (
        "integer",
        "Bytes that this rank fetched into its staging memory, each range once, for itself or for "
        "other ranks too. The sum over the ranks of a host is what came over its network.",
    ),
    "refetched_bytes": ("integer", "Bytes that a retry or a hedge brought."),
    "over_read_bytes": ("integer", "Bytes fetched between needed ranges and used by nobody."),
    "merge_gap": (
        "object",
        "Gaps up to `bytes` were read over rather than asked for twice. Where that is not set, it "
        "comes from `latency_s` and `bytes_per_s` of a connection, as observed in the first "
        "reads: in `latency_reads` and `rate_reads` of them (0: the usual value was taken).",
    ),
    "requests": ("integer", "Ranged requests sent for weights, retries included."),
    "retries": ("integer", "Requests that repeat an earlier one, or race it."),
    "hedges": ("integer", "Second requests for what a slow one had not brought."),
    "hedges_won": ("integer", "Hedges that were faster."),
    "hedge_wasted_bytes": ("integer", "Bytes that came by a hedge and by the other request too."),
    "kills": ("integer", "Slow requests that were ended and sent again."),
    "latency_s": (
        "object",
        "Seconds of successful requests: `first_byte` (until the reply's head) and `total` (until "
        "the last byte), each with `p50`, `p90`, `p99` and `max`. Empty where nothing was fetched.",
    ),
    "new_connections": ("integer", "Connections that had to be opened."),
    "request_errors": ("object", "Failed requests by class of error; most were asked again."),
    "settled_reads": ("integer", "Reads that the trace needed at once because of their value."),
    "settled_bytes": ("integer", "Bytes of those reads."),
    "eager_reason": ("string or null", "Why tensors were read whole instead of traced, if so."),
    "tensors": ("integer", "Tensors handed to the engine."),
    "transfers": ("integer", "Copies that the trace recorded."),
    "verified": (
        "object",
        "What was compared with stored checksums: `mode` (as `FASTLOAD_VERIFY`), the number of "
        "objects that were `compared`, are `without_checksum` of the whole, or were `partly_read` "
        "and so not compared, and `read_bytes`: read only to be compared, in no other number "
        "of bytes here. Empty with `off`, and where the load ended before.",
    ),
    "node": (
        "object",
        "The exchange with the other ranks of this host: how many `ranks` they are, this one "
        "included; `exchange`: `on`, or `off` and the `reason`. If on: "
        "`fetched_for_others_bytes` (of `fetched_bytes`, in requests whose bytes others needed "
        "too), `received_bytes` (in requests of others), `wait_s` (seconds in which this rank only "
        "waited for others), and of all ranks together `node_fetched_bytes`, "
        "`node_over_read_bytes` (read over gaps) and `node_shared_bytes` (in requests for more "
        "than one rank). Empty where one rank loads by itself.",
    ),
    "devices": (
        "object",
        "For each device that was placed on beside the fetch: `pinned_bytes` of staging memory "
        "that is page-locked, `pinned_of_others_bytes` (other ranks' memory), `pin_s` (seconds "
        "that took, beside other work), and bytes by their way: `run_bytes`, `row_bytes`, "
        "`packed_bytes` (many small tensors in one copy; `packed_pieces` of them) and "
        "`spread_bytes` (put in place on the device); `ring_bytes` of them were copied on the "
        "host first, and `pageable_bytes` came from memory that is not page-locked. Numbers that "
        "are 0 are left out. Empty for the host.",
    ),
    "node_cache": (
        "object",
        "The node cache, where it is set: its `directory`; the bytes of objects that were "
        "`read_bytes` from it (in no other number of bytes fetched), and of those that came from "
        "the source `kept_bytes`, `pending_bytes` (still to be written when the load ended) and "
        "`dropped_bytes` (not kept: the disk was slower than the source, or see `reason`); "
        "`damaged_bytes`: held, but not as recorded; `reason`: why it was not used, or nothing "
        "was kept.",
    ),
    "pulled": (
        "object",
        "Where compressed layers had to be unpacked on this node: the `directory`; `state`: "
        "`pulled` by this process, `waited` for another one, or `found` there; `wait_s`: seconds "
        "that this load spent on it. Of the pull, whoever did it and whenever that was: `layers` "
        "and `files`, `size_bytes` (as they are stored), of these `fetched_bytes` and "
        "`resumed_bytes` (left by an earlier one), `unpacked_bytes`, `entries` and `tree_bytes` on "
        "the disk, and `pull_s` seconds. `fetched_bytes` and `requests` of the load do not count "
        "them: it read the directory. Empty where nothing was unpacked.",
    ),
    "peak_staging_bytes": ("integer", "Most staging memory held at once by this process."),
    "settings": ("object", "Settings that are not at their default."),
}
"""Field of the JSON -> (type, meaning), in the order in which they are written."""
