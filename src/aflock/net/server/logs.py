"""The server's log: lines of text for people, or JSON objects for programs (`--log-json`)."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger("aflock.server")


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """The argument `extra` of a log call: these values become keys of the line with `--log-json`."""
    return {"fields": values}


class PlainLines(logging.Formatter):
    """Time, level and message as text; the time is in UTC."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """The time as ISO 8601 writes it: 2026-01-31T12:00:00.123Z."""
        return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level and message, and the values given by `fields`: client, method, status and so on."""
        line = {"time": round(record.created, 3), "level": record.levelname.lower(), "message": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(level: str, *, as_json: bool) -> None:
    """Sets up the log of a server, and sends the errors of asyncio to it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else PlainLines())
    logger = logging.getLogger("aflock")
    logger.handlers, logger.propagate = [handler], False  # else a handler of the root logger would repeat every line
    logger.setLevel(level.upper())
    loop = logging.getLogger("asyncio")
    loop.handlers, loop.propagate = [handler], False
    loop.setLevel(logging.ERROR)
