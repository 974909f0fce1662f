"""How the tests are shared out over processes: `make test` runs one per core."""

from __future__ import annotations

from pathlib import Path

import pytest

NET = Path(__file__).parent / "net"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start servers or clusters go to one process as a whole.

    Those that start servers go first: they take longest, and the rest fills the gaps. A Ray cluster uses all cores, so
    its file does not go with them: some of them need their share of the machine.
    """
    for item in items:
        if item.path.is_relative_to(NET) or item.path.name in ("test_wheel.py", "test_ray.py"):
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(NET.parent))))
    items.sort(key=lambda item: not item.path.is_relative_to(NET))
