"""Sizes and counts as text for people."""

from __future__ import annotations


def human(size: float) -> str:
    """A number of bytes with a unit a person reads."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def counted(number: int, noun: str) -> str:
    """A number of things: 1 job, 2 jobs."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
