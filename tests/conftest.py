"""How the tests are shared out over processes: `make test` runs one per core."""

from __future__ import annotations

from pathlib import Path

import pytest

NET = Path(__file__).parent / "net"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start servers or clusters go to one process as a whole, and first: they take longest."""
    for item in filter(_is_whole, items):
        item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(NET.parent))))
    items.sort(key=lambda item: not _is_whole(item))  # the rest fills the gaps


def _is_whole(item: pytest.Item) -> bool:
    return item.path.is_relative_to(NET) or item.path.name in ("test_wheel.py", "test_ray.py")
