"""Pauses, and frames of a stream within a time limit, for the blocking client; `waits_async` has the same
for the asynchronous one."""

import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from time import sleep

import httpx
import httpx_sse

from penstock.client.streams import Waiting

__all__ = ["frames", "sleep"]


def frames(
    source: httpx_sse.EventSource, waiting: Waiting
) -> Generator[httpx_sse.ServerSentEvent, None, None]:
    """The frames until the time limit, which ends a read that waits longer."""
    with _cut(source.response, waiting.left_s):
        yield from source.iter_sse()


@contextmanager
def _cut(response: httpx.Response, after_s: float | None) -> Iterator[None]:
    """Shuts the response's connection down after this time, which wakes a read that waits longer."""
    if after_s is None:
        yield
        return
    end = response.extensions["network_stream"].get_extra_info("socket")
    timer = threading.Timer(after_s, _shut_down, (end,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shut_down(end: socket.socket) -> None:
    with suppress(OSError):  # it is closed already
        end.shutdown(socket.SHUT_RDWR)
