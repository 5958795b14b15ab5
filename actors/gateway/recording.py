"""Capture: what a gateway serves, as a native trace that `epicycle replay` can send again with the same exit depths.

Owns what is known of requests under way and the end of each session's last one. A request costs the loop a list append
a token; rows are made by the writer's thread. Must not know files.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

from epicycle.actors.gateway.errors import ApiError
from epicycle.actors.gateway.pieces import NO_TOKEN, Piece
from epicycle.actors.gateway.record_file import LineFile
from epicycle.actors.gateway.record_order import ArrivalOrder
from epicycle.actors.gateway.record_rows import Ended, RowStyle
from epicycle.actors.gateway.record_writer import RecordWriter
from epicycle.actors.gateway.sequence import Sequence
from epicycle.actors.gateway.spec import Spec
from epicycle.actors.gateway.watching import Watcher
from epicycle.transport.config import Config, ConfigError

SESSIONS_LIMIT = 1 << 16  # remembered ends; beyond it the session that has rested longest is forgotten


class Recording(Watcher):
    """One request under way."""

    def __init__(self, recorder: Recorder, spec: Spec) -> None:
        self._recorder = recorder
        self._spec = spec

    def on_start(self, sequences: Seq[Sequence]) -> None:
        self._sequences = sequences
        self._ended = self._recorder.begin(self._spec, [sequence.rid for sequence in sequences])

    def on_piece(self, piece: Piece) -> None:
        ended = self._ended
        if piece.token != NO_TOKEN:
            ended.first_ms = ended.first_ms or self._recorder.now_ms()
            ended.depths[piece.index].append(piece.depth)
        if piece.finish_reason is not None:
            ended.reasons[piece.index] = piece.finish_reason

    def on_end(self, cut: str, error: ApiError | None) -> None:
        self._ended.cut = cut
        self._ended.cached_tokens = [sequence.cached_tokens for sequence in self._sequences]
        self._ended.ended_ms = self._recorder.now_ms()
        self._recorder.take(self._ended)


class Recorder:
    """All methods on the gateway's loop; `flush` and `close` on a thread, since they wait for the disk."""

    def __init__(self, writer: RecordWriter, now_ms: Callable[[], float]) -> None:
        self.writer = writer
        self.now_ms = now_ms
        self.tokenless = 0  # choices that ended before their first token: there is nothing to replay
        self._order = ArrivalOrder()
        self._ends: OrderedDict[str, tuple[int, float]] = OrderedDict()  # session -> its last request, when it ended

    def begin(self, spec: Spec, rids: list[int]) -> Ended:
        """A request comes in; `take` it when it has ended."""
        now_ms = self.now_ms()
        self._order.enter(rids[0])
        ended = Ended(spec, rids, now_ms, [[] for _ in rids], [""] * len(rids))
        if spec.conversation in self._ends:
            ended.waited_for, before_ms = self._ends[spec.conversation]
            ended.idle_ms = max(0.0, now_ms - before_ms)
        return ended

    def take(self, ended: Ended) -> None:
        made = [rid for rid, depths in zip(ended.rids, ended.depths, strict=True) if depths]
        self.tokenless += len(ended.rids) - len(made)
        session = ended.spec.conversation
        if made and session:
            self._ends[session] = (made[0], ended.ended_ms)
            self._ends.move_to_end(session)
            if len(self._ends) > SESSIONS_LIMIT:
                self._ends.popitem(last=False)
        for ready in self._order.leave(ended):
            self.writer.put(ready)

    def counters(self) -> dict[str, float]:
        """What a heartbeat carries."""
        dropped = {cause: self.writer.dropped[cause] for cause in ("queue", "disk", "error")}
        dropped["tokenless"] = self.tokenless
        counters = {f'record_dropped_total{{cause="{cause}"}}': float(rows) for cause, rows in dropped.items()}
        return counters | {"record_rows_total": float(self.writer.rows)}


def make_recorder(config: Config, gateway: str) -> Recorder | None:
    """None unless the server records. Raises ConfigError when the file can't be written."""
    record = config.record
    if not record.file:
        return None
    path = record_path(Path(record.file), gateway if config.server.gateways > 1 else "")
    try:
        file = LineFile(path, record.part_bytes, record.keep_parts)
    except OSError as error:
        raise ConfigError(f"record.file {path}: {error.strerror}") from error
    style = RowStyle(record.salt.encode(), record.block_tokens or config.engine.page_tokens, record.text)
    return Recorder(RecordWriter(file, style), _epoch_clock())


def record_path(path: Path, gateway: str) -> Path:
    """Each of several gateways writes a file of its own: run.gw0.jsonl, run.gw1.jsonl, ..."""
    return path.with_name(f"{path.stem}.{gateway}{path.suffix}") if gateway else path


def _epoch_clock() -> Callable[[], float]:
    """Epoch milliseconds, so that several gateways agree, from a clock that never jumps."""
    zero_s = time.time() - time.monotonic()
    return lambda: (zero_s + time.monotonic()) * 1e3
