"""Logging for every process: structlog, one line per state change, to stderr.

Lines carry `actor`, `epoch` and an event name; JSON for machines, a console layout for people. The stdlib's loggers
(aiohttp, asyncio) end up in the same place.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TextIO, cast

import structlog

from epicycle.transport.config import LogConfig


def configure(log: LogConfig) -> None:
    """Set up structlog and the root logger of this process; called once, at start."""
    is_console = log.format == "console" or (log.format == "auto" and sys.stderr.isatty())
    level = logging.getLevelNamesMapping()[log.level.upper()]
    shared: list[structlog.types.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, _renderer(is_console)],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _Unbreakable(sys.stderr))),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(_Unbreakable(sys.stderr))
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _renderer(is_console)],
    )
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))


class _Unbreakable:
    """A stream that forgets what it can't write: a log reader that went away must not take the server with it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def _renderer(is_console: bool) -> structlog.types.Processor:
    if is_console:
        return structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=24)
    return structlog.processors.JSONRenderer()
