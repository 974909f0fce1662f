"""A journal on a disk that is full, fails, or is another server's."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from aflock.net.storage import segment as module
from aflock.net.storage.journal import Journal, JournalFailed, JournalInUse
from tests.net.storage.journals import THREE, THREE_RECORDS, contents, filled, goes_on, opened, recovered, segments


def run(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LIMITED = """
import resource, signal, sys
from pathlib import Path
from aflock.net.storage.journal import Journal, JournalFull

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])

def limit(kind, value):
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))

def refused(call):
    size, following = journal.size, journal.next
    on_disk = {path: path.read_bytes() for path in folder.glob("journal-*")}
    try:
        call()
    except JournalFull as error:
        print(error)
    else:
        raise SystemExit("this should not have been possible")
    assert (journal.size, journal.next) == (size, following)
    assert {path: path.read_bytes() for path in folder.glob("journal-*")} == on_disk

journal = Journal(folder)
assert not list(journal.read())
journal.make_writable()
journal.write([(b"1", b"a" * 1000)])
"""


def test_a_full_disk_keeps_nothing_of_the_batch_and_stops_nobody(tmp_path: Path) -> None:
    script = """
limit(resource.RLIMIT_FSIZE, 5000)
refused(lambda: journal.write([(b"2", b"b" * 2000), (b"3", b"c" * 2000)]))
refused(lambda: journal.write([(b"2", b"d" * 2_000_000)]))
journal.write([(b"2", b"e" * 1000)])
limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
journal.write([(b"3", b"f" * 10_000)])
"""
    message = run(LIMITED + script, tmp_path).splitlines()[0]
    assert message == (
        f"the disk is full, so the journal in {tmp_path} cannot grow (File too large); "
        "free disk space or raise the limit; clients send the updates again"
    )
    assert contents(tmp_path) == [(1, b"1", b"a" * 1000), (2, b"2", b"e" * 1000), (3, b"3", b"f" * 10_000)]


@pytest.mark.parametrize("kind", ["FSIZE", "NOFILE"])
def test_a_disk_without_space_for_a_new_segment(tmp_path: Path, kind: str) -> None:
    script = f"""
limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
kind = resource.RLIMIT_{kind}
import os
before = resource.getrlimit(kind)[0]
taken = []
def tight():
    if kind == resource.RLIMIT_FSIZE:
        limit(kind, 10)
    else:
        limit(kind, 40)
        try:
            while True:
                taken.append(os.open(folder, os.O_RDONLY))
        except OSError:
            pass
def narrow():
    tight()
    try:
        journal.rotate()
    finally:
        limit(kind, before)
        for descriptor in taken:
            os.close(descriptor)
        taken.clear()
refused(narrow)
journal.write([(b"2", b"")])
refused(narrow)
journal.rotate()
journal.write([(b"3", b"")])
"""
    assert "cannot grow" in run(LIMITED + script, tmp_path)
    assert [head for _, head, _ in contents(tmp_path)] == [b"1", b"2", b"3"]
    assert len(segments(tmp_path)) == 2


def fails(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_after_a_failed_sync_nothing_is_taken_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, *THREE)
    journal, _ = opened(tmp_path)
    with journal:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fails)
            with pytest.raises(JournalFailed, match="restart the server, which recovers what is there"):
                journal.write([(b"lost", b"")])
        for call in (
            lambda: journal.write([(b"", b"")]),
            lambda: journal.delete_upto(1),
            journal.rotate,
            lambda: list(recovered(journal)),
        ):
            with pytest.raises(JournalFailed, match="Input/output error"):
                call()
        assert journal.next == 4
    goes_on(tmp_path, THREE_RECORDS)


def test_a_batch_that_cannot_be_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, *THREE)
    journal, _ = opened(tmp_path)
    with journal:
        monkeypatch.setattr(os, "ftruncate", fails)
        monkeypatch.setattr(module, "IOV_MAX", 1)
        real, calls = os.pwritev, iter(range(99))

        def full(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
            if next(calls) == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, buffers, offset)

        monkeypatch.setattr(os, "pwritev", full)
        with pytest.raises(JournalFailed):
            journal.write([(b"half", b"of a record")])
        monkeypatch.undo()
        with pytest.raises(JournalFailed):
            journal.write([(b"", b"")])
    goes_on(tmp_path, THREE_RECORDS)


def test_a_write_that_is_interrupted_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    filled(tmp_path, *THREE)
    journal, _ = opened(tmp_path)
    with journal:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", interrupted)
            with pytest.raises(KeyboardInterrupt):
                journal.write([(b"a long head that would stand behind a short one", b"")] * 3)
        assert journal.write([(b"4", b"")]) == 4
    assert contents(tmp_path) == [*THREE_RECORDS, (4, b"4", b"")]


def test_one_folder_is_one_servers(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from aflock.net.storage.journal import Journal, JournalInUse
try:
    Journal(Path(sys.argv[1]))
except JournalInUse as error:
    print(error)
"""
    with Journal(tmp_path):
        message = run(script, tmp_path).strip()
        assert message == f"another server uses the journal in {tmp_path}; stop it, or give this one its own folder"
        with pytest.raises(JournalInUse):
            Journal(tmp_path)
    assert run(script, tmp_path) == ""
    filled(tmp_path, *THREE)
