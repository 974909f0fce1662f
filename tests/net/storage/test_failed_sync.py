"""A sync that fails: what is read after the restart is on the disk before anybody counts on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from aflock.net.storage.journal import Journal, JournalFailed
from aflock.net.storage.segment import JournalError, Segment
from tests.net.storage.journals import recovered
from tests.net.storage.simulated_disk import SimulatedDisk


def opened(folder: Path, disk: SimulatedDisk) -> tuple[Journal, list[bytes]]:
    journal = Journal(folder, disk=disk)
    return journal, [record.head for record in recovered(journal)]


def written(folder: Path, disk: SimulatedDisk, *batches: list[bytes]) -> Journal:
    journal, _ = opened(folder, disk)
    for batch in batches:
        journal.write([(head, b"body of " + head) for head in batch])
    return journal


def failing(folder: Path, disk: SimulatedDisk, *before: list[bytes]) -> None:
    """A last batch is in the system's memory when its sync fails, and nothing can be undone."""
    with written(folder, disk, *before) as journal:
        disk.fails = True
        with pytest.raises(JournalFailed):
            journal.write([(b"failed", b"x" * 50), (b"failed, too", b"y" * 50)])


def unnoticed(folder: Path, disk: SimulatedDisk, *before: list[bytes]) -> None:
    """The server is killed before the sync, and the system then fails to write what it has."""
    journal = written(folder, disk, *before)
    disk.syncs = False
    journal.write([(b"failed", b"x" * 50), (b"failed, too", b"y" * 50)])
    journal.close()
    disk.lose_dirty_pages()


@pytest.mark.parametrize("before", [[], [[b"one"], [b"two", b"three"]]], ids=["the first batch", "a later one"])
@pytest.mark.parametrize("how", [failing, unnoticed])
def test_what_a_restart_has_read_outlasts_a_power_cut(tmp_path: Path, how: object, before: list[list[bytes]]) -> None:
    disk = SimulatedDisk()
    assert callable(how)
    how(tmp_path, disk, *before)
    disk.restart()
    journal, believed = opened(tmp_path, disk)
    assert believed == [*(head for batch in before for head in batch), b"failed", b"failed, too"]
    with journal:
        journal.write([(b"later", b"")])  # as the update of a client that has its receipt
    disk.cut_power()
    journal, after = opened(tmp_path, disk)
    journal.close()
    assert after == [*believed, b"later"]


def test_the_header_of_a_new_segment_is_written_again(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    journal = written(tmp_path, disk, [b"one"])
    disk.syncs = False
    journal.rotate()
    journal.close()
    disk.lose_dirty_pages()
    disk.restart()
    journal, believed = opened(tmp_path, disk)
    assert believed == [b"one"]
    with journal:
        journal.write([(b"later", b"")])
    disk.cut_power()
    journal, after = opened(tmp_path, disk)
    journal.close()
    assert after == [b"one", b"later"]


def test_a_restart_whose_sync_fails_takes_nothing(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    failing(tmp_path, disk, [b"one"])
    for _ in range(2):
        disk.restart()
        disk.fails = True
        journal = Journal(tmp_path, disk=disk)
        with journal, pytest.raises(JournalError, match="Input/output error"):
            list(recovered(journal))
    disk.restart()
    journal, believed = opened(tmp_path, disk)
    journal.close()
    assert believed == [b"one", b"failed", b"failed, too"]


def test_a_torn_batch_is_written_again_as_far_as_it_is_whole(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    failing(tmp_path, disk, [b"one"])
    (file,) = disk.files.values()
    del file.cache[-5:]
    disk.restart()
    journal, believed = opened(tmp_path, disk)
    assert believed == [b"one", b"failed"]
    with journal:
        journal.write([(b"later", b"")])
    disk.cut_power()
    journal, after = opened(tmp_path, disk)
    journal.close()
    assert after == [b"one", b"failed", b"later"]


def test_a_batch_that_was_taken_back_is_not_there_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write is interrupted when all of it is on the disk: the caller is told that nothing of the batch counts."""
    disk = SimulatedDisk()
    sync = disk.sync_data

    def interrupted(descriptor: int) -> None:
        sync(descriptor)
        raise KeyboardInterrupt

    with written(tmp_path, disk, [b"one"]) as journal, monkeypatch.context() as patch:
        patch.setattr(disk, "sync_data", interrupted)
        with pytest.raises(KeyboardInterrupt):
            journal.write([(b"taken back", b"")])
    disk.cut_power()
    journal, after = opened(tmp_path, disk)
    journal.close()
    assert after == [b"one"]


def test_only_syncing_would_lose_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated disk can show the loss: this is what happens where the tail is synced but not written again."""
    monkeypatch.setattr(Segment, "rewrite_tail", Segment.sync)
    disk = SimulatedDisk()
    failing(tmp_path, disk, [b"one"])
    disk.restart()
    journal, believed = opened(tmp_path, disk)
    journal.close()
    assert b"failed" in believed
    disk.cut_power()
    journal, after = opened(tmp_path, disk)
    journal.close()
    assert after == [b"one"]
