"""The wheel, as a user gets it: built, installed into an empty environment, and run far from the source tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("src", "pyproject.toml", "README.md", "LICENSE")


def said(*command: object, cwd: Path) -> str:
    """What a command prints; it must succeed, and must not see this test's own packages."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:  # setuptools writes beside what it builds: not into this checkout
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    said(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", ".", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.mark.timeout(900)  # the environment is filled from the package index
def test_the_demo_runs_from_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    said(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python, aflock = tmp_path / "venv/bin/python", tmp_path / "venv/bin/aflock"
    said(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    where = said(python, "-c", "import aflock; print(aflock.__file__)", cwd=empty).strip()
    assert Path(where).is_relative_to(tmp_path / "venv")
    found = json.loads(said(aflock, "demo", "--uploads", 40, "--json", cwd=empty))
    assert found
    assert (empty / "runs/demo/demo.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(said(aflock, "recipes", "--json", cwd=empty))) >= 20  # data files are in the wheel, too
    assert "port" in said(aflock, "serve", "--example", cwd=empty)
