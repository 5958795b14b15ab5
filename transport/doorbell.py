"""A wake-up that any thread may give and any poller may see: an eventfd with a name.

Owns one file descriptor. Knows nothing about messages: it says "look", never what there is to see.
"""

from __future__ import annotations

import math
import os
import select
from collections.abc import Iterable
from typing import Protocol


class Pollable(Protocol):
    def fileno(self) -> int: ...


class Doorbell:
    """ring() is safe from any thread, before silence() returns or after; close() is the owner's."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        os.eventfd_write(self._fd, 1)

    def silence(self) -> bool:
        """Take the rings so far back; whether there were any. Call it before looking, never after."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def wait_readable(sources: Iterable[Pollable], timeout_s: float) -> bool:
    """Block the calling thread until one of `sources` is readable or the time is over; whether one was.

    A ZeroMQ descriptor rings on change only: drain each receiver until it returns [] before waiting here.
    """
    poller = select.poll()
    for source in sources:
        poller.register(source.fileno(), select.POLLIN)
    return bool(poller.poll(math.ceil(max(0.0, timeout_s) * 1000)))
