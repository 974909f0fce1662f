"""What `aflock data list|get|info` prints, and gives to programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aflock.data import commands, registry
from aflock.data.datasets import mnist
from aflock.data.fetching.fetch import Supply
from aflock.errors import InputError, UnknownName
from tests.data.test_formats import IDX


@pytest.fixture(autouse=True)
def kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFLOCK_DATA", str(tmp_path / "cache"))
    monkeypatch.delenv("AFLOCK_FILES", raising=False)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny MNIST, which is as good as any for the length of a test."""
    small: Supply = replace(mnist.MNIST, sources=(), digest=None)
    monkeypatch.setattr(mnist, "MNIST", small)
    known = registry._ENTRIES._items
    monkeypatch.setitem(known, "mnist", replace(known["mnist"], supplies=(small,)))
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, body in IDX.items():
        (folder / name).write_bytes(body)
    return folder


def test_the_list_says_what_is_here(mine: Path) -> None:
    before = {one["name"]: one["status"] for one in commands.listing()}
    assert (before["mnist"], before["digits"], before["cifar100"]) == ("not here", "built in", "not here")
    commands.fetch("mnist", mine=str(mine), quiet=True)
    assert {one["name"]: one["status"] for one in commands.listing()}["mnist"] == "0.0 MB"
    lines = commands.listing_text().splitlines()
    assert lines[-1] == f"kept in {mine.parent / 'cache'} (AFLOCK_DATA)"
    assert any(line.startswith("digits         built in  1,797 handwritten digits") for line in lines)
    assert json.loads(json.dumps(commands.listing())) == commands.listing()


def test_get_says_where_it_is_and_from_where(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = commands.fetch("mnist", mine=str(mine), quiet=True)
    assert json.loads(json.dumps(found)) == found
    (file,) = found["files"]
    assert file["path"] == str(mine.parent / "cache" / "mnist.safetensors")
    assert file["source"] == str(mine)
    assert commands.fetch_text(found) == f"{file['path']}  0.0 MB  from {mine}"
    assert capsys.readouterr().err == ""
    commands.fetch("mnist", mine=str(mine))
    assert capsys.readouterr().err == f"mnist is here already; delete {file['path']} to get it anew\n"


def test_nothing_to_get() -> None:
    found = commands.fetch("digits")
    assert found == {"name": "digits", "files": []}
    assert commands.fetch_text(found) == "digits is made here; there is nothing to get"


def test_get_refuses_what_it_does_not_know(mine: Path) -> None:
    with pytest.raises(UnknownName, match="there is no dataset called 'minst'; did you mean 'mnist'"):
        commands.fetch("minst")
    with pytest.raises(InputError, match="nowhere: there is no such file or folder"):
        commands.fetch("mnist", mine="nowhere", quiet=True)
    (mine / mnist.FILES[0]).unlink()
    with pytest.raises(InputError, match=rf"mine: there is no file {mnist.FILES[0]}; expected"):
        commands.fetch("mnist", mine=str(mine), quiet=True)


def test_info_of_what_is_not_here() -> None:
    described = commands.info("cifar100")
    assert json.loads(json.dumps(described)) == described
    assert "examples" not in described
    text = commands.info_text(described)
    assert "    get it        aflock data get cifar100" in text
    assert "      https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz" in text
    assert "    not here yet" in text


def test_info_of_what_is_here(mine: Path) -> None:
    commands.fetch("mnist", mine=str(mine), quiet=True)
    described = commands.info("mnist")
    assert json.loads(json.dumps(described)) == described
    assert described["examples"] == {
        "training": 4, "test": 2, "shape": [28, 28], "kept_as": "uint8", "classes": 10, "regression": False,
        "vocabulary": None, "keys": None,
    }  # fmt: skip
    text = commands.info_text(described)
    assert "    examples      4 for training, 2 for testing, 28x28, uint8" in text
    assert "    labels        10 classes" in text
    assert f"from {mine}, sha256 {described['supplies'][0]['sha256']}, not checked" in text


def test_info_of_what_is_built_in() -> None:
    text = commands.info_text(commands.info("digits"))
    assert "    status        built in" in text
    assert "    examples      1438 for training, 359 for testing, 64, float32" in text


def test_info_of_keys_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    described = commands.info("digits")
    described["examples"] |= {"keys": 4, "regression": True}
    text = commands.info_text(described)
    assert "    labels        numbers" in text
    assert "    keys          4, one client each with partition 'key'" in text
    assert np.shape(described["examples"]["shape"]) == (1,)
