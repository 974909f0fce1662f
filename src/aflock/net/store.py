"""A federation on disk: what was acknowledged is there after any crash.

    fed/federation.toml      the resolved file it was started with
    fed/journal/             everything that happened since the oldest snapshot (or since ever, with `archive`)
    fed/snapshot-*           the whole state at some record of the journal
    fed/trace.jsonl          one line per event, made from the journal
    fed/model.safetensors    the model at the last snapshot

Start-up is the newest snapshot that can be read, and the journal from there on. The trace is cut back to where it was
at that snapshot and written again from the journal, so that it always tells what the journal does.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path

from .. import config, state
from ..errors import StateError
from ..events import Event, moment
from ..files import write_whole
from ..types import State, Vector
from . import weights
from .federation import Federation, Head
from .journal import Journal
from .refusals import Refused
from .segment import Entry, Writing, entry
from .settings import LASTING, Settings
from .trace import Trace
from .wire import Buffer, UpdateHead

log = logging.getLogger("aflock.server")

_encode = json.JSONEncoder(separators=(",", ":")).encode

MEGABYTE = 1 << 20
_TRACED = 1 << 12
"""Records after which a long recovery hands the lines of the trace on."""
OUTGROWN = 6
"""How many times as large as a snapshot the journal grows before the next one."""


class Store:
    """The folder of one federation, open for one server."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self.settings = folder, settings
        self._server = settings.section("server")
        self._since = 0
        """Bytes of journal since the last snapshot."""
        self._state_bytes = 0
        """Of the last snapshot."""
        self.journal = Journal(folder / "journal")  # from here on the folder is this server's alone
        self._events: list[Event] = []
        """Those whose lines are not in the trace yet."""
        self._trace: Trace | None = None
        try:
            self._check_settings()
            self._clean_up()
            start = settings.start()
            self.judge = start.judge
            self.federation = Federation(settings, start.w0, self._events.append)
            self.recovered = self._recover(start.w0)
        except BaseException:
            self.close()
            raise

    # -- starting ---------------------------------------------------------------------------------------------------

    def _check_settings(self) -> None:
        """Refuses to go on with another rule or model than the federation began with."""
        file = self.folder / "federation.toml"
        if file.is_file():
            kept = config.read(file, "aflock serve --example")
            began = Settings.build({name: kept[name] for name in LASTING if name in kept}).lasting()
            for section, values in self.settings.lasting().items():
                if began[section] != values:
                    changed = [key for key in values if began[section].get(key) != values[key]]
                    raise StateError(
                        f"[{section}] {', '.join(changed) or 'name'} is not what this federation was begun with (see "
                        f"{file}); put it back, or begin another federation in another folder"
                    )

    def _keep_settings(self) -> None:
        """From now on the federation is what it was begun with."""
        write_whole(self.folder / "federation.toml", self.settings.text())
        (self.folder / "federation.toml").chmod(0o600)

    def _clean_up(self) -> None:
        """Removes what a server that was killed had not finished."""
        for leftover in self.folder.glob(".snapshot-*"):
            leftover.unlink()

    def _recover(self, w0: Vector) -> int:
        """The newest snapshot and the journal from there on; how many records that were."""
        damaged: list[Path] = []
        seq, length = self._load_newest(w0, damaged)
        records = self.journal.recover(after=seq)
        first = list(islice(records, 1))  # without the records after the snapshot, nothing is touched
        told = _size(self.folder / "trace.jsonl")
        self._trace = Trace(self.folder / "trace.jsonl", length, self._events)
        count = 0
        for count, record in enumerate(chain(first, records), 1):
            self._apply(json.loads(record.head), record.body)
            self._since += len(record.head) + len(record.body)
            if count % _TRACED == 0:
                self._trace.flush()
        for file in damaged:  # it goes without them; they must not count among those that are kept
            file.rename(file.with_suffix(".damaged"))
        self._keep_settings()
        if not self.federation.id:
            self._found()
        elif self.federation.terms != self.settings.terms():
            self._change_terms()
        self._trace.flush()
        if self._trace.end + self._trace.waiting < told:
            log.error(
                "trace.jsonl told of more than the journal holds: acknowledged updates are lost; restore a backup"
            )
        return count

    def _load_newest(self, w0: Vector, damaged: list[Path]) -> tuple[int, int]:
        """The record of the newest snapshot that can be read, and how long the trace was then."""
        for file in snapshots(self.folder):
            try:
                saved = state.load(file)
                self.federation.load_state_dict(saved["state"])
            except StateError as error:
                log.warning("%s cannot be used, taking an older one: %s", file.name, error)
                damaged.append(file)
                self.federation = Federation(self.settings, w0, self._events.append)
                continue
            self._state_bytes = file.stat().st_size
            return int(saved["seq"]), int(saved["trace"])
        return 0, 0

    def _found(self) -> None:
        """The first record: a name for the federation, and when it began."""
        model = sha256(self.federation.model.data).hexdigest()
        head: Head = {"k": "open", "t": 0.0, "id": secrets.token_hex(16), "epoch": time.time(), "model": model}
        self._record({**head, "terms": list(self.settings.terms())})

    def _change_terms(self) -> None:
        """The file says something else about the end than it did: from now on, not for what has happened."""
        was = self.federation.ended
        self._record({"k": "terms", "t": self.now(), "terms": list(self.settings.terms())})
        if was and not self.federation.ended:
            log.info("the federation, which had ended (%s), goes on", was)

    def _record(self, head: Head) -> None:
        self.journal.write([entry(encoded(head))])
        self._apply(head, b"")

    # -- going on ---------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds since the federation began; it never runs backwards, whatever the machine's clock does."""
        return max(self.federation.now, time.time() - self.federation.epoch)

    def write(self, entries: Sequence[Entry]) -> None:
        """Makes records durable, all or none; may be called from another thread."""
        before = self.journal.written
        self.journal.write(entries)
        self._since += self.journal.written - before

    def _apply(self, head: Head, body: Buffer) -> None:
        with suppress(Refused):  # as it was then
            self.federation.apply(head, body)

    def tell(self, least: int = 1) -> None:
        """Hands the trace to the system if that many events have not been told yet."""
        assert self._trace is not None
        if len(self._events) >= least:
            self._trace.flush()

    def plan(self, entries: Sequence[Entry]) -> Writing | None:
        """What `write` would do, for somebody else to do it; None if only `write` can."""
        return self.journal.plan(entries)

    def wrote(self, writing: Writing) -> None:
        """It is on the disk."""
        self._since += self.journal.wrote(writing)

    @property
    def snapshot_due(self) -> bool:
        """Whether the journal has grown enough: a large state is not written over and over."""
        return bool(self._since >= max(self._server.snapshot * MEGABYTE, OUTGROWN * self._state_bytes))

    def snapshot(self) -> None:
        """Saves everything; `tidy` then lets go of what nobody needs any more."""
        trace = self._trace
        assert trace is not None
        self._since = 0  # a full disk is not asked again after every batch
        trace.sync()
        seq = self.journal.next - 1
        saved: State = {"seq": seq, "trace": trace.end, "state": self.federation.state_dict()}
        file = self.folder / f"snapshot-{seq:016d}.safetensors"
        state.save(file, saved)
        file.chmod(0o600)
        self._state_bytes = file.stat().st_size
        self.export(self.folder / "model.safetensors")
        self.journal.rotate()  # what is written from now on is not in the snapshot; the rest can go one day

    def tidy(self) -> None:
        """Deletes what is older than the snapshots that are kept; records may be written meanwhile."""
        kept, most = snapshots(self.folder), self._server.snapshots
        for old in kept[most:]:
            old.unlink()
        if not self._server.archive and len(kept) >= most:
            self.journal.forget(_seq(kept[most - 1]))

    def export(self, file: Path) -> None:
        """The current model."""
        federation = self.federation
        weights.save(file, federation.model, version=federation.version, federation=federation.id)
        file.chmod(0o600)

    def close(self) -> None:
        """Lets go of the folder."""
        self.journal.close()
        if self._trace is not None:
            self._trace.close()
            self._trace = None


def snapshots(folder: Path) -> list[Path]:
    """The snapshots of a federation, newest first."""
    return sorted(folder.glob(f"snapshot-{'[0-9]' * 16}.safetensors"), reverse=True)


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def _seq(snapshot: Path) -> int:
    return int(snapshot.stem.removeprefix("snapshot-"))


def encoded(head: Head) -> bytes:
    """A record's head as it stands in the journal."""
    return _encode(head).encode()


def update_record(now: float, name: str, job: int, head: UpdateHead, more: bool) -> tuple[Head, bytes]:
    """The record of an update, also encoded: several times as fast as through `json`."""
    version, steps, examples, vectors, encoding = head
    names, following = '","'.join(vectors), int(more)  # names of clients and vectors need no escapes
    text = (
        f'{{"k":"update","t":{moment(now)},"name":"{name}","j":{job},"v":{version},"s":{steps},"e":{examples},'
        f'"n":["{names}"],"enc":"{encoding}","next":{following}}}'
    )
    record = {
        "k": "update", "t": now, "name": name, "j": job, "v": version, "s": steps, "e": examples,
        "n": vectors, "enc": encoding, "next": following,
    }  # fmt: skip
    return record, text.encode()
