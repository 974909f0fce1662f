"""What the documents say is true: their code runs, their tables are complete, their links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from aflock import local, strategies
from aflock.net.server import settings

ROOT = Path(__file__).parents[2]
PAGES = ["algorithms", "architecture", "design", "glossary", "protocol", "server"]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{page}.md" for page in PAGES)]


@pytest.mark.parametrize("name", ["README.md", "docs/algorithms.md", "docs/server.md", "CONTRIBUTING.md"])
def test_python_blocks_run(name: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S)
    if name == "README.md":
        assert blocks
    for block in blocks:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", block], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        for line in re.findall(r"# -> (.*)", block):
            assert line in done.stdout


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    document = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


def test_the_table_of_algorithms_is_complete() -> None:
    text = (ROOT / "docs/algorithms.md").read_text()
    for name in [*strategies.names(), *local.names()]:
        assert re.search(rf"^\| `{re.escape(name)}` \|", text, re.M), name
    for file in re.findall(r"`((?:src|tests)/[^`*]+)`", text):
        assert (ROOT / file).exists(), file


def test_the_server_page_tells_which_sections_a_restart_may_change() -> None:
    told = (ROOT / "docs/server.md").read_text().split("**Restarts**")[1].split("**Disk.**")[0]
    may, may_not = (set(re.findall(r"\[(\w+)\]", part)) for part in told.split("but not"))
    assert may_not == set(settings.LASTING)
    assert may | may_not == {*settings.SCHEMA.named, *settings.SCHEMA.fixed}


def test_every_make_target_explains_itself() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    done = subprocess.run(["make", "help"], capture_output=True, text=True, cwd=ROOT, check=True)
    assert targets == set(re.findall(r"make ([a-z0-9-]+)", done.stdout))
