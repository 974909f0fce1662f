"""The ways into the code are true: CONTRIBUTING.md's map is complete, and every file that the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src/aflock"

MOST_FILES_ON_A_WALK = 12


def mapped() -> set[Path]:
    """What the map in CONTRIBUTING.md names: two spaces deeper is one folder deeper, commas separate names."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Where things are")[1].split("\n## ")[0]
    folders: list[Path] = []
    found: set[Path] = set()
    for line in re.findall(r"^    (.+)$", section, re.M):
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.split(r" {2,}", line.strip())[0].split(", ")
        paths = [Path(*folders[:depth], name) for name in names]
        folders[depth:] = [Path(names[0])]
        found.update(paths)
    return found


def test_the_map_names_every_package_and_every_top_level_module() -> None:
    packages = {file.parent for file in SRC.rglob("__init__.py")}
    modules = set(SRC.glob("*.py"))
    assert len(packages) > 20
    assert {path.relative_to(ROOT) for path in packages | modules} <= mapped()


def test_nothing_in_the_map_is_missing() -> None:
    assert [str(path) for path in mapped() if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", ["docs/architecture.md", "docs/design.md", "docs/glossary.md", "CONTRIBUTING.md"])
def test_the_files_that_a_document_names_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    named = re.findall(r"`([\w/]+(?:/|\.py|\.toml))`", text)
    assert named
    assert [path for path in named if not any((base / path).exists() for base in (ROOT, SRC))] == []


@pytest.mark.parametrize("walk", ["An update in the simulator", "An update over a network"])
def test_a_walk_opens_at_most_twelve_files(walk: str) -> None:
    section = (ROOT / "docs/architecture.md").read_text().split(f"## {walk}")[1].split("\n## ")[0]
    steps = re.findall(r"^\d+\. \*\*`([^`]+)`\*\*", section, re.M)
    assert 5 < len(steps) <= MOST_FILES_ON_A_WALK
    assert [path for path in steps if not (SRC / path).is_file()] == []
