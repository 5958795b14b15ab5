"""The thread that turns ended requests into rows and rows into the file, so that neither hashing nor a slow disk ever
holds up the gateway's loop.

Owns the queue, the thread, the file and the counts of what was written and what was not. A full queue or a full disk
costs rows, which are counted and logged; nothing else.
"""

from __future__ import annotations

import threading
from collections import Counter, deque

import structlog

from epicycle.actors.gateway.record_file import LineFile
from epicycle.actors.gateway.record_rows import Ended, RowStyle, rows_of
from epicycle.transport.trace_rows import encode_row

QUEUE_TOKENS = 8 << 20  # prompt tokens that wait to be written: about 64 MiB
BATCH_REQUESTS = 64

_log = structlog.get_logger()


class RecordWriter:
    """`put` and `flush` from any thread."""

    def __init__(self, file: LineFile, style: RowStyle) -> None:
        self.rows = 0
        self.dropped: Counter[str] = Counter()  # rows by cause: queue, disk, error
        self._file = file
        self._style = style
        self._waiting: deque[Ended] = deque()
        self._waiting_tokens = 0
        self._is_writing = False
        self._is_closed = False
        self._disk_error = ""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def put(self, ended: Ended) -> None:
        """Never waits for the disk."""
        tokens = _tokens(ended)
        with self._changed:
            if self._is_closed or (self._waiting and self._waiting_tokens + tokens > QUEUE_TOKENS):
                self._drop("queue", sum(map(bool, ended.depths)))
                return
            self._waiting.append(ended)
            self._waiting_tokens += tokens
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was put is written or dropped; False when the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_writing, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write what waits, as far as `timeout_s` goes. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while batch := self._next_batch():
            lines = [line for ended in batch for line in self._lines(ended)]
            self._write(b"".join(lines), len(lines))
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
        self._file.close()

    def _lines(self, ended: Ended) -> list[bytes]:
        """A request that can't be written is our fault, and costs its own rows only."""
        try:
            return [encode_row(row) for row in rows_of(ended, self._style)]
        except Exception as error:
            _log.error("record_unwritable", exc_info=error)
            with self._changed:
                self._drop("error", sum(map(bool, ended.depths)))
            return []

    def _next_batch(self) -> list[Ended]:
        """Wait for requests; none once closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._is_closed)
            batch = [self._waiting.popleft() for _ in range(min(BATCH_REQUESTS, len(self._waiting)))]
            self._waiting_tokens -= sum(map(_tokens, batch))
            self._is_writing = bool(batch)
            return batch

    def _write(self, lines: bytes, count: int) -> None:
        try:
            self._file.write(lines)
        except OSError as error:
            if str(error) != self._disk_error:  # once per fault, not once per row
                self._disk_error = str(error)
                _log.error("record_failed", file=str(self._file.path), error=str(error), rows=count)
            with self._changed:
                self._drop("disk", count)
            return
        if self._disk_error:
            self._disk_error = ""
            _log.info("record_recovered", file=str(self._file.path), dropped=self.dropped["disk"])
        self.rows += count

    def _drop(self, cause: str, rows: int) -> None:
        if cause == "queue" and not self.dropped[cause]:
            _log.error("record_too_slow", file=str(self._file.path), waiting_tokens=self._waiting_tokens)
        self.dropped[cause] += rows


def _tokens(ended: Ended) -> int:
    """What a waiting request weighs: its prompts' ids and its depths."""
    return sum(len(prompt.ids) for prompt in ended.spec.prompts) + sum(map(len, ended.depths))
