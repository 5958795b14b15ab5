"""A second stream for launches that don't wait for one another, forked from the current one and joined to it again.

Owns the stream. In a CUDA graph the two become branches. Without a GPU everything runs in turn. It must not know what
is launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    def __init__(self, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Launches inside come behind what the current stream holds, and beside what it is given until `join`.

        Tensors made inside are the side stream's own: nobody else may use them before `join` but as an argument.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What the current stream is given from now on comes behind everything."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
