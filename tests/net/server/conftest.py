"""Servers that the tests of several files use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.net.real_server import SMALL, Server, served
from tests.net.server.in_process import BIG, Inside, inside


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A federation for tests that bring their own clients and leave no harm."""
    folder = tmp_path_factory.mktemp("shared") / "fed"
    with served(folder, SMALL, level="debug", changes=["federation.max_norm=1000.0"]) as server:
        yield server
        assert "Traceback" not in server.errors


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with inside(tmp_path_factory.mktemp("small") / "fed") as server:
        yield server


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with inside(tmp_path_factory.mktemp("large") / "fed", BIG) as server:
        yield server


@pytest.fixture(scope="module", params=["http", "https"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    """A large one, with TLS and without."""
    with inside(tmp_path_factory.mktemp("either") / "fed", BIG, secure=request.param == "https") as server:
        yield server
