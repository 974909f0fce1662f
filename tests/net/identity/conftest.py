"""Fixtures for the tests of certificates."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def fed(tmp_path: Path) -> Path:
    folder = tmp_path / "fed"
    folder.mkdir()
    return folder
