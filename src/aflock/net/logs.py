"""The server's log, and what a line says to machines beside its sentence."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("aflock.server")


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """For `extra`: with `--log-json` these stand in the line."""
    return {"fields": values}
