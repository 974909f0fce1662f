"""The state file: safetensors with a JSON document, written whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from aflock import state
from aflock.errors import StateError
from aflock.system import files, memory

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


def test_a_file_with_any_bit_flipped_is_refused(tmp_path: Path) -> None:
    """Also in the table of tensors and in the checksum itself: never is another state loaded."""
    file = tmp_path / "s"
    state.save(file, SAMPLE)
    whole = file.read_bytes()
    for place in range(8 * len(whole)):
        raw = bytearray(whole)
        raw[place // 8] ^= 1 << place % 8
        file.write_bytes(raw)
        with pytest.raises(StateError):
            state.load(file)


def test_a_file_cut_off_anywhere_or_with_more_behind_it_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "s"
    state.save(file, SAMPLE)
    whole = file.read_bytes()
    for raw in (*(whole[:length] for length in range(len(whole))), whole + b"\0", whole + whole):
        file.write_bytes(raw)
        with pytest.raises(StateError):
            state.load(file)


def test_a_state_without_its_checksum_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "s"
    state.save(file, SAMPLE)
    raw = file.read_bytes()
    assert raw.count(b'"checksum"') == 1
    file.write_bytes(raw.replace(b'"checksum"', b'"checksun"'))
    with pytest.raises(StateError, match="it has no checksum"):
        state.load(file)


FORMAT_1 = bytes.fromhex(
    "a0000000000000007b225f5f6d657461646174615f5f223a7b2261666c6f636b223a227b5c22666f726d61745c223a20312c205c22737461"
    "74655c223a207b5c226b5c223a20372c205c22785c223a206e756c6c7d7d222c226372633332223a2234323639323839393438227d2c2278"
    "223a7b226474797065223a22463332222c227368617065223a5b325d2c22646174615f6f666673657473223a5b302c385d7d7d2020202020"
    "0000803f00000040"
)
"""{"k": 7, "x": [1, 2]} as versions up to 0.3 wrote it, with a checksum over the document and the arrays alone."""


def test_a_state_of_format_1_is_still_read_and_its_damage_noticed(tmp_path: Path) -> None:
    file = tmp_path / "s"
    file.write_bytes(FORMAT_1)
    loaded = state.load(file)
    assert loaded["k"] == 7
    assert loaded["x"].tolist() == [1.0, 2.0]
    harmless = 0
    for place in range(8 * len(FORMAT_1)):
        raw = bytearray(FORMAT_1)
        raw[place // 8] ^= 1 << place % 8
        file.write_bytes(raw)
        try:
            other = state.load(file)
        except StateError:
            continue
        harmless += 1  # in the white space behind the header
        assert other["k"] == 7
        assert other["x"].tobytes() == loaded["x"].tobytes()
    assert harmless < 50
    file.write_bytes(FORMAT_1.replace(b'"crc32"', b'"crc31"'))
    with pytest.raises(StateError, match="its checksum does not match its contents"):
        state.load(file)


def test_a_file_is_read_and_not_mapped_unless_it_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens to the file afterwards, a bad sector say, is nothing to whoever has loaded it."""
    file = tmp_path / "s"
    state.save(file, {"x": np.ones(5000)})
    loaded = state.load(file)
    assert not loaded["x"].flags.writeable
    os.truncate(file, 0)
    assert loaded["x"].sum() == 5000  # a map would end the process here
    state.save(file, {"x": np.ones(2 << 20)})
    monkeypatch.setattr(memory, "available", lambda: 20 << 20)
    base = state.load(file)["x"]
    while type(base) is np.ndarray:
        base = base.base
    assert isinstance(base, np.memmap)


def test_a_bad_sector_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    state.save(tmp_path / "s", SAMPLE)
    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(StateError, match="Input/output error"):
        state.load(tmp_path / "s", mapped=True)


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


@pytest.mark.parametrize("mapped", [False, True])
def test_every_array_is_aligned(tmp_path: Path, mapped: bool) -> None:
    """Compiled loops are compiled anew for arrays that are not."""
    state.save(tmp_path / "s", {"a": np.arange(3, dtype=np.int8), "b": np.ones(5, np.float32), "c": np.ones(2)})
    loaded = state.load(tmp_path / "s", mapped=mapped)
    assert [loaded[name].dtype.itemsize for name in "abc"] == [1, 4, 8]
    assert all(loaded[name].flags.aligned for name in "abc")
