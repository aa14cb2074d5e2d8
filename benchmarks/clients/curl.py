"""libcurl through `ctypes`: the alternative to receiver processes. A measurement, not a product.

Threads of this process call `curl_easy_perform`, without the interpreter's lock. There is no
callback into Python: libcurl writes into a C stream over touched memory (`fmemopen`). Unsigned.

Why fastload does not do this: it needs a libcurl that is not on most images, a request cannot be
ended from outside without such a callback, and how much has arrived is seen only at its end.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.work import BUCKET, Item, Piece, Work, check

_WRITEDATA, _URL, _RANGE, _CAINFO, _FAILONERROR, _NOSIGNAL = 10001, 10002, 10007, 10065, 45, 99
_BUFFERSIZE = 98
_BUFFER_BYTES = 512 * 1024


class CurlClient:
    """One easy handle, stream and buffer a thread."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._curl = ctypes.CDLL(ctypes.util.find_library("curl") or "libcurl.so.4")
        self._curl.curl_easy_init.restype = ctypes.c_void_p
        self._curl.curl_easy_perform.argtypes = [ctypes.c_void_p]
        self._libc = ctypes.CDLL(None)
        self._libc.fmemopen.restype = ctypes.c_void_p
        self._libc.fmemopen.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
        self._curl.curl_global_init(3)
        self._pool = ThreadPoolExecutor(work.connections)
        self._local = threading.local()

    def receive(self, items: tuple[Item, ...]) -> int:
        return sum(self._pool.map(self._get, self._work.pieces(items)))

    def close(self) -> None:
        self._pool.shutdown()

    def _get(self, piece: Piece) -> int:
        handle, buffer = self._handle()
        # One byte more, because the stream ends what it holds with a zero.
        stream = self._libc.fmemopen(ctypes.addressof(buffer), len(buffer), b"w")
        self._libc.setvbuf(ctypes.c_void_p(stream), None, 2, 0)
        last = piece.start + piece.size_bytes - 1
        url = f"{os.environ['AWS_ENDPOINT_URL']}/{BUCKET}/{piece.name}"
        self._set(handle, _URL, url.encode())
        self._set(handle, _RANGE, f"{piece.start}-{last}".encode())
        self._set(handle, _WRITEDATA, ctypes.c_void_p(stream))
        status = self._curl.curl_easy_perform(handle)
        self._libc.fclose(ctypes.c_void_p(stream))
        assert status == 0, f"libcurl error {status}"
        check(memoryview(buffer).cast("B")[: piece.size_bytes], piece.start)
        return piece.size_bytes

    def _handle(self) -> tuple[int, Any]:
        if not hasattr(self._local, "handle"):
            handle = self._local.handle = self._curl.curl_easy_init()
            self._local.buffer = (ctypes.c_char * (self._work.chunk_bytes + 1))()
            ctypes.memset(self._local.buffer, 1, len(self._local.buffer))
            self._set(handle, _FAILONERROR, ctypes.c_long(1))
            self._set(handle, _NOSIGNAL, ctypes.c_long(1))
            self._set(handle, _BUFFERSIZE, ctypes.c_long(_BUFFER_BYTES))
            bundle = os.environ.get("AWS_CA_BUNDLE")
            if bundle:
                self._set(handle, _CAINFO, bundle.encode())
        return self._local.handle, self._local.buffer

    def _set(self, handle: int, option: int, value: Any) -> None:
        self._curl.curl_easy_setopt(ctypes.c_void_p(handle), ctypes.c_int(option), value)


def open_client(work: Work) -> CurlClient:
    return CurlClient(work)
