"""Members and their tokens: real files, real processes, real kills."""

from __future__ import annotations

import hmac
import json
import os
import signal
import subprocess
import sys
import time
import timeit
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aflock.errors import InputError
from aflock.net.identity import members
from aflock.net.identity.members import BadToken, Member, Members, Revoked, invite, names, revoke
from tests.net.identity.member_helpers import SECRET, all_text, mode

LOOP = """
import sys
from pathlib import Path
from aflock.net.identity.members import invite
for k in range(int(sys.argv[3])):
    invite(Path(sys.argv[1]), f"{sys.argv[2]}{k}")
"""


def _inviting(folder: Path, prefix: str, count: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", LOOP, str(folder), prefix, str(count)])


def test_an_invited_one_is_let_in(tmp_path: Path) -> None:
    token = invite(tmp_path, "alice")
    prefix, name, secret = token.split(".")
    assert (prefix, name, len(secret)) == ("aflock1", "alice", 43)
    member = Members(tmp_path).authenticate(token)
    assert (member.name, member.revoked, member.generation) == ("alice", False, 1)
    assert names(tmp_path) == {"alice": member}


def test_the_file_holds_the_hash_and_not_the_secret(tmp_path: Path) -> None:
    token = invite(tmp_path, "alice")
    text = (tmp_path / "members.json").read_text()
    assert token.split(".")[2] not in text
    document = json.loads(text)
    assert document["format"] == 1
    entry = document["members"]["alice"]
    assert entry["revoked"] is False
    assert entry["generation"] == 1
    assert time.strptime(entry["invited"], "%Y-%m-%dT%H:%M:%SZ")
    assert mode(tmp_path / "members.json") == 0o600
    assert mode(tmp_path / "members.lock") == 0o600
    assert {file.name for file in tmp_path.iterdir()} == {"members.json", "members.lock"}


def test_a_member_is_not_invited_twice_by_mistake(tmp_path: Path) -> None:
    old = invite(tmp_path, "alice")
    with pytest.raises(InputError, match=r"'alice' is already a member; revoke .* --again"):
        invite(tmp_path, "alice")
    new = invite(tmp_path, "alice", again=True)
    view = Members(tmp_path)
    assert view.authenticate(new).generation == 2
    with pytest.raises(BadToken):
        view.authenticate(old)


def test_a_revoked_one_is_shut_out_until_invited_anew(tmp_path: Path) -> None:
    old = invite(tmp_path, "alice")
    revoke(tmp_path, "alice")
    revoke(tmp_path, "alice")
    with pytest.raises(Revoked, match="'alice' was revoked"):
        Members(tmp_path).authenticate(old)
    new = invite(tmp_path, "alice")
    view = Members(tmp_path)
    kept = names(tmp_path)["alice"]
    assert view.authenticate(new) == Member("alice", kept.hash, kept.invited, revoked=False, generation=2)
    with pytest.raises(BadToken):
        view.authenticate(old)


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no member was invited yet"):
        revoke(tmp_path, "alice")
    invite(tmp_path, "alice")
    invite(tmp_path, "bob")
    with pytest.raises(InputError, match=r"there is no member 'alcie'; did you mean 'alice'\?"):
        revoke(tmp_path, "alcie")
    assert not any(member.revoked for member in names(tmp_path).values())


@pytest.mark.parametrize("name", ["", "-a", "Alice", "a.b", "a b", "ä", "a\n", "x" * 65, "../a", None, 3])
def test_names_that_are_none(tmp_path: Path, name: Any) -> None:
    with pytest.raises(InputError, match="is not valid; expected 1 to 64 of a-z"):
        invite(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "_", "0-", "a_b-c", "x" * 64])
def test_names_that_are_some(tmp_path: Path, name: str) -> None:
    assert Members(tmp_path).known == {}
    token = invite(tmp_path, name)
    assert Members(tmp_path).authenticate(token).name == name


def test_there_must_be_a_folder(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    for call in (invite, revoke):
        with pytest.raises(InputError, match="does not exist; expected the data folder of a federation"):
            call(nowhere, "alice")
    for read in (names, Members):
        with pytest.raises(InputError, match="does not exist; expected the data folder of a federation"):
            read(nowhere)


def test_the_server_sees_what_commands_do(tmp_path: Path) -> None:
    view = Members(tmp_path)
    assert not view.refresh()
    token = invite(tmp_path, "alice")
    with pytest.raises(BadToken):
        view.authenticate(token)
    assert view.refresh()
    assert not view.refresh()
    assert view.authenticate(token).name == "alice"
    assert (view.revoked, view.generations) == (set(), {"alice": 1})
    revoke(tmp_path, "alice")
    assert view.refresh()
    assert view.revoked == {"alice"}
    with pytest.raises(Revoked):
        view.authenticate(token)
    invite(tmp_path, "alice")
    assert view.refresh()
    assert (view.revoked, view.generations) == (set(), {"alice": 2})


def test_a_change_within_one_tick_of_the_clock_is_seen(tmp_path: Path) -> None:
    """A file system with coarse times that uses an inode again: the same stat, other members."""
    invite(tmp_path, "alice")
    file = tmp_path / "members.json"
    view = Members(tmp_path)
    before = file.stat()
    file.write_text(file.read_text().replace("alice", "clare"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_mtime_ns, after.st_size, after.st_ino) == (before.st_mtime_ns, before.st_size, before.st_ino)
    assert view.refresh()
    assert set(view.known) == {"clare"}


def test_an_unchanged_file_is_not_read_again(tmp_path: Path) -> None:
    """The file gets another member without a change of its stat: only a view that read it again would see that."""
    invite(tmp_path, "alice")
    file = tmp_path / "members.json"
    os.utime(file, (1e9, 1e9))
    view = Members(tmp_path)
    file.write_text(file.read_text().replace("alice", "clare"))
    os.utime(file, (1e9, 1e9))
    assert not view.refresh()
    assert set(view.known) == {"alice"}
    assert min(timeit.repeat(view.refresh, number=1000, repeat=10)) / 1000 < 50e-6


GOOD = {"hash": "0" * 64, "invited": "2026-01-01T00:00:00Z", "revoked": False, "generation": 1}
BROKEN = [
    "",
    "{",
    "[]",
    "[" * 100_000,
    "\udcff",
    '{"format": 1}',
    '{"format": 2, "members": {}}',
    '{"format": 1, "members": []}',
    *(
        json.dumps({"format": 1, "members": {name: entry}})
        for name, entry in [
            ("Alice", GOOD),
            ("a", None),
            ("a", GOOD | {"hash": "0" * 63}),
            ("a", GOOD | {"hash": "G" * 64}),
            ("a", GOOD | {"hash": None}),
            ("a", GOOD | {"invited": 1}),
            ("a", GOOD | {"revoked": 0}),
            ("a", GOOD | {"generation": 0}),
            ("a", GOOD | {"generation": True}),
            ("a", GOOD | {"more": 1}),
            ("a", {"hash": "0" * 64}),
        ]
    ),
]


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_keeps_the_last_good_view(tmp_path: Path, content: str) -> None:
    token = invite(tmp_path, "alice")
    file = tmp_path / "members.json"
    good = file.read_bytes()
    view = Members(tmp_path)
    file.write_bytes(content.encode(errors="surrogateescape"))
    assert view.refresh()
    assert view.problem is not None
    assert "members.json cannot be used: " in view.problem
    assert view.authenticate(token).name == "alice"
    assert not view.refresh()
    for call in (lambda: invite(tmp_path, "bob"), lambda: revoke(tmp_path, "alice"), lambda: names(tmp_path)):
        with pytest.raises(InputError, match="put back a good copy"):
            call()
    assert file.read_bytes() == content.encode(errors="surrogateescape")
    broken = Members(tmp_path)
    assert (broken.known, broken.problem) == ({}, view.problem)
    file.write_bytes(good)
    assert view.refresh()
    assert view.problem is None


def test_a_file_that_goes_away_keeps_the_last_good_view(tmp_path: Path) -> None:
    token = invite(tmp_path, "alice")
    view = Members(tmp_path)
    (tmp_path / "members.json").unlink()
    assert view.refresh()
    assert not view.refresh()
    assert view.problem is not None
    assert "does not exist any more" in view.problem
    assert view.authenticate(token).name == "alice"


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "members.json").mkdir()
    problem = Members(tmp_path).problem
    assert problem is not None
    assert "cannot be read (Is a directory)" in problem


@pytest.mark.parametrize(
    "token",
    [
        "",
        "aflock1.alice",
        "aflock1.alice.",
        f"aflock2.alice.{SECRET}",
        f"AFLOCK1.alice.{SECRET}",
        f"aflock1.alice.{SECRET}\n",
        f" aflock1.alice.{SECRET}",
        f"aflock1.alice.{SECRET}s",
        f"aflock1.alice.{SECRET[1:]}",
        f"aflock1..{SECRET}",
        f"aflock1.-a.{SECRET}",
        f"aflock1.alice.{SECRET[1:]}\N{LATIN SMALL LETTER LONG S}",
        f"aflock1.al\N{KELVIN SIGN}ce.{SECRET}",
        f"aflock1.alice.{SECRET[1:]}\N{ARABIC-INDIC DIGIT THREE}",
        f"aflock1.alice.{SECRET[1:]}\udc80",
        f"aflock1.{'a' * 10**6}.{SECRET}",
        b"aflock1.alice." + SECRET.encode(),
        None,
    ],
    ids=range(18),
)
def test_what_is_no_token_is_refused(tmp_path: Path, token: Any) -> None:
    invite(tmp_path, "alice")
    with pytest.raises(BadToken, match="this is not a token") as caught:
        Members(tmp_path).authenticate(token)
    assert SECRET[1:] not in all_text(caught.value)


_FUZZED = st.one_of(
    st.text(),
    st.text(alphabet="aflock1._-AZ09\n", max_size=210),
    st.from_regex(r"aflock1\.[a-z0-9_-]{0,70}\.[A-Za-z0-9_-]{40,46}"),
    st.builds("aflock1.{}.{}".format, st.sampled_from(["alice", "gone", "nobody"]), st.text(max_size=50)),
)


@given(token=_FUZZED)
def test_no_token_gets_in_or_breaks_anything(token: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    view = _fuzz_view(tmp_path_factory)
    with pytest.raises((BadToken, Revoked)):
        view.authenticate(token)


_VIEWS: list[Members] = []


def _fuzz_view(factory: pytest.TempPathFactory) -> Members:
    if not _VIEWS:
        folder = factory.mktemp("fed")
        invite(folder, "alice")
        invite(folder, "gone")
        revoke(folder, "gone")
        _VIEWS.append(Members(folder))
    return _VIEWS[0]


def test_an_unknown_name_and_a_wrong_secret_look_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invite(tmp_path, "alice")
    invite(tmp_path, "gone")
    revoke(tmp_path, "gone")
    view = Members(tmp_path)
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def counting(a: str, b: str) -> bool:
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    answers = set()
    for name in ("alice", "gone", "nobody"):
        with pytest.raises(BadToken) as caught:
            view.authenticate(f"aflock1.{name}.{SECRET}")
        answers.add(str(caught.value))
    assert compared == [(64, 64)] * 3
    assert len(answers) == 1


def test_nothing_secret_is_ever_shown(tmp_path: Path) -> None:
    token = invite(tmp_path, "alice")
    secret = token.split(".")[2]
    view = Members(tmp_path)
    member = view.authenticate(token)
    assert member.hash not in repr(member) + repr(view)
    assert "alice" in repr(member)
    revoke(tmp_path, "alice")
    view.refresh()
    for tried in (token, token + "x", token.replace("alice", "nobody")):
        with pytest.raises((BadToken, Revoked)) as caught:
            view.authenticate(tried)
        assert secret not in all_text(caught.value)
        assert member.hash not in all_text(caught.value)
    with pytest.raises(InputError) as refused:
        members.token_text(token + "x", None)
    assert secret not in all_text(refused.value)


def test_it_is_fast(tmp_path: Path) -> None:
    tokens = [invite(tmp_path, f"client{k}") for k in range(20)]
    view = Members(tmp_path)
    best = min(timeit.repeat(lambda: view.authenticate(tokens[7]), number=2000, repeat=30)) / 2000
    assert best < 5e-6


def test_two_who_invite_at_once_lose_nothing(tmp_path: Path) -> None:
    children = [_inviting(tmp_path, prefix, 40) for prefix in ("a", "b", "c")]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    assert set(names(tmp_path)) == {f"{prefix}{k}" for prefix in "abc" for k in range(40)}


def test_a_kill_in_the_middle_leaves_a_readable_file(tmp_path: Path) -> None:
    for attempt in range(5):
        before = len(names(tmp_path))
        child = _inviting(tmp_path, f"r{attempt}-", 10**6)
        deadline = time.monotonic() + 30
        while len(names(tmp_path)) == before and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.007 * attempt)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        known = names(tmp_path)
        assert len(known) > before
        assert set(known) >= {f"r{attempt}-{k}" for k in range(len(known) - before)}
    token = invite(tmp_path, "after")  # the lock of the dead is free, what it left beside the file is no obstacle
    assert Members(tmp_path).authenticate(token).name == "after"
    assert not list(tmp_path.glob(".members.json.*"))


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invite(tmp_path, "alice")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        invite(tmp_path, "bob")
    assert set(names(tmp_path)) == {"alice"}
    assert {file.name for file in tmp_path.iterdir()} == {"members.json", "members.lock"}
