"""The fetcher against a real server that is slow, cut off, wrong or absent, and against SIGKILL."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aflock import state
from aflock.data.fetching import cache
from aflock.data.fetching.archives import all_of, by_name, contents
from aflock.data.fetching.download_progress import DownloadProgress
from aflock.data.fetching.fetch import Supply, digest_of
from aflock.data.fetching.sources import Debian, Mine, Npm, Pip, Source, Web
from aflock.errors import AflockError, InputError, StateError
from aflock.types import State
from tests.data.archives import tar, zipped
from tests.data.webserver import Site, serving

BODY = bytes(np.random.default_rng(1).integers(0, 256, 100_000, np.uint8))
QUIET = DownloadProgress(quiet=True)


def sha(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@pytest.fixture
def site() -> Iterator[Site]:
    with serving() as running:
        yield running


@pytest.fixture(autouse=True)
def kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has its own cache, and no proxy between it and the server."""
    monkeypatch.setenv("AFLOCK_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("AFLOCK_FILES", raising=False)


def read_bytes(paths: Sequence[Path]) -> State:
    (path,) = paths
    return {"bytes": np.frombuffer(path.read_bytes(), np.uint8)}


def supply(*sources: Source, digest: str | None = None, name: str = "thing") -> Supply:
    return Supply(name, sources, read_bytes, digest, "free")


def web(url: str, body: bytes = BODY) -> Web:
    return Web.file(url, sha(body))


def got(made: Supply, **how: Any) -> bytes:
    kept: bytes = made.arrays(meter=QUIET, **how)["bytes"].tobytes()
    return kept


def leftovers() -> list[str]:
    """Whatever is in the cache beside finished files and locks."""
    files = (path.relative_to(cache.folder()) for path in cache.folder().rglob("*") if path.is_file())
    return sorted(str(path) for path in files if path.suffix != ".safetensors" and path.parts[0] != ".locks")


# -- one download -----------------------------------------------------------------------------------------------------


def test_a_download_is_kept_and_not_asked_for_again(site: Site) -> None:
    made = supply(web(site.add("/thing.bin", BODY)))
    assert got(made) == got(made) == BODY
    assert site.asked == [("/thing.bin", None)]
    assert made.file == cache.folder() / "thing.safetensors"
    assert made.arrays()["origin"]["source"].endswith("/thing.bin")
    assert leftovers() == []


def test_what_is_kept_is_memory_mapped_and_read_only(site: Site) -> None:
    array = supply(web(site.add("/a", BODY))).arrays(meter=QUIET)["bytes"]
    while isinstance(array.base, np.ndarray):
        array = array.base
    assert isinstance(array, np.memmap) or "mmap" in type(array.base).__name__
    assert not array.flags.writeable


def test_a_download_that_is_cut_off_is_continued(site: Site) -> None:
    made = supply(web(site.add("/a", BODY, cut_after=[30_000, 25_000])))
    assert got(made) == BODY
    assert site.asked == [("/a", None), ("/a", "bytes=30000-"), ("/a", "bytes=55000-")]


def test_a_server_that_cannot_continue_begins_again(site: Site) -> None:
    made = supply(web(site.add("/a", BODY, cut_after=[30_000], ranges=False)))
    assert got(made) == BODY
    assert len(site.asked) == 2


def test_a_mirror_goes_on_where_another_was_cut_off(site: Site) -> None:
    dead = site.add("/one/a.bin", BODY, cut_after=[40_000, 0])
    live = site.add("/two/a.bin", BODY)
    assert got(supply(web(dead), web(live))) == BODY
    assert site.asked[-1] == ("/two/a.bin", "bytes=40000-")


def test_a_slow_server_is_waited_for_and_a_silent_one_is_not(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aflock.data.fetching.download.SECONDS", 0.3)
    assert got(supply(web(site.add("/slow", BODY, pause=0.05)))) == BODY  # 0.5 s in all, but never silent for long
    silent = supply(web(site.add("/silent", BODY, pause=1.0)), name="other")
    with pytest.raises(AflockError, match="timed out"):
        got(silent)


@pytest.mark.parametrize("begun", [0, 500])
def test_a_wrong_checksum_is_refused_and_nothing_is_kept(site: Site, begun: int) -> None:
    made = supply(Web.file(site.add("/a", BODY[:-1] + b"x"), sha(BODY)))
    if begun:
        cache.downloads("thing").mkdir(parents=True)
        (cache.downloads("thing") / "a.part").write_bytes(BODY[:begun])
    with pytest.raises(AflockError, match=r"a has the sha256 .*, expected " + sha(BODY)[:12]):
        got(made)
    assert not made.file.exists()
    assert leftovers() == []


def test_a_beginning_of_another_file_is_thrown_away(site: Site) -> None:
    cache.downloads("thing").mkdir(parents=True)
    (cache.downloads("thing") / "a.part").write_bytes(b"something else")
    assert got(supply(web(site.add("/a", BODY)))) == BODY
    assert site.asked == [("/a", "bytes=14-"), ("/a", None)]


def test_a_whole_part_needs_only_its_name(site: Site) -> None:
    cache.downloads("thing").mkdir(parents=True)
    (cache.downloads("thing") / "a.part").write_bytes(BODY)
    assert got(supply(web(site.add("/a", BODY)))) == BODY


def test_several_files_of_one_source(site: Site) -> None:
    site.add("/x/one", b"1"), site.add("/x/two", b"22")
    source = Web.mirror(site.address + "/x/", {"one": sha(b"1"), "two": sha(b"22")})
    brought = source.bring(cache.folder().parent, QUIET)
    assert [path.read_bytes() for path in brought] == [b"1", b"22"]
    assert str(source) == site.address + "/x/"
    source.bring(cache.folder().parent, QUIET)
    assert len(site.asked) == 2  # what is there is not downloaded again


# -- one source after the other ---------------------------------------------------------------------------------------


def test_the_next_source_is_tried(site: Site, tmp_path: Path) -> None:
    closed = web("http://127.0.0.1:9/thing")  # the port "discard": nobody listens
    assert got(supply(closed, web(site.address + "/absent"), web(site.add("/here", BODY)))) == BODY


def test_when_no_source_answers_the_message_says_what_to_do(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFLOCK_FILES", "no/where")
    made = supply(web(site.address + "/thing.zip"), Npm("no-such-client@1", "0"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(AflockError) as caught:
        got(made)
    assert str(caught.value).splitlines() == [
        "thing could not be fetched from any of its sources:",
        f"  {site.address}/thing.zip: HTTP 404 Not Found",
        "  npm pack no-such-client@1: npm is not installed",
        "  no/where/thing: there is no such file or folder",
        "What you can do:",
        "  try again when the network is back; what has been downloaded is kept and continued",
        "  aflock data get thing --from PATH, a file or folder with thing.zip",
        "  or put that into the folder thing of a folder that AFLOCK_FILES names",
    ]
    assert not made.file.exists()


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.bin"
    mine.write_bytes(BODY)
    assert got(supply(), mine=mine) == BODY
    assert mine.exists()


def test_a_file_of_ones_own_must_hold_the_right_content(tmp_path: Path) -> None:
    mine = tmp_path / "mine.bin"
    mine.write_bytes(BODY)
    right = digest_of({"bytes": np.frombuffer(BODY, np.uint8)})
    made = supply(digest=right)
    assert got(made, mine=mine) == BODY
    assert made.file.name == f"thing-{right[:8]}.safetensors"  # other content would be another file
    with pytest.raises(
        InputError, match=r"mine\.bin: it has other content: the sha256 of its content is " + right[:12]
    ):
        got(supply(digest="0" * 64, name="other"), mine=mine)
    assert not list(cache.folder().glob("other*"))
    with pytest.raises(InputError, match="nothing: there is no such file or folder"):
        got(supply(name="other"), mine=tmp_path / "nothing")


def test_the_folder_of_files_is_the_last_source(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFLOCK_FILES", str(tmp_path))
    (tmp_path / "thing").write_bytes(BODY)
    made = supply(web(site.address + "/absent"))
    assert got(made) == BODY
    assert made.arrays()["origin"] == {
        "source": str(tmp_path / "thing"), "sha256": digest_of({"bytes": np.frombuffer(BODY, np.uint8)}),
        "checked": False,
    }  # fmt: skip


def test_digests_tell_names_types_shapes_and_values_apart() -> None:
    one = np.arange(6, dtype=np.int32)
    several: list[State] = [
        {"a": one}, {"b": one}, {"a": one.astype(np.int64)}, {"a": one.reshape(2, 3)}, {"a": one[::-1]}, {"a": [1, 2]},
    ]  # fmt: skip
    assert len({digest_of(content) for content in several}) == len(several)
    assert digest_of({"a": one, "b": 1}) == digest_of({"b": 1, "a": one.copy()})


# -- packages ---------------------------------------------------------------------------------------------------------


def client(folder: Path, name: str, script: str) -> None:
    """An executable of that name, first in PATH."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n" + textwrap.dedent(script))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path / "bin"


def test_a_package_of_npm(clients: Path, tmp_path: Path) -> None:
    (tmp_path / "real.tgz").write_bytes(BODY)
    client(clients, "npm", f'test "$1 $2" = "pack thing@1.0" && cp {tmp_path}/real.tgz thing-1.0.tgz')
    assert got(supply(Npm("thing@1.0", sha(BODY)))) == BODY
    with pytest.raises(AflockError, match=r"npm pack thing@1.0: thing-1\.0\.tgz has the sha256"):
        got(supply(Npm("thing@1.0", sha(b"other")), name="other"))
    client(clients, "npm", "echo notice >&2; echo npm error 404 not found >&2; echo a log is kept >&2; exit 1")
    with pytest.raises(AflockError, match=r"npm pack thing@1\.0: npm error 404 not found"):
        got(supply(Npm("thing@1.0", sha(BODY)), name="other"))
    client(clients, "npm", "true")
    with pytest.raises(AflockError, match="0 files came instead of one"):
        got(supply(Npm("thing@1.0", sha(BODY)), name="other"))


def test_a_package_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    wheel.write_bytes(
        zipped(
            {
                "thing/data.txt": b"hello",
                "thing-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n",
                "thing-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
                "thing-1.0.dist-info/RECORD": b"",
            }
        )
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert got(supply(Pip("thing==1.0", sha(wheel.read_bytes())))) == wheel.read_bytes()
    with pytest.raises(AflockError, match=r"pip download --no-deps thing==1\.0: .*(HASHES|hash)"):
        got(supply(Pip("thing==1.0", sha(b"other")), name="other"))


def test_a_package_of_debian_installed_or_not(clients: Path, tmp_path: Path) -> None:
    (tmp_path / "installed").write_bytes(BODY)
    client(clients, "dpkg", f"echo /.; echo {tmp_path}/installed")
    assert got(supply(Debian("thing"))) == BODY
    client(clients, "dpkg", "echo not installed >&2; exit 1")
    client(clients, "apt-get", 'echo deb > "$2_1.0_all.deb"')
    client(clients, "dpkg-deb", f'test "$2" -ef thing_1.0_all.deb && mkdir "$3" && cp {tmp_path}/installed "$3"')
    source = Debian("thing")
    place = tmp_path / "place"
    place.mkdir()
    assert [path.read_bytes() for path in source.bring(place, QUIET)[0].iterdir()] == [BODY]


# -- many processes, and none -----------------------------------------------------------------------------------------

CODE = """
import sys
import numpy as np
from aflock.data.fetching.fetch import Supply
from aflock.data.fetching.sources import Web
read = lambda paths: {"bytes": np.frombuffer(paths[0].read_bytes(), np.uint8)}
made = Supply("thing", (Web.file(sys.argv[1], sys.argv[2]),), read, None, "free").arrays()
print(made["bytes"].sum())
"""


def process(url: str, code: str = CODE) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, url, sha(BODY)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_at_once_do_the_work_once(site: Site) -> None:
    url = site.add("/thing.bin", BODY, pause=1.0)  # ten seconds, unless it is let go
    with process(url) as first:
        until(lambda: site.asked)
        with process(url) as second:
            assert second.stderr is not None
            assert second.stderr.readline() == "thing: waiting for another process that is getting it\n"
            site.pages["/thing.bin"].pause = 0
            assert first.communicate()[0] == second.communicate()[0] == f"{sum(BODY)}\n"
    assert site.asked == [("/thing.bin", None)]
    assert leftovers() == []


def test_a_killed_download_is_continued_by_the_next_process(site: Site) -> None:
    url = site.add("/thing.bin", BODY, pause=0.1)
    part = cache.downloads("thing") / "thing.bin.part"
    with process(url) as running:
        until(lambda: part.exists() and part.stat().st_size > 0)
        os.kill(running.pid, signal.SIGKILL)
    have = part.stat().st_size
    assert 0 < have < len(BODY)
    assert not cache.file_of("thing").exists()
    site.pages["/thing.bin"].pause = 0
    assert got(supply(web(url))) == BODY
    assert site.asked[-1] == ("/thing.bin", f"bytes={have}-")
    assert leftovers() == []


def test_a_process_killed_while_it_writes_leaves_no_half_file(site: Site) -> None:
    suicide = """
import os, signal
real = os.replace
def replace(source, target):
    if str(target).endswith(".safetensors"):  # all is written but the name
        os.kill(os.getpid(), signal.SIGKILL)
    real(source, target)
os.replace = replace
"""
    url = site.add("/thing.bin", BODY)
    with process(url, suicide + CODE) as running:
        running.communicate()
    assert running.returncode == -signal.SIGKILL
    assert not cache.file_of("thing").exists()
    assert any(name.startswith(".thing.safetensors.") for name in leftovers())
    assert got(supply(web(url))) == BODY
    assert site.asked == [("/thing.bin", None)]  # what had been downloaded was still there
    assert leftovers() == []


def until(true: Any) -> None:
    for _ in range(2000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("it never came true")


# -- the cache --------------------------------------------------------------------------------------------------------


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFLOCK_DATA", "~/mine")
    assert cache.folder() == Path.home() / "mine"
    monkeypatch.delenv("AFLOCK_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.folder() == Path("/somewhere/aflock")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == Path.home() / ".cache/aflock"


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AFLOCK_DATA", str(tmp_path / "file"))
    with pytest.raises(AflockError, match=r"the folder .* is not writable .* set AFLOCK_DATA to one that is"):
        cache.kept("x", dict)


def test_a_damaged_file_is_named() -> None:
    cache.folder().mkdir()
    cache.file_of("x").write_bytes(b"nonsense")
    with pytest.raises(StateError, match=r"x\.safetensors is not a state .*; delete the file, and aflock makes it"):
        cache.kept("x", dict)


def test_what_is_made_is_made_once() -> None:
    calls = []

    def make() -> State:
        calls.append(1)
        return {"a": np.arange(3), "b": "text"}

    for _ in range(2):
        kept = cache.kept("x", make)
        assert kept["a"].tolist() == [0, 1, 2]
        assert kept["b"] == "text"
    assert len(calls) == 1
    assert state.load(cache.file_of("x"))["b"] == "text"


def test_other_settings_another_name() -> None:
    assert cache.derived("x", a=1, b=2) == cache.derived("x", b=2, a=1)
    assert len({cache.derived("x", a=1), cache.derived("x", a=2), cache.derived("y", a=1)}) == 3


# -- what is said -----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aflock.data.fetching.download_progress._SECONDS_BETWEEN_LINES", 0.0)
    out = io.StringIO()
    with DownloadProgress(out=out).watch("thing", 1_000_000, 4_000_000) as advance:
        advance(1_000_000)
    with DownloadProgress(out=out).watch("thing", 0, None) as advance:
        advance(500_000)
    assert out.getvalue() == "thing: 2.0 of 4.0 MB\nthing: 0.5 MB\n"


def test_a_bar_on_a_terminal_and_silence_on_request() -> None:
    shown, silent = Terminal(), Terminal()
    for out, quiet in ((shown, False), (silent, True)):
        meter = DownloadProgress(out=out, quiet=quiet)
        meter.say("begin")
        with meter.watch("thing.zip", 0, 100) as advance:
            advance(100)
    assert "begin" in shown.getvalue()
    assert "thing.zip" in shown.getvalue()
    assert silent.getvalue() == ""


def test_the_sources_tried_are_told(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    supply(web(site.address + "/absent"), web(site.add("/here", BODY))).arrays()
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"thing: {site.address}/absent",
        "thing: this source failed: HTTP 404 Not Found",
        f"thing: {site.address}/here",
    ]


# -- files in files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("a.txt", b"hello"),
        ("a.txt.gz", gzip.compress(b"hello")),
        ("x.tar", tar("", {"deep/a.txt": b"hello", "b": b"no"})),
        ("x.tgz", tar("gz", {"deep/a.txt": b"hello"})),
        ("x.tar.xz", tar("xz", {"deep/a.txt.gz": gzip.compress(b"hello")})),
        ("x.zip", zipped({"deep/a.txt": b"hello", "deep/b.txt": b"no"})),
        ("x.whl", zipped({"inner.zip": zipped({"inmost.tar.gz": tar("gz", {"a.txt": b"hello"})})})),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # gzip writes the time: every process has other bytes
)
def test_a_file_is_found_whatever_it_is_wrapped_in(tmp_path: Path, name: str, body: bytes) -> None:
    place = tmp_path / "deep" / "deeper"
    place.mkdir(parents=True)
    (place / name).write_bytes(body)
    (place / "other.bin").write_bytes(b"no")
    assert by_name([place / name], ["a.txt"]) == by_name([tmp_path], ["a.txt"]) == {"a.txt": b"hello"}


def test_a_broken_archive_is_named(tmp_path: Path) -> None:
    for name, body in (("x.zip", zipped({"a": b"1"})[:-10]), ("x.tgz", tar("gz", {"a": BODY})[:500])):
        (tmp_path / name).write_bytes(body)
        with pytest.raises(InputError, match=rf"{name} cannot be unpacked .*; it may be incomplete"):
            list(contents([tmp_path / name], lambda path: True))


def test_a_missing_file_is_named() -> None:
    assert all_of({"a": b"1", "b": b"2"}, ("b", "a")) == [b"2", b"1"]
    with pytest.raises(InputError, match=r"^there is no file c; expected a, c$"):
        all_of({"a": b"1"}, ("a", "c"))


def test_ones_own_path_is_a_source(tmp_path: Path) -> None:
    assert Mine(tmp_path).bring(tmp_path, QUIET) == [tmp_path]
    assert str(Mine(tmp_path)) == str(tmp_path)
