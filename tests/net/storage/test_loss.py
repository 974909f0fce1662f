"""Acknowledged updates that are missing: the server refuses to start, changes nothing, and goes on only if told to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aflock.errors import StateError
from aflock.net.commands.replay import replay
from aflock.net.storage.data_folder import DataFolder, LostUpdates, snapshots
from aflock.net.storage.journal import Journal, JournalInUse, JournalReader
from aflock.system import safetensors_codec
from tests.net.real_server import ONES, SMALL, NotStarted, Peer, refusal, running, start, working
from tests.net.storage.folders import begun, let, settings, told, work

Listing = dict[str, tuple[int, int, bytes]]


def listing(folder: Path) -> Listing:
    """Everything in a folder: times (but that of the folder itself), modes and contents."""
    return {
        str(file.relative_to(folder)): (
            file.stat().st_mtime_ns,
            file.stat().st_mode,
            file.read_bytes() if file.is_file() else b"",
        )
        for file in sorted(folder.rglob("*"))
    }


def last_segment(folder: Path) -> Path:
    return sorted((folder / "journal").glob("journal-*.log"))[-1]


def flip_a_bit(folder: Path) -> None:
    raw = bytearray(last_segment(folder).read_bytes())
    raw[-100] ^= 4
    last_segment(folder).write_bytes(raw)


def cut_off(folder: Path) -> None:
    os.truncate(last_segment(folder), last_segment(folder).stat().st_size - 10_000)


def delete_the_last_segment(folder: Path) -> None:
    last_segment(folder).unlink()


def delete_the_journal(folder: Path) -> None:
    shutil.rmtree(folder / "journal")


DAMAGES = [flip_a_bit, cut_off, delete_the_last_segment, delete_the_journal]


def lived(folder: Path, *, snapshot: bool) -> None:
    """Seven updates of alice, jobs 0 to 6, three of them in a snapshot if there is one."""
    with closing(begun(folder)) as store:
        work(store, 3)
        if snapshot:
            store.snapshot()
        work(store, 4)


@pytest.mark.parametrize("snapshot", [False, True], ids=["no snapshot", "a snapshot"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_lost_updates_are_named_and_nothing_is_changed(
    tmp_path: Path, damage: Callable[[Path], None], snapshot: bool
) -> None:
    lived(tmp_path, snapshot=snapshot)
    whole = {file: file.read_bytes() for file in (tmp_path / "journal").iterdir()}
    damage(tmp_path)
    before = listing(tmp_path)
    for _ in range(2):  # the second start says the same
        with pytest.raises(LostUpdates, match="or go on without them with `aflock serve --accept-loss`") as error:
            DataFolder(tmp_path, settings())
        assert listing(tmp_path) == before
    last = [job for _, job in error.value.lost]
    first = 6 if damage is flip_a_bit else 4 if damage is cut_off else 3 * snapshot
    assert last == list(range(first, 7))
    known = first > 0  # the hello of alice is gone with everything else
    assert error.value.lost[0][0] == ("alice" if known else "client 0")
    assert f"{'alice' if known else 'client 0'}: job 6" in str(error.value)
    assert f"{7 - first} acknowledged update" in str(error.value)
    (tmp_path / "journal").mkdir(exist_ok=True)
    for file, content in whole.items():  # a backup makes it good
        file.write_bytes(content)
    with closing(DataFolder(tmp_path, settings())) as again:
        assert again.federation.counts.updates == 7
    assert replay(tmp_path / "trace.jsonl")["agrees"]


@pytest.mark.parametrize("snapshot", [False, True], ids=["no snapshot", "a snapshot"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_an_accepted_loss_is_recorded_and_its_jobs_are_not_given_again(
    tmp_path: Path, damage: Callable[[Path], None], snapshot: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lived(tmp_path, snapshot=snapshot)
    damage(tmp_path)
    with closing(DataFolder(tmp_path, settings(), accept_loss=True)) as store:
        lost = 7 - store.federation.counts.updates
        assert lost > 0
        assert store.federation.lost == lost
        assert f"going on without {lost} acknowledged updates" in caplog.text
        let(store, "hello", name="alice", gen=1)
        given = let(store, "pull", name="alice")
        assert given.id > 6
    for _ in range(2):  # from now on it is as it is
        with closing(DataFolder(tmp_path, settings())) as again:
            assert again.federation.lost == lost
            assert let(again, "pull", name="alice").id > given.id
            again.snapshot()
            again.delete_old()
    assert replay(tmp_path / "trace.jsonl")["agrees"]
    (line,) = [line for line in told(tmp_path) if line["kind"] == "loss"]
    assert line["reason"] == f"{lost} acknowledged updates are lost"
    jobs = [line["job"] for line in told(tmp_path) if line["kind"] == "arrival"]
    assert jobs == list(range(7 - lost))


def test_the_record_of_a_loss_says_which_and_when(tmp_path: Path) -> None:
    lived(tmp_path, snapshot=True)
    delete_the_last_segment(tmp_path)
    DataFolder(tmp_path, settings(), accept_loss=True).close()
    with JournalReader(tmp_path / "journal") as journal:
        heads = [json.loads(record.head) for record in journal.read(after=int(snapshots(tmp_path)[0].stem[-16:]))]
    (loss,) = [head for head in heads if head["k"] == "loss"]
    assert (loss["count"], loss["jobs"], loss["clients"]) == (4, [[3, 6]], {"alice": 4})
    assert loss["next"] > 6
    assert loss["date"] > 1.7e9


def test_a_crash_between_the_record_of_a_loss_and_the_trace(tmp_path: Path) -> None:
    lived(tmp_path, snapshot=True)
    whole = (tmp_path / "trace.jsonl").read_bytes()
    delete_the_last_segment(tmp_path)
    DataFolder(tmp_path, settings(), accept_loss=True).close()
    (tmp_path / "trace.jsonl").write_bytes(whole)  # as if it had not been written again
    with closing(DataFolder(tmp_path, settings())) as again:
        assert again.federation.lost == 4
    assert replay(tmp_path / "trace.jsonl")["agrees"]


def test_a_loss_before_anybody_has_come_back_is_remembered_by_a_snapshot(tmp_path: Path) -> None:
    lived(tmp_path, snapshot=False)
    delete_the_journal(tmp_path)
    with closing(DataFolder(tmp_path, settings(), accept_loss=True)) as store:
        assert not store.federation.begun
        store.snapshot()
    with closing(begun(tmp_path)) as again:
        assert again.federation.lost == 7
        assert let(again, "pull", name="alice").id > 6


def test_what_is_no_proof_of_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A torn last line, a damaged one, lines in another order, and a trace that knows less."""
    lived(tmp_path, snapshot=True)
    file = tmp_path / "trace.jsonl"
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    arrival = next(line for line in reversed(lines) if b'"arrival"' in line)
    assert b'"job": 6' in arrival
    others = [
        whole + arrival.replace(b'"job": 6', b'"job": 7')[:-1],
        whole + b"\0" * 5000,
        b"".join([*lines[:-1], b"#" + lines[-1][1:]]),
        whole + b"nonsense\n[1]\n" + b'{"kind": "arrival"}\n{"kind": "arrival", "client": "x", "job": "y"}\n',
        b"".join([*lines[:-2], lines[-1], lines[-2]]),
        b"".join(lines[:-3]),
    ]
    for other in others:
        file.write_bytes(other)
        with closing(DataFolder(tmp_path, settings())) as store:
            assert store.federation.counts.updates == 7
        assert file.read_bytes() == whole
        assert replay(file)["agrees"]
    assert "trace.jsonl is damaged: 1 lines are not JSON" in caplog.text
    DataFolder(tmp_path, settings(), accept_loss=True).close()
    assert "nothing is missing" in caplog.text
    assert file.read_bytes() == whole


@pytest.mark.parametrize("kind", ["leave", "pull", "hello"])
def test_a_lost_record_of_any_kind_is_a_loss(tmp_path: Path, kind: str) -> None:
    """Its sender was answered, too: a client that left must not be back without a word."""
    with closing(begun(tmp_path)) as store:
        work(store, 2)
        let(store, kind, name="bob" if kind == "hello" else "alice", gen=1)
    _flip_in_last_record(tmp_path)
    before = listing(tmp_path)
    line = {"hello": "join"}.get(kind, kind)
    for _ in range(2):
        with pytest.raises(LostUpdates, match=f"1 of kind {line} is in .* and not in the journal") as error:
            DataFolder(tmp_path, settings())
        assert (error.value.lost, listing(tmp_path)) == ([], before)
    with closing(DataFolder(tmp_path, settings(), accept_loss=True)) as store:
        assert store.federation.counts.updates == 2
        work(store, 1)
    with closing(DataFolder(tmp_path, settings())) as again:
        assert again.federation.counts.updates == 3
    assert replay(tmp_path / "trace.jsonl")["agrees"]


def _flip_in_last_record(folder: Path) -> None:
    raw = bytearray(last_segment(folder).read_bytes())
    raw[-3] ^= 4
    last_segment(folder).write_bytes(raw)


@pytest.mark.parametrize("snapshot", [False, True], ids=["no snapshot", "a snapshot"])
def test_a_kept_file_that_is_missing_is_named_and_nothing_is_changed(tmp_path: Path, snapshot: bool) -> None:
    lived(tmp_path, snapshot=snapshot)
    kept = (tmp_path / "federation.toml").read_bytes()
    (tmp_path / "federation.toml").unlink()
    before = listing(tmp_path)
    for _ in range(2):
        with pytest.raises(StateError, match=r"federation\.toml is missing, so nothing says what this federation"):
            DataFolder(tmp_path, settings({"name": "asgd", "lr": 0.7}))
        assert listing(tmp_path) == before
    (tmp_path / "federation.toml").write_bytes(kept)
    with closing(DataFolder(tmp_path, settings())) as again:
        assert again.federation.counts.updates == 7


def test_a_snapshot_of_a_newer_format_is_not_taken_for_a_damaged_one(tmp_path: Path) -> None:
    lived(tmp_path, snapshot=True)
    newest = snapshots(tmp_path)[0]
    found = safetensors_codec.read(newest)
    document = json.loads(found.metadata["aflock"]) | {"format": 99}
    arrays = {name: np.array(array) for name, array in found.arrays.items()}
    safetensors_codec.write(newest, arrays, {"aflock": json.dumps(document)})
    before = listing(tmp_path)
    with pytest.raises(StateError, match="has state format 99, which this version does not read"):
        DataFolder(tmp_path, settings())
    assert listing(tmp_path) == before


def test_many_lost_updates_are_told_of_in_one_sentence(tmp_path: Path) -> None:
    with closing(begun(tmp_path)) as store:
        store.snapshot()
        work(store, 500)
    delete_the_last_segment(tmp_path)
    with pytest.raises(LostUpdates) as error:
        DataFolder(tmp_path, settings())
    assert "500 acknowledged updates are in " in str(error.value)
    first, last = "alice: job 0, alice: job 1, alice: job 2", "alice: job 497, alice: job 498, alice: job 499"
    assert f"({first}, ..., {last})" in str(error.value)


# --- a real server ---------------------------------------------------------------------------------------------------


def test_a_server_refuses_to_start_and_goes_on_when_it_is_told_to(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with running(folder, orderly=False) as server:
        alice = working(server, "alice")
        for _ in range(5):
            status, found, _ = alice.push(ONES, next=True)
            assert status == 200
    delete_the_last_segment(folder)
    before = listing(folder)
    for _ in range(2):
        with pytest.raises(NotStarted) as stopped:
            start(folder)
        assert stopped.value.code == 2
        assert "5 acknowledged updates are in " in stopped.value.errors.splitlines()[-1]
        assert "trace.jsonl and not in the journal" in stopped.value.errors
        assert listing(folder) == before
    with running(folder, options=["--accept-loss"]) as again:
        assert again.status()["lost"] == 5
        with Peer(again) as anybody:
            assert "\naflock_lost_updates_total 5\n" in anybody.request("GET", "/metrics")[2].decode()
        back = Peer(again, alice.token, job=alice.job)
        back.hello()
        assert refusal(back.push(ONES)) == (409, "unknown-job")  # of a job in the lost past
        assert back.pull()[0] == 200
        assert int(back.job["aflock-job"]) > int(found["aflock-job"])
        assert back.push(ONES)[0] == 200
    assert replay(folder / "trace.jsonl")["agrees"]
    with running(folder, orderly=False) as third:
        assert third.status()["lost"] == 5


# --- commands that only read -----------------------------------------------------------------------------------------


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aflock", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def test_whoever_looks_at_a_folder_changes_nothing(tmp_path: Path) -> None:
    folder, out = tmp_path / "fed", tmp_path / "out"
    out.mkdir()
    with running(folder) as server:
        alice = working(server, "alice")
        assert alice.push(ONES, next=True)[0] == 200
    with running(folder, orderly=False) as server:
        back = Peer(server, alice.token)
        back.pull()
        assert back.push(ONES, next=True)[0] == 200
    with last_segment(folder).open("ab") as file:
        file.write(b"torn")
    before = listing(folder)
    commands: list[tuple[Any, ...]] = [
        ("replay", folder / "trace.jsonl"),
        ("export", folder, "--out", out / "model.safetensors"),
        ("members", folder),
        ("members", folder, "--json"),
        ("status", folder, "--once"),
        ("invite", "--help"),
        ("serve", "--help"),
    ]
    for arguments in commands:
        done = command(*arguments)
        assert done.returncode == (1 if arguments[0] == "status" else 0), done.stderr  # no server is there to ask
        assert listing(folder) == before, arguments


def test_a_replay_beside_a_running_server_is_refused(tmp_path: Path) -> None:
    with closing(begun(tmp_path)) as store:
        work(store)
        before = listing(tmp_path)
        with pytest.raises(JournalInUse, match="another server uses the journal"):
            replay(tmp_path / "trace.jsonl")
        assert listing(tmp_path) == before


def test_a_journal_without_a_lock_is_read_without_making_one(tmp_path: Path) -> None:
    """A copy of one, say."""
    with closing(begun(tmp_path)) as store:
        work(store)
    (tmp_path / "journal" / "lock").unlink()
    before = listing(tmp_path)
    assert replay(tmp_path / "trace.jsonl")["agrees"]
    assert listing(tmp_path) == before


def test_no_server_starts_while_a_journal_is_read(tmp_path: Path) -> None:
    begun(tmp_path).close()
    with JournalReader(tmp_path / "journal"), pytest.raises(JournalInUse):
        Journal(tmp_path / "journal")


# --- what the federation was begun with ------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"\0" * 400, b"\n", b"[strategy\n"])
def test_a_kept_file_that_was_emptied_is_named(tmp_path: Path, content: bytes) -> None:
    lived(tmp_path, snapshot=True)
    file = tmp_path / "federation.toml"
    whole = file.read_bytes()
    file.write_bytes(content)
    before = listing(tmp_path)
    for read in (lambda: DataFolder(tmp_path, settings()).close(), lambda: replay(tmp_path / "trace.jsonl")):
        with pytest.raises(ValueError, match=r"copy the federation file that .* to this path") as error:
            read()
        assert str(file) in str(error.value)
        assert listing(tmp_path) == before
    file.write_bytes(whole)
    with closing(DataFolder(tmp_path, settings())) as again:
        assert np.isfinite(again.federation.model).all()


def test_the_document_of_a_real_server_is_enough_to_mend_it(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with running(folder, orderly=False) as server:
        assert working(server, "alice").push(ONES)[0] == 200
    (folder / "federation.toml").write_bytes(b"")
    with pytest.raises(NotStarted) as stopped:
        start(folder)
    assert stopped.value.code == 2
    assert f"{folder / 'federation.toml'} is empty" in stopped.value.errors
    shutil.copy(tmp_path / "fed.toml", folder / "federation.toml")
    with pytest.raises(NotStarted, match="is not what this federation was begun with"):
        start(folder, dict(SMALL) | {"strategy": {"name": "fedasync"}})
    with running(folder, orderly=False) as server:
        assert server.status()["updates"] == 1
