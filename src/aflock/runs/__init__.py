"""Running experiments: in memory, into a folder, several rules side by side."""

from __future__ import annotations

from .running import Interrupted, changes_of, compare, describe, resume, run, simulate

__all__ = ["Interrupted", "changes_of", "compare", "describe", "resume", "run", "simulate"]
