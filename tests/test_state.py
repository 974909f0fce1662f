"""The state file: safetensors with a JSON document, written whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from aflock import files, state
from aflock.errors import StateError

SAMPLE = {
    "version": 3,
    "note": "text",
    "none": None,
    "list": [1, 2.5, "x"],
    "rng": {"state": 2**127 + 1},
    "a": {"b": np.arange(5, dtype=np.float32), "c": np.arange(6, dtype=np.int8).reshape(2, 3)},
    "empty": np.zeros(0, np.int64),
    "wide": np.array([1e-300, np.pi]),
}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    state.save(tmp_path / "s", SAMPLE)
    loaded = state.load(tmp_path / "s")
    for key in ("version", "note", "none", "list", "rng"):
        assert loaded[key] == SAMPLE[key]
    assert np.array_equal(loaded["a"]["b"], np.arange(5, dtype=np.float32))
    assert np.array_equal(loaded["a"]["c"], np.arange(6).reshape(2, 3))
    assert loaded["a"]["c"].dtype == np.int8
    assert loaded["empty"].size == 0
    assert np.array_equal(loaded["wide"], np.array([1e-300, np.pi]))
    assert list(loaded) == list(SAMPLE)


def test_large_arrays_go_to_the_disk_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PIECE", 1000)
    monkeypatch.setattr(files, "_LARGE", 1000)
    large = np.arange(12_345, dtype=np.float32)
    state.save(tmp_path / "s", {"large": large, "small": np.ones(3)})
    loaded = state.load(tmp_path / "s")
    assert np.array_equal(loaded["large"], large)
    assert np.array_equal(loaded["small"], np.ones(3))
    files.write_whole(tmp_path / "t", "text ", b"", b"x" * 2500, large.view(np.uint8).data)
    assert (tmp_path / "t").read_bytes() == b"text " + b"x" * 2500 + large.tobytes()


def test_a_bit_that_has_changed_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "s"
    state.save(file, SAMPLE)
    raw = file.read_bytes()
    begin = raw.index(b'"aflock"')
    data = 8 + int.from_bytes(raw[:8], "little")
    for place in (*range(begin + 10, begin + 100, 7), *range(data, len(raw))):
        file.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        with pytest.raises(StateError):
            state.load(file)


def test_the_library_reads_it(tmp_path: Path) -> None:
    state.save(tmp_path / "s.safetensors", SAMPLE)
    tensors = load_file(tmp_path / "s.safetensors")
    assert set(tensors) == {"a/b", "a/c", "empty", "wide"}
    assert np.array_equal(tensors["a/b"], np.arange(5, dtype=np.float32))
    assert np.array_equal(tensors["a/c"], np.arange(6).reshape(2, 3))


def test_bad_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="does not exist"):
        state.load(tmp_path / "nothing")
    (tmp_path / "text").write_text("not a state at all")
    with pytest.raises(StateError, match="is not a state saved by aflock"):
        state.load(tmp_path / "text")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(StateError, match="is not a state saved by aflock"):
        state.load(tmp_path / "empty")
    with pytest.raises(StateError, match="is not a state saved by aflock"):
        state.load(tmp_path)
    state.save(tmp_path / "s", SAMPLE)
    whole = (tmp_path / "s").read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(StateError):
            state.load(tmp_path / "cut")


def test_what_is_no_state_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="complex128"):
        state.save(tmp_path / "s", {"x": np.zeros(2, np.complex128)})
    with pytest.raises(StateError, match="'a/b' is not a string without a slash"):
        state.save(tmp_path / "s", {"a/b": 1})
    with pytest.raises(TypeError):
        state.save(tmp_path / "s", {"x": object()})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    state.save(tmp_path / "s", {"x": 1})
    with pytest.raises(StateError):
        state.save(tmp_path / "s", {"x": np.zeros(2, np.complex128)})
    assert state.load(tmp_path / "s") == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_kill_in_the_middle_of_saving(tmp_path: Path) -> None:
    """SIGKILL while a process saves over and over: what is under the name is always one whole state."""
    script = (
        "import sys, numpy as np; from aflock import state; k = 0\n"
        "while True:\n"
        "    state.save(sys.argv[1], {'k': k, 'x': np.full(300_000, k, np.float64)}); k += 1\n"
    )
    file = tmp_path / "s"
    for attempt in range(5):
        child = subprocess.Popen([sys.executable, "-c", script, str(file)])
        deadline = time.monotonic() + 30
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.03 * attempt)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        loaded = state.load(file)
        assert np.all(loaded["x"] == loaded["k"])
        file.unlink()
