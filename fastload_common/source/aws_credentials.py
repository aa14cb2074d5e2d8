"""The search for credentials as botocore makes it, with what a load of many requests needs besides.

Guarantees: temporary keys are renewed ahead of their end, by one thread, once for each issue of
keys however short-lived they are; keys that are still good are used on where a renewal fails; a
search that found nothing is not repeated at once; the endpoints that give keys to pods and
instances are never asked through a proxy, and a pod's token is sent without its line break.

Knows botocore's providers and credentials, no buckets.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastload_common.clock import Clock, SystemClock
from fastload_common.config import environment

__all__ = ["CredentialChain", "LastingCredentials"]

_LOG = logging.getLogger(__name__)

# botocore renews when asked less than 15 minutes before the end, at every question.
_MOST_AHEAD_S = 14 * 60.0
_AHEAD_SHARE = 0.25
# A renewal that brought nothing new is tried again after this, or sooner where little is left.
_AGAIN_S = 60.0
_LEAST_AGAIN_S = 0.5
_LONGEST_S = 7 * 86_400.0
# A search ends at an instance's metadata, which takes seconds where there is none.
_NOTHING_FOUND_S = 30.0

_TOKEN = "AWS_CONTAINER_AUTHORIZATION_TOKEN"
_TOKEN_FILE = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"


class LastingCredentials:
    """Temporary credentials, whose keys of the moment cost nothing to ask for. For any thread.

    botocore's own renew whenever less than 15 minutes are left: at every signature, where keys
    live no longer than that.

    Args:
        found: botocore's refreshable credentials.
        clock: for their age.
    """

    def __init__(self, found: Any, clock: Clock | None = None) -> None:
        self._found = found
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._frozen: Any = None
        self._renew_s = 0.0
        self._end_s = 0.0

    def get_frozen_credentials(self) -> Any:
        """The keys to sign with now.

        Raises:
            Exception: of botocore: there are no good ones, and none could be had.
        """
        frozen = self._frozen
        now_s = self._clock.monotonic_s()
        if frozen is not None and now_s < self._renew_s:
            return frozen
        if not self._lock.acquire(blocking=frozen is None or now_s >= self._end_s):
            return frozen  # somebody is renewing them, and they are good until then
        try:
            if self._frozen is frozen or self._clock.monotonic_s() >= self._renew_s:
                self._renew()
            return self._frozen
        finally:
            self._lock.release()

    def refresh_needed(self, refresh_in: float | None = None) -> bool:
        """Whether asking for the keys may take as long as a renewal."""
        if refresh_in is not None:
            return bool(self._found.refresh_needed(refresh_in))
        return self._frozen is None or self._clock.monotonic_s() >= self._renew_s

    @property
    def access_key(self) -> Any:
        return self.get_frozen_credentials().access_key

    @property
    def secret_key(self) -> Any:
        return self.get_frozen_credentials().secret_key

    @property
    def token(self) -> Any:
        return self.get_frozen_credentials().token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)

    def _renew(self) -> None:
        """Ask for keys; the caller holds the lock."""
        before = self._frozen
        try:
            frozen = self._found.get_frozen_credentials()
        except Exception as error:
            now_s = self._clock.monotonic_s()
            if before is None or now_s >= self._end_s:
                raise
            # Its text may hold anything.
            _LOG.warning("credentials could not be renewed yet: %s", type(error).__name__)
            self._renew_s = now_s + self._again_s(self._end_s - now_s)
            return
        now_s = self._clock.monotonic_s()
        left_s = self._left_s()
        self._end_s = now_s + left_s
        if frozen == before:
            self._renew_s = now_s + self._again_s(left_s)
        else:
            self._renew_s = now_s + left_s - min(_MOST_AHEAD_S, left_s * _AHEAD_SHARE)
        self._frozen = frozen

    @staticmethod
    def _again_s(left_s: float) -> float:
        return max(_LEAST_AGAIN_S, min(_AGAIN_S, left_s * _AHEAD_SHARE))

    def _left_s(self) -> float:
        """How long the keys are good, by the one question that botocore answers."""
        low_s, high_s = 0.0, _LONGEST_S
        if not self._found.refresh_needed(high_s):
            return high_s
        while high_s - low_s > 0.1:
            middle_s = (low_s + high_s) / 2
            if self._found.refresh_needed(middle_s):
                high_s = middle_s
            else:
                low_s = middle_s
        return low_s


class CredentialChain:
    """botocore's component ``credential_provider``: its own chain of providers, improved.

    Args:
        chain: botocore's; its providers are replaced where they do not do.
        clock: for the age of keys, and of a search in vain.
    """

    def __init__(self, chain: Any, clock: Clock | None = None) -> None:
        from botocore.credentials import ContainerProvider

        self._chain = chain
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._nothing_until_s = 0.0
        self._found: Any = None
        method = ContainerProvider.METHOD
        chain.insert_before(method, ContainerProvider(environ=_ContainerVariables()))
        # The first one of that name was ours, so take the other one away.
        chain.providers.remove([p for p in chain.providers if method == p.METHOD][1])
        for provider in chain.providers:
            _ask_directly(provider)

    def load_credentials(self) -> Any:
        """What the first provider that has any gives; None: nobody has any.

        The same for all that ask at one moment, so that they renew together.
        """
        with self._lock:
            if self._found is None and self._clock.monotonic_s() >= self._nothing_until_s:
                found = self._chain.load_credentials()
                if found is None:
                    self._nothing_until_s = self._clock.monotonic_s() + _NOTHING_FOUND_S
                elif hasattr(found, "refresh_needed"):
                    found = LastingCredentials(found, self._clock)
                self._found = found
            return self._found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chain, name)


class _ContainerVariables(Mapping[str, str]):
    """The environment for botocore's container provider, with the token's file read and stripped.

    Read anew at every look: a pod's token is replaced while it runs.
    """

    def __getitem__(self, name: str) -> str:
        if name == _TOKEN_FILE:
            raise KeyError(name)
        if name == _TOKEN and (path := environment().get(_TOKEN_FILE)):
            return Path(path).read_text().strip()
        value = environment()[name]
        return value.strip() if name == _TOKEN else value

    def __contains__(self, name: object) -> bool:
        if name == _TOKEN_FILE:
            return False
        if name == _TOKEN and environment().get(_TOKEN_FILE):
            return True
        return name in environment()

    def __iter__(self) -> Iterator[str]:
        return iter(name for name in environment() if name in self)

    def __len__(self) -> int:
        return len(list(iter(self)))


def _ask_directly(provider: Any) -> None:
    """Keep an instance's metadata from being asked through HTTP_PROXY.

    botocore takes the variables for it when it makes the fetcher, and has no option for that.
    """
    from botocore.httpsession import URLLib3Session

    fetcher = getattr(provider, "_role_fetcher", None)
    if fetcher is not None and hasattr(fetcher, "_session") and hasattr(fetcher, "_timeout"):
        fetcher._session = URLLib3Session(timeout=fetcher._timeout)
