"""Which of the places that may have a blob is asked for it: a mirror until it fails. No I/O.

Choices only ever move on to the next place, the registry being the last, so they end.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence

from fastload_common.errors import SourceError
from fastload_common.source.http_message import Endpoint
from fastload_common.source.oci_places import Place
from fastload_common.units import MIB

__all__ = ["PlaceChoice"]

_LOG = logging.getLogger(__name__)

# So many times one range may fail at a mirror, without a byte, before the mirror is given up. One
# fault is chance, and the settings' attempts must not be used up before there is a change.
_MOST_FAULTS = 3
# What brought so much is no used-up attempt for the transfer either.
_PROGRESS_BYTES = MIB


class PlaceChoice:
    """The choices of one artifact in one process. For any thread.

    Args:
        uri: the artifact, for messages.
        places: in the order in which they are asked.
        max_attempts: of the settings: the last of them is for another place.
    """

    def __init__(self, uri: str, places: Sequence[Place], max_attempts: int) -> None:
        self._uri = uri
        self._places = tuple(places)
        self._most_faults = max(1, min(_MOST_FAULTS, max_attempts))
        self._most_cuts = max(1, max_attempts - 1)
        self._lock = threading.Lock()
        self._first = 0
        self._given_up: dict[str, int] = {}
        self._faults: Counter[tuple[Place, str, int]] = Counter()
        self._cuts: Counter[tuple[Place, str, int]] = Counter()
        self._warned: set[Place] = set()
        self._senders: dict[str, dict[str, None]] = {}

    def place(self, digest: str) -> Place:
        """Who is to be asked for a blob now."""
        return self._places[max(self._first, self._given_up.get(digest, 0))]

    def failed(self, place: Place, digest: str, end: int, error: SourceError) -> bool:
        """Take note of a failed request; whether another place is to be asked at once.

        What may pass counts for its range: after a few times the mirror is given up for all blobs,
        after all but one of the settings' attempts if it brought some bytes each time.
        What does not pass, such as a blob that is not there, gives it up for this blob.

        Args:
            end: of the range, which stays the same while its beginning arrives.
        """
        with self._lock:
            if error.received_bytes >= _PROGRESS_BYTES:
                return False  # it comes on: only the rest is asked for again
            if self.place(digest) != place:
                return True
            if place == self._places[-1]:
                return False
            if not error.retryable:
                self._leave(place, digest, error)
                return True
            faults, most = self._faults, self._most_faults
            if error.received_bytes:
                faults, most = self._cuts, self._most_cuts
            faults[place, digest, end] += 1
            if faults[place, digest, end] < most:
                return False
            self._first = self._places.index(place) + 1
            self._tell(f"the mirror {place} is used no more in this load", place, error)
            return True

    def give_up(self, place: Place, digest: str, error: SourceError) -> bool:
        """Have a blob read from the next place; whether there is one."""
        with self._lock:
            if self.place(digest) != place:
                return True
            if place == self._places[-1]:
                return False
            self._leave(place, digest, error)
            return True

    # Who sent what, for messages

    def asks(self, digest: str, endpoint: Endpoint) -> None:
        """A request for a part of a blob is made there."""
        self._senders.setdefault(digest, {})[str(endpoint)] = None

    def senders(self, digest: str) -> str:
        """The hosts that were asked for a blob, in order; empty: none."""
        return ", ".join(tuple(self._senders.get(digest, ())))

    def forget_senders(self, digest: str) -> None:
        """What was read of a blob is read anew."""
        self._senders.pop(digest, None)

    def _leave(self, place: Place, digest: str, error: SourceError) -> None:
        self._given_up[digest] = self._places.index(place) + 1
        self._tell(
            f"{digest}, and what else fails so, is not read from the mirror {place}", place, error
        )

    def _tell(self, what: str, place: Place, error: SourceError) -> None:
        """One warning for a mirror; its later failures say the same."""
        level = logging.DEBUG if place in self._warned else logging.WARNING
        self._warned.add(place)
        _LOG.log(level, "%s: %s: %s", self._uri, what, error)
