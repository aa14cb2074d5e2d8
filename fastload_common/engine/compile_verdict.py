"""Whether a start's compiled artefacts were used, by the engine's own counters, in one line."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fastload_common.compile_cache.lifecycle import Outcome
from fastload_common.engine.compile_counters import Counted

__all__ = ["SCHEMA", "Verdict", "judge"]

SCHEMA: dict[str, tuple[str, str]] = {
    "kind": ("string", "`compile_cache`, which tells this line from that of a load."),
    "schema": ("integer", "Version of this form."),
    "fastload_version": ("string", "Version of fastload."),
    "engine": ("string", "The engine."),
    "measured": (
        "string",
        "By the engine's counters: `hit` (all that was needed was found), `partial` (some), "
        "`unused` (an entry was put into place and nothing of it was used), `miss` (no entry, and "
        "compiled), `warm` (no entry was needed: the engine's own directory had it), `idle` "
        "(nothing is compiled in this configuration).",
    ),
    "why": ("string", "Why not all was used, as far as that is known."),
    "compiled": ("integer", "Artefacts that were compiled, all ranks together."),
    "loaded": ("integer", "Artefacts that were found and used, all ranks together."),
    "compile_s": ("number", "Seconds in compilation and loading of artefacts, slowest rank."),
    "saved_s": (
        "number or null",
        "`compile_s` of the start that published the entry, minus that of this one.",
    ),
    "counters": ("object", "The engine's counters by name, all ranks together."),
    "ranks": ("integer", "Ranks whose counters are in it."),
    "status": ("string", "Of the stores: `hit`, `miss` or `failed`."),
    "key": ("string", "Digest of all factors; `fastload cache show KEY` prints them."),
    "store": ("string", "Where the entry came from."),
    "reason": ("string", "Why the stores had no entry."),
    "nearest_key": ("string", "On a miss, the entry that differs least."),
    "differing": ("array", "The factors in which that one differs."),
    "files": ("integer", "Files that were put into place."),
    "content_bytes": ("integer", "Their bytes."),
    "restore_s": ("number", "Seconds to restore, beside the loading of weights."),
    "waited_s": ("number", "Seconds that the start was held up by it."),
    "published": ("object", "Store -> `stored`, or why not. Empty: not tried."),
    "publish_s": ("number", "Seconds in the background for it."),
    "notes": ("array", "What went wrong, one sentence each."),
}
"""Fields of the report's line: type and meaning."""

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """See `SCHEMA`."""

    measured: str
    why: str
    compiled: int
    loaded: int
    compile_s: float
    saved_s: float | None
    counters: dict[str, int]
    ranks: int

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        text = (
            f"{self.measured}, as measured: {self.loaded} artefacts found and used, "
            f"{self.compiled} compiled, {self.compile_s:.1f} s in it"
        )
        if self.saved_s is not None:
            text += f", {self.saved_s:.1f} s less than without"
        return f"{text}; {self.why}" if self.why else text


def judge(
    outcome: Outcome, counted: Counted, ranks: int, published_s: float | None, why: str = ""
) -> Verdict:
    """Compare what was put into place with what the engine did.

    Args:
        counted: all ranks together.
        published_s: `Counted.compile_s` of the start that compiled the entry; None: unknown.
        why: what the adapter knows of artefacts that could not be used.
    """
    restored = outcome.status == "hit"
    if counted.compiled and counted.loaded and restored:
        measured = "partial"
    elif counted.compiled:
        measured = "unused" if restored else "miss"
    elif counted.loaded:
        measured = "hit" if restored else "warm"
    else:
        measured = "idle"
    if measured == "idle":
        why = why or "this configuration compiles nothing, or nothing that is counted"
    elif measured == "unused":
        why = why or "the engine found none of them under its own key"
    saved_s = None
    if restored and published_s is not None:
        saved_s = round(published_s - counted.compile_s, 3)
    return Verdict(
        measured=measured,
        why=why if measured not in ("hit", "warm", "miss") else "",
        compiled=counted.compiled,
        loaded=counted.loaded,
        compile_s=round(counted.compile_s, 3),
        saved_s=saved_s,
        counters=counted.details,
        ranks=ranks,
    )
