"""`aflock replay` of a federation's trace: applies the journal in the same data folder again, and compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..server.settings import Settings
from ..storage.data_folder import kept_settings
from ..storage.replay import replay as replay_journal


def replay(trace: Path) -> dict[str, Any]:
    """Replays the journal beside a trace, with the settings that the federation began with."""
    settings = Settings.build(kept_settings(trace.parent / "federation.toml"))
    return replay_journal(trace, settings)
