"""Fixtures for all tests of the client."""

from __future__ import annotations

import pytest

from aflock.net.client import run as running
from aflock.net.client import session as transport


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's pauses are short in tests."""
    monkeypatch.setattr(transport, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(transport, "LONGEST_WAIT", 0.05)
    monkeypatch.setattr(running, "PULL_SECONDS", 1.0)
