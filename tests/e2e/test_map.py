"""The ways into the code are true: CONTRIBUTING.md's map is complete, and every file that a text names exists.

The texts are the documents, and the docstrings and comments of src.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src/aflock"

MOST_FILES_ON_A_WALK = 12
USERS_FILES = {"my_client.py"}
"""Examples of names that users give to files of their own."""


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


def prose(source: str) -> str:
    """The docstrings and comments of a Python file; strings that are values are not prose."""
    strings = [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    comments = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    return "\n".join([*strings, *comments])


def missing_modules(source: str, folder: Path) -> list[str]:
    """The Python files that the prose of a file in `folder` names, and that exist neither there nor further up."""
    bases = [folder, *folder.parents]
    bases = bases[: bases.index(ROOT) + 1]
    named = re.findall(r"[\w/.*-]*\w\.py\b", prose(source))
    return [name for name in named if name not in USERS_FILES and not any((base / name).exists() for base in bases)]


def test_the_files_that_docstrings_and_comments_name_exist() -> None:
    sources = sorted(SRC.rglob("*.py"))
    assert len(sources) > 200
    found = {str(file.relative_to(ROOT)): missing_modules(file.read_text(), file.parent) for file in sources}
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "text", ['"""See gone.py."""', "x = 1  # see net/gone.py", 'x = 1\n"""As in `storage/gone.py`."""']
)
def test_a_file_that_a_docstring_or_a_comment_names_wrongly_is_found(text: str) -> None:
    assert len(missing_modules(text, SRC / "net")) == 1
    assert missing_modules('x = "gone.py"  # types.py, server/app.py', SRC / "net") == []


@pytest.mark.parametrize("walk", ["An update in the simulator", "An update over a network"])
def test_a_walk_opens_at_most_twelve_files(walk: str) -> None:
    section = (ROOT / "docs/architecture.md").read_text().split(f"## {walk}")[1].split("\n## ")[0]
    steps = re.findall(r"^\d+\. \*\*`([^`]+)`\*\*", section, re.M)
    assert 5 < len(steps) <= MOST_FILES_ON_A_WALK
    assert [path for path in steps if not (SRC / path).is_file()] == []
