"""Logging for every process: structlog, one line per state change, to stderr.

Lines carry `actor`, `epoch` and an event name; JSON for machines, a console layout for people. The stdlib's loggers
(aiohttp, asyncio) end up in the same place.
"""

from __future__ import annotations

import logging
import sys

import structlog

from epicycle.transport.config import LogConfig


def configure(log: LogConfig) -> None:
    """Set up structlog and the root logger of this process; called once, at start."""
    is_console = log.format == "console" or (log.format == "auto" and sys.stderr.isatty())
    level = logging.getLevelNamesMapping()[log.level.upper()]
    shared: list[structlog.types.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, _renderer(is_console)],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[_foreign, _renderer(is_console)])
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))


def _renderer(is_console: bool) -> structlog.types.Processor:
    if is_console:
        return structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=24)
    return structlog.processors.JSONRenderer()


def _foreign(
    _logger: structlog.types.WrappedLogger, _method: str, event: structlog.types.EventDict
) -> structlog.types.EventDict:
    """Drop what ProcessorFormatter adds for its own use, and flatten the traceback."""
    record: logging.LogRecord = event.pop("_record")
    event.pop("_from_structlog")
    event["logger"] = record.name
    if record.exc_info:
        event["exception"] = logging.Formatter().formatException(record.exc_info)
    event.pop("exc_info", None)
    return event
