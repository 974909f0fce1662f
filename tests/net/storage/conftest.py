"""A federation's folder for the tests of several files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from aflock.net.storage.data_folder import DataFolder
from tests.net.storage.folders import begun


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DataFolder]:
    with closing(begun(tmp_path / "fed")) as made:
        yield made
