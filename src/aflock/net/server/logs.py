"""The server's log: what a line says to people, and what it says to machines beside its sentence."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger("aflock.server")


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """For `extra`: with `--log-json` these stand in the line."""
    return {"fields": values}


class PlainLines(logging.Formatter):
    """Time, level and message; the time is UTC and says so."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """As ISO 8601: 2026-01-31T12:00:00.123Z."""
        return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, message, and what else is known: client, method, what, status."""
        line = {"time": round(record.created, 3), "level": record.levelname.lower(), "message": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(level: str, *, as_json: bool) -> None:
    """Sets up the log of a server."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else PlainLines())
    logger = logging.getLogger("aflock")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(level.upper())
    for noisy in ("uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy).handlers = [handler]
        logging.getLogger(noisy).setLevel(logging.ERROR)
        logging.getLogger(noisy).propagate = False
