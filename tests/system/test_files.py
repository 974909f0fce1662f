"""Files are whole, synced and private from the first moment, or not there at all."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aflock
from aflock import state
from aflock.net.identity import members, tls
from aflock.net.storage import model_file as weights
from aflock.system import files


class Calls:
    """What the system is asked to do, in order, by name and by the file it is done to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, str]] = []
        real = {name: getattr(os, name) for name in ("fsync", "replace", "link")}

        def fsync(descriptor: int) -> None:
            self.made.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
            real["fsync"](descriptor)

        def replace(source: Any, target: Any) -> None:
            self.made.append(("name", str(target)))
            real["replace"](source, target)

        def link(source: Any, target: Any) -> None:
            self.made.append(("name", str(target)))
            real["link"](source, target)

        for name, stand_in in {"fsync": fsync, "replace": replace, "link": link}.items():
            monkeypatch.setattr(os, name, stand_in)

    def are_durable(self, file: Path) -> bool:
        """Whether the content was synced before the file got its name, and the folder afterwards."""
        named = self.made.index(("name", str(file)))
        before, after = self.made[:named], self.made[named + 1 :]
        beside = re.compile(re.escape(str(file.parent)) + rf"/\.{re.escape(file.name)}\..+")
        content = any(kind == "fsync" and beside.fullmatch(name) for kind, name in before)
        return content and ("fsync", str(file.parent)) in after


WRITERS: dict[str, Callable[[Path], object]] = {
    "write_whole": lambda file: files.write_whole(file, "a few bytes"),
    "write_new": lambda file: files.write_new(file, b"a few bytes"),
    "state": lambda file: state.save(file, {"x": np.ones(3)}),
    "weights": lambda file: weights.save(file, np.ones(3, np.float32), version=1),
    "token": lambda file: members.write_new(file, "text"),
    "members.json": lambda file: members.invite(file.parent, "alice"),
    "tls/ca.key": lambda file: tls.prepare(file.parent.parent, ["localhost"]),
    "tls/server.pem": lambda file: tls.prepare(file.parent.parent, ["localhost"]),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_small_file_and_its_folder_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calls = Calls(monkeypatch)
    WRITERS[name](tmp_path / name)
    assert calls.are_durable(tmp_path / name)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = tmp_path / "file"
    files.write_whole(file, "old")
    for call in ("fsync", "write", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fails)
            with pytest.raises(OSError, match="Input/output error"):
                files.write_whole(file, "new")
        assert [found.name for found in tmp_path.iterdir()] == ["file"]
        assert file.read_text() == "old"


def test_a_new_file_replaces_nothing(tmp_path: Path) -> None:
    files.write_new(tmp_path / "file", "mine")
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "file", "another's")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "dangling", "another's")
    assert (tmp_path / "file").read_text() == "mine"
    assert {found.name for found in tmp_path.iterdir()} == {"file", "dangling"}


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    files.write_new(tmp_path / "file", "mine")
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "file", "another's")
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("file", "mine")]


def test_a_private_file_is_private_from_the_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes, real = set[int](), os.open

    def seen(path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
        descriptor = real(path, flags, mode, **rest)
        if flags & os.O_CREAT:
            modes.add(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    before = os.umask(0)
    try:
        monkeypatch.setattr(os, "open", seen)
        files.write_whole(tmp_path / "secret", "x", mode=files.PRIVATE)
        assert modes == {0o600}
        files.write_whole(tmp_path / "public", "x")
        assert modes == {0o600, 0o666}
    finally:
        os.umask(before)


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    """Each writes a file of its own beside it; under the name is always all of one of them."""
    file, failures = tmp_path / "file", list[BaseException]()

    def write(letter: str) -> None:
        try:
            for _ in range(50):
                files.write_whole(file, letter * 10_000)
        except BaseException as error:
            failures.append(error)

    writers = [threading.Thread(target=write, args=(letter,)) for letter in "abc"]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if file.exists():
            text = file.read_text()
            assert text == text[0] * 10_000
    for writer in writers:
        writer.join()
    assert not failures
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_what_is_no_file_is_written_to_and_not_replaced() -> None:
    """As root, one could replace /dev/stdout."""
    script = (
        "from pathlib import Path; from aflock.system.files import write_whole\n"
        "write_whole(Path('/dev/fd/1'), 'a ', b'report')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "a report"


def test_nobody_else_writes_whole_files() -> None:
    """`files` is the only module that does; a probe of the disk is no file to keep."""
    found = set()
    pattern = re.compile(r"write_text\(|write_bytes\(|mkstemp\(|open\([^)\n]*[\"'][wx]b?\+?[\"']|os\.replace\(")
    source = Path(aflock.__file__).parent
    for file in source.rglob("*.py"):
        if pattern.search(file.read_text()):
            found.add(str(file.relative_to(source)))
    assert found == {
        "system/files.py",
        "system/disk_rows.py",  # a nameless file of rows
        "data/fetching/cache.py",  # a file to lock
        "data/fetching/download.py",  # a file that grows, and gets its name when it is whole
        "net/client/state.py",  # gives a whole file another name
        "net/server/app.py",  # the probe
    }


def test_one_lock(tmp_path: Path) -> None:
    descriptors = [os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2)]
    assert files.locked(descriptors[0])
    assert not files.locked(descriptors[1])
    taken = threading.Event()

    def wait() -> None:
        assert files.locked(descriptors[1], wait=True)
        taken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not taken.wait(0.1)
    os.close(descriptors[0])
    assert taken.wait(10)
    thread.join()
    os.close(descriptors[1])
