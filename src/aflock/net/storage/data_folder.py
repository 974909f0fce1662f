"""The data folder of a federation: every update that was acknowledged is there after any crash.

    fed/federation.toml      the resolved file that the federation was begun with
    fed/journal/             all records since the oldest snapshot (with `archive`, since the beginning)
    fed/snapshot-*           the whole state at one record of the journal
    fed/trace.jsonl          one line per event, made from the journal
    fed/model.safetensors    the model at the last snapshot

A start takes these steps, in this order:

    1. lock the folder, and check that the federation file has the rule and the model of the kept one
    2. load the newest sound snapshot
    3. apply the journal records after it, and compare the events they cause with the lines of the trace
    4. stop if updates were lost, unless the operator accepts that
    5. only now change the folder: cut off a torn batch, delete leftovers, write the lines that the trace lacks
    6. write the records that the start itself makes: open, terms, loss

A trace line is written after its record is durable. So an update that is in the trace and not in the journal was
acknowledged and is lost. `DataFolder` then raises `LostUpdates` at step 4, before it has changed anything, so that the
operator can restore a backup. With `--accept-loss` it goes on, and a record of the journal says so.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from ... import config, state
from ...config import ConfigError
from ...errors import NewerFormat, StateError
from ...events import Event
from ...system.files import PRIVATE, remove_leftovers, write_whole
from ...system.words import counted
from ...types import State, Vector
from ..federation.federation import RULES, RecordHead
from ..protocol.refusals import Refused
from ..protocol.wire import BytesLike
from . import model_file
from .applying import Applying
from .configuration import Configuration
from .journal import Journal
from .segment import JournalEntry, entry
from .trace import TraceComparison, TraceFile

log = logging.getLogger("aflock.server")

_encode = json.JSONEncoder(separators=(",", ":")).encode

MEGABYTE = 1 << 20
_JOBS_WITHOUT_LINE = 1_000_000
"""More jobs than a server can have given out whose lines were not yet in the trace when the journal was lost."""
_NAMED = 3
"""How many of the first and of the last lost updates an error names."""
JOURNAL_PER_STATE = 6
"""The next snapshot is made when the journal has grown by this many times the size of the last snapshot.

A large state would otherwise be written too often.
"""


class LostUpdates(StateError):
    """Acknowledged updates are not in the journal; `lost` has the client and the job of each.

    `others` counts what else is lost, by kind: pulls, joins, leaves and the like.
    """

    def __init__(self, folder: Path, lost: list[tuple[str, int]], others: Mapping[str, int]) -> None:
        missing = f"in {folder / 'trace.jsonl'} and not in the journal"
        listed = " and ".join(f"{count} of kind {kind}" for kind, count in sorted(others.items()))
        if lost:
            verb = "is" if len(lost) == 1 else "are"
            what = f"{counted(len(lost), 'acknowledged update')} {verb} {missing} ({_listed(lost)})"
            what += f", nor are {listed}" if listed else ""
        else:
            what = f"{listed} {'is' if sum(others.values()) == 1 else 'are'} {missing}"
        super().__init__(
            f"{what}; restore {folder / 'journal'} from a backup, or go on without them with `aflock serve "
            "--accept-loss`; nothing was changed"
        )
        self.lost = lost


class DataFolder:
    """The data folder of one federation, open for one server.

    `GroupCommit` calls `write`, `snapshot` and `delete_old` in the journal's thread, all else in the event loop.
    """

    def __init__(self, folder: Path, settings: Configuration, *, accept_loss: bool = False) -> None:
        """Opens a folder, and makes it if it does not exist.

        Raises `LostUpdates` if acknowledged updates are missing, unless `accept_loss`.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self.settings = folder, settings
        self._server = settings.section("server")
        self._since = 0
        """Bytes of journal since the last snapshot."""
        self._state_bytes = 0
        """Size of the last snapshot."""
        is_new = not (folder / "journal").exists()
        self.journal = Journal(folder / "journal")  # locks the folder: no other server works in it from here on
        self._events: list[Event] = []
        """The events whose lines are not in the trace yet."""
        self._trace: TraceFile | None = None
        try:
            self._check_settings()
            start = settings.start()
            self.judge = start.judge
            self.federation = settings.federation(start.w0, self._events.append)
            self.applying = Applying(self.federation, self._events, self._restore, self.journal.read_again)
            self.recovered = self._recover(start.w0, accept_loss=accept_loss)
        except BaseException as error:
            self.close()
            if is_new and isinstance(error, LostUpdates):  # this start made the journal folder: leave nothing behind
                (folder / "journal" / "lock").unlink()
                (folder / "journal").rmdir()
            raise

    # -- starting ---------------------------------------------------------------------------------------------------

    def _check_settings(self) -> None:
        """Raises `StateError` if the federation was begun with another rule or model."""
        file = self.folder / "federation.toml"
        if file.exists():
            self.settings.check_continues(kept_settings(file), file)
        elif snapshots(self.folder) or next(iter(self.journal.read(after=0)), None) is not None:
            raise StateError(
                f"{file} is missing, so nothing says what this federation was begun with; {_WAY_OUT}; nothing was "
                "changed"
            )

    def _keep_settings(self) -> None:
        """Writes the federation file into the folder, for the check at the next start."""
        write_whole(self.folder / "federation.toml", self.settings.text(), mode=PRIVATE)

    def _remove_leftovers(self) -> None:
        """Removes the unfinished files of a server that was killed while it wrote them."""
        remove_leftovers(self.folder, "snapshot-*", "federation.toml", "*.safetensors", "address.json", "best.json")

    def _recover(self, w0: Vector, *, accept_loss: bool) -> int:
        """Steps 2 to 6 of a start (see the top of this module); returns how many journal records were applied.

        It changes nothing in the folder before it has read all of the journal and compared it with the trace.
        """
        damaged: list[Path] = []
        seq, length = self._load_newest(w0, damaged)
        self.applying.seq = seq
        with closing(TraceComparison(self.folder / "trace.jsonl", length)) as trace:
            count, accepted = self._apply_journal(seq, trace)
            lost = {job: client for job, client in trace.missing().items() if not _covers(accepted or [], job)}
            # An accepted loss covers the other lines, too: the start that recorded it may have been killed before it
            # could write the trace anew.
            others = Counter[str]() if accepted is not None else trace.missing_others()
        if (lost or others) and not accept_loss:
            raise LostUpdates(self.folder, self._by_name(lost), others)
        self.journal.make_writable()
        self._remove_leftovers()
        for file in damaged:  # a damaged snapshot must not count as one of the `snapshots` that are kept
            file.rename(file.with_suffix(".damaged"))
        self._keep_settings()
        self._trace = TraceFile(self.folder / "trace.jsonl", trace.equal_bytes, trace.lines, self._events)
        if not self.federation.id:
            self._open_federation()
        elif self.federation.terms != self.settings.terms():
            self._change_terms()
        if lost or others:
            self._record_loss(self._by_name(lost), others, trace.next_job)
            self._trace.sync()
        elif accept_loss:
            log.warning("--accept-loss was given, but nothing is missing; start the server without it from now on")
        self._trace.flush()
        return count

    def _apply_journal(self, seq: int, trace: TraceComparison) -> tuple[int, list[list[int]] | None]:
        """Applies the records after `seq`; returns how many, and the jobs whose loss was accepted at earlier starts.

        The latter is None if no loss was accepted since the snapshot.
        """
        count, accepted = 0, None
        for record in self.journal.read(after=seq):
            head = json.loads(record.head)
            self._apply(head, record.body)
            count += 1
            self._since += len(record.head) + len(record.body)
            trace.compare(self._events)
            self._events.clear()
            if head["k"] == "loss":
                accepted = [*(accepted or []), *head.get("jobs", [])]
        return count, accepted

    def _by_name(self, lost: Mapping[int, int]) -> list[tuple[str, int]]:
        """The client's name (its number, if it has left) and the job of each lost update, oldest first."""
        names = {client.number: client.name for client in self.federation.clients.values()}
        return [(names.get(client, f"client {client}"), job) for job, client in sorted(lost.items())]

    def _record_loss(self, lost: list[tuple[str, int]], others: Mapping[str, int], next_job: int) -> None:
        """Writes to the journal that the operator accepts the loss; the numbers of lost jobs are not used again."""
        log.error("going on without %d acknowledged updates that are lost: %s", len(lost), _listed(lost))
        if others:
            listed = ", ".join(f"{count} of kind {kind}" for kind, count in sorted(others.items()))
            log.error("going on without other records that are lost: %s", listed)
        jobs, clients = _ranges(job for _, job in lost), Counter(client for client, _ in lost)
        head: RecordHead = {"k": "loss", "t": self.now(), "count": len(lost), "jobs": jobs, "clients": dict(clients)}
        self._record({**head, "next": next_job + _JOBS_WITHOUT_LINE, "date": time.time()})

    def _load_newest(self, w0: Vector, damaged: list[Path]) -> tuple[int, int]:
        """Loads the newest sound snapshot; returns the seq of its record and the bytes of the trace at that time.

        It adds the damaged ones to `damaged`.
        """
        for file in snapshots(self.folder):
            try:
                saved = state.load(file)
                self.federation.load_state_dict(saved["state"])
            except NewerFormat:
                raise
            except StateError as error:
                log.warning("the snapshot %s cannot be used; the server takes an older one: %s", file.name, error)
                damaged.append(file)
                self.federation.restore(None, lambda: w0)
                continue
            self._state_bytes = file.stat().st_size
            return int(saved["seq"]), int(saved["trace"])
        return 0, 0

    def _restore(self) -> int:
        """Restores the state of the newest sound snapshot, or the one before the first record; returns its seq."""
        for file in snapshots(self.folder):
            with suppress(StateError):
                saved = state.load(file)
                self.federation.restore(saved["state"], lambda: self.settings.start().w0)
                return int(saved["seq"])
        self.federation.restore(None, lambda: self.settings.start().w0)
        return 0

    def _open_federation(self) -> None:
        """Writes the first record: the federation's id, when it began, its terms and the checksum of w^0."""
        model = sha256(self.federation.model.data).hexdigest()
        head: RecordHead = {"k": "open", "t": 0.0, "id": secrets.token_hex(16), "epoch": time.time(), "model": model}
        self._record({**head, "terms": self.settings.terms().record(), "rules": RULES})

    def _change_terms(self) -> None:
        """Writes the terms of a changed federation file to the journal; they hold for all later records."""
        was = self.federation.ended
        self._record({"k": "terms", "t": self.now(), "terms": self.settings.terms().record()})
        if was and not self.federation.ended:
            log.info("the federation, which had ended (%s), goes on", was)

    def _record(self, head: RecordHead) -> None:
        """Writes and applies a record that the start itself makes."""
        self.journal.write([entry(encoded(head))])
        self._apply(head, b"")

    # -- serving ----------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds since the federation began; they never decrease, also if the machine's clock is set back."""
        return max(self.federation.now, time.time() - self.federation.epoch)

    def write(self, entries: Sequence[JournalEntry]) -> None:
        """Makes records durable, all or none; `GroupCommit` calls it in the journal's thread."""
        before = self.journal.written
        self.journal.write(entries)
        self._since += self.journal.written - before

    def _apply(self, head: RecordHead, body: BytesLike) -> None:
        with suppress(Refused):  # a refused record is in the journal, too: it changes nothing
            self.applying.apply(head, body)

    def write_trace(self) -> None:
        """Writes the events that are not in the trace yet."""
        assert self._trace is not None
        if self._events:
            self._trace.flush()

    @property
    def snapshot_due(self) -> bool:
        """Whether the journal has grown enough since the last snapshot.

        After a record at which the rule failed a snapshot is due at once: the next start then begins after that record
        and need not rebuild the state for it (applying.py).
        """
        return self.applying.failed or bool(
            self._since >= max(self._server.snapshot * MEGABYTE, JOURNAL_PER_STATE * self._state_bytes)
        )

    def snapshot(self) -> None:
        """Saves the whole state, the trace and the model; `delete_old` can then delete older snapshots and segments.

        The caller writes and applies no record meanwhile.
        """
        trace = self._trace
        assert trace is not None
        self._since, self.applying.failed = 0, False  # first: on a full disk, not every batch tries a snapshot again
        trace.sync()  # the next start reads the trace only behind the length that the snapshot holds
        seq = self.journal.next - 1
        saved: State = {"seq": seq, "trace": trace.end, "state": self.federation.state_dict()}
        file = self.folder / f"snapshot-{seq:016d}.safetensors"
        state.save(file, saved, mode=PRIVATE)
        self._state_bytes = file.stat().st_size
        self.export(self.folder / "model.safetensors")
        self.journal.rotate()  # segments are deleted whole: none must hold records from before and after a snapshot

    def delete_old(self) -> None:
        """Deletes the snapshots and journal segments that are older than the snapshots to keep."""
        kept, most = snapshots(self.folder), self._server.snapshots
        for old in kept[most:]:
            old.unlink()
        if not self._server.archive and len(kept) >= most:
            self.journal.delete_upto(_seq(kept[most - 1]))

    def export(self, file: Path) -> None:
        """Writes the current model as safetensors."""
        federation = self.federation
        about = {"version": str(federation.version), "federation": federation.id}
        model_file.write(file, federation.model, about, mode=PRIVATE)

    def close(self) -> None:
        """Writes the rest of the trace, closes all files and unlocks the folder."""
        self.journal.close()
        if self._trace is not None:
            self._trace.close()
            self._trace = None


_WAY_OUT = "restore it from a backup, or copy the federation file that the federation was begun with to this path"


def kept_settings(file: Path) -> dict[str, Any]:
    """The federation file that a federation was begun with; raises `StateError` if it is empty or cannot be read."""
    if file.is_file() and not file.read_bytes().strip(b"\0 \t\r\n"):
        raise StateError(f"{file} is empty, so it does not say what this federation was begun with; {_WAY_OUT}")
    try:
        return config.read(file, "aflock serve --example")
    except ConfigError as error:
        raise StateError(f"the file that this federation was begun with cannot be read ({error}); {_WAY_OUT}") from None


def _listed(lost: list[tuple[str, int]]) -> str:
    """The lost updates in words: all of them, or the first and the last few."""
    words = [f"{client}: job {job}" for client, job in lost]
    return ", ".join(words if len(words) <= 2 * _NAMED else [*words[:_NAMED], "...", *words[-_NAMED:]])


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Sorted numbers as [first, last] of each run without a gap."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges


def _covers(ranges: list[list[int]], number: int) -> bool:
    return any(first <= number <= last for first, last in ranges)


def snapshots(folder: Path) -> list[Path]:
    """The snapshot files in a data folder, newest first."""
    return sorted(folder.glob(f"snapshot-{'[0-9]' * 16}.safetensors"), reverse=True)


def _seq(snapshot: Path) -> int:
    return int(snapshot.stem.removeprefix("snapshot-"))


def encoded(head: RecordHead) -> bytes:
    """A record's head as the journal holds it: JSON."""
    return _encode(head).encode()
