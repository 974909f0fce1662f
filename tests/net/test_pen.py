"""The thread that writes the journal: the same bytes as the ordinary way, and nothing is taken for written."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import random
import resource
import signal
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aflock.net import pen
from aflock.net.commits import Commits
from aflock.net.journal import Journal, JournalFailed
from aflock.net.pen import Pen
from aflock.net.refusals import Refused
from aflock.net.segment import IOV_MAX, Buffer, Writing, entry
from aflock.net.store import Store, snapshots

from .test_journal import contents, opened
from .test_store import begun


def body(draws: random.Random) -> Buffer:
    """Of one of the kinds there are."""
    raw = draws.randbytes(draws.choice([0, 1, 7, 100, 5_000]))
    kinds: list[Callable[[bytes], Buffer]] = [
        bytes,
        bytearray,
        lambda raw: memoryview(bytearray(raw)),
        lambda raw: np.frombuffer(bytearray(raw), np.uint8).data if raw else b"",
    ]
    return draws.choice(kinds)(raw)


def with_a_pen(play: Callable[[Pen], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        with closing(Pen()) as made:
            return await play(made)

    return asyncio.run(main())


async def written(writer: Pen, journal: Journal, batch: list[tuple[bytes, Buffer]]) -> bool:
    writing = journal.plan([entry(*each) for each in batch])
    assert writing is not None
    done = await writer.write(writing)
    if done:
        journal.wrote(writing)
    return done


@contextmanager
def largest_file(most: int) -> Iterator[None]:
    """As if the disk ended there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_it_writes_is_what_the_ordinary_way_writes(tmp_path: Path) -> None:
    draws = random.Random(1)
    batches = [
        [(draws.randbytes(draws.randrange(50)), body(draws)) for _ in range(draws.randint(1, 30))] for _ in range(40)
    ]

    async def play(writer: Pen) -> None:
        with opened(tmp_path)[0] as journal:
            for k, batch in enumerate(batches):
                if k % 3:
                    assert await written(writer, journal, batch)
                else:
                    journal.write(batch)
            assert journal.size == sum(file.stat().st_size for file in tmp_path.glob("*.log"))

    with_a_pen(play)
    flat = [each for batch in batches for each in batch]
    assert contents(tmp_path) == [(k, head, bytes(body)) for k, (head, body) in enumerate(flat, 1)]


def test_what_only_the_ordinary_way_can_do_is_left_to_it(tmp_path: Path) -> None:
    with opened(tmp_path, segment_bytes=10_000)[0] as journal:
        assert journal.plan([]) is None
        assert journal.plan([entry(b"", b"")] * (IOV_MAX // 2 + 1)) is None
        assert journal.plan([entry(b"", bytes(9_000))]) is not None
        journal.write([(b"", bytes(9_000))])
        assert journal.plan([entry(b"", bytes(2_000))]) is None  # another segment


def test_a_disk_that_ends_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    async def play(writer: Pen) -> None:
        with opened(tmp_path)[0] as journal:
            assert await written(writer, journal, [(b"1", b"one")])
            with largest_file(journal.size + 500):
                assert not await written(writer, journal, [(b"2", bytes(1_000))])
            assert await written(writer, journal, [(b"2", b"two")])

    with_a_pen(play)
    assert contents(tmp_path) == [(1, b"1", b"one"), (2, b"2", b"two")]


def test_a_file_that_is_none() -> None:
    reading, writing = os.pipe()
    try:
        for descriptor in (writing, 10**6):
            assert not with_a_pen(partial(Pen.write, writing=Writing(descriptor, [b"head"], [b"body"], 0, 8, 0, 0)))
    finally:
        os.close(reading)
        os.close(writing)


def test_a_full_disk_is_refused_and_goes_on_by_itself(tmp_path: Path) -> None:
    async def play(store: Store) -> None:
        commits = Commits(store, on_write=lambda *_: None, on_settled=lambda: None, pen=Pen())
        assert await commits.submit("pull", name="alice") is not None
        with largest_file(store.journal.size + 20):
            with pytest.raises(Refused, match="the server's disk is full"):
                await commits.submit("pull", name="alice")
            states = [commits.full]
        assert await commits.submit("pull", name="alice") is not None
        assert [*states, commits.full] == [True, False]
        await commits.close()

    with closing(begun(tmp_path)) as store:
        before = store.journal.next
        asyncio.run(play(store))
        assert store.journal.next == before + 2
    with closing(begun(tmp_path)) as again:
        assert again.federation.counts.pulls == 2


def test_a_sync_that_fails_is_no_write_that_fails() -> None:
    """Such a file takes everything and syncs nothing."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
            with_a_pen(partial(Pen.write, writing=Writing(descriptor, [b"head"], [b"body"], 0, 8, 0, 0)))
    finally:
        os.close(descriptor)


def test_after_a_failed_sync_the_server_takes_nothing_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(store: Store) -> None:
        commits = Commits(store, on_write=lambda *_: None, on_settled=lambda: None, pen=Pen())
        assert await commits.submit("pull", name="alice") is not None
        segment = store.journal._segment
        with monkeypatch.context() as patched:
            patched.setattr(segment, "_descriptor", descriptor)
            with pytest.raises(Refused, match="it must be started again"):
                await commits.submit("pull", name="alice")
        assert isinstance(commits.failed, JournalFailed)
        await commits.close()

    descriptor = os.open(os.devnull, os.O_RDWR)
    with closing(begun(tmp_path)) as store:
        asyncio.run(play(store))
    os.close(descriptor)
    assert not snapshots(tmp_path)
    with closing(begun(tmp_path)) as again:
        assert again.federation.counts.pulls == 1


def test_without_its_thread_the_journal_is_written_in_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError

    async def play(store: Store) -> None:
        commits = Commits(store, on_write=lambda *_: None, on_settled=lambda: None, pen=Pen())
        for _ in range(3):
            assert await asyncio.wait_for(commits.submit("pull", name="alice"), 10) is not None
        await commits.close()

    monkeypatch.setattr(pen, "_serve", fails)
    with closing(begun(tmp_path)) as store:
        asyncio.run(play(store))
        assert store.federation.counts.pulls == 3
    assert "written in the ordinary way" in caplog.text


def test_a_system_that_gives_no_more_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    real, given = os.eventfd, list[int]()

    def few(*arguments: int) -> int:
        if given:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        given.append(real(*arguments))
        return given[0]

    async def main() -> Pen | None:
        return pen.pen()

    monkeypatch.setattr(os, "eventfd", few)
    assert asyncio.run(main()) is None
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(given[0])


def test_signals_do_not_disturb_it(tmp_path: Path) -> None:
    rung: list[int] = []

    async def play(writer: Pen) -> None:
        with opened(tmp_path)[0] as journal:
            while journal.next <= 300:
                batch: list[tuple[bytes, Buffer]] = [(b"x", bytes(20_000))]
                if not await written(writer, journal, batch):  # a write may be broken off; the ordinary way goes on
                    journal.write(batch)

    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        with_a_pen(play)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rung
    assert contents(tmp_path) == [(k, b"x", bytes(20_000)) for k in range(1, 301)]


def test_what_is_being_written_stays_in_memory_though_nobody_waits(tmp_path: Path) -> None:
    async def play(writer: Pen) -> None:
        with opened(tmp_path)[0] as journal:
            array = np.full(1 << 20, 7, np.uint8)
            alive = weakref.ref(array)
            task = asyncio.create_task(written(writer, journal, [(b"", array.data)]))
            await asyncio.sleep(0)  # the order is given
            task.cancel()
            del array
            await asyncio.gather(task, return_exceptions=True)
            del task
            gc.collect()
            held = alive() is not None or writer._held is None  # unless it was faster than this
            while writer._held is not None:
                await asyncio.sleep(0.001)
            gc.collect()
            assert held
            assert alive() is None

    with_a_pen(play)


def test_it_leaves_nothing_behind() -> None:
    async def nothing(writer: Pen) -> None:
        pass

    with_a_pen(nothing)
    descriptors, threads = os.listdir("/proc/self/fd"), threading.active_count()
    for _ in range(5):
        with_a_pen(nothing)
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    assert threading.active_count() == threads


def test_a_system_without_such_counters_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pen, "_POSSIBLE", False)
    pen.warm()
    assert pen.pen() is None
