"""Replay: applies all records of a journal again, from the beginning or the oldest snapshot, and checks the result.

The journal holds the clients' vectors, so the model must be the same as in the newest snapshot, bit for bit, and the
events must be those of the trace, line by line. The server must be stopped, because the journal is locked for one
process at a time. If the server was killed, the journal may hold records whose lines are not in the trace; the next
start of the server writes them.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ... import state
from ...errors import InputError, StateError
from ...types import Vector
from ..federation.federation import Federation
from ..protocol.refusals import Refused
from .applying import Applying
from .configuration import Configuration
from .data_folder import snapshots
from .journal import JournalReader


def replay(trace: Path, settings: Configuration) -> dict[str, Any]:
    """Replays the journal beside a trace; returns the result, and whether the newest snapshot and the trace agree.

    It changes nothing in the folder.
    """
    folder = trace.parent
    w0, kept, lines = settings.start().w0, snapshots(folder), list[dict[str, Any]]()
    federation = settings.federation(w0, lambda event: lines.append(event.line()))
    with JournalReader(folder / "journal") as journal, TemporaryDirectory() as temporary:
        seq, begin = (0, 0) if journal.oldest == 1 or not kept else _load(federation, kept[-1])
        from_version, records = federation.version, 0
        checkpoint = Path(temporary) / "state"
        restore = partial(_restore, federation, checkpoint, kept[-1] if seq else None, w0)
        applying = Applying(federation, lines, restore, journal.read_again)
        applying.seq = seq
        newest, model = _newest(settings, kept, w0)
        # Nothing to compare if there is no snapshot, or if the newest one is the one that the replay begins with: no
        # record is left to lead to it. Otherwise the loop below compares when it has applied the snapshot's record.
        agrees = newest in (0, seq)
        for record in journal.read(after=seq):
            records += 1
            with suppress(Refused):
                applying.apply(json.loads(record.head), record.body)
            if applying.failed:  # after the next failure, the state is rebuilt from here and not from the beginning
                state.save(checkpoint, {"seq": record.seq, "state": federation.state_dict()})
                applying.failed = False
            if record.seq == newest:
                agrees = federation.model.tobytes() == model.tobytes()
        was_stopped = journal.following - 1 == newest
    return {
        "from_version": from_version,
        "version": federation.version,
        "records": records,
        "updates": federation.counts.updates,
        "model_sha256": hashlib.sha256(federation.model.tobytes()).hexdigest(),
        "agrees": agrees and _agree(_lines(trace, begin), lines, complete=was_stopped),
    }


def _load(federation: Federation, snapshot: Path) -> tuple[int, int]:
    """Loads a snapshot; returns the seq of its record and the bytes of the trace at that time."""
    saved = state.load(snapshot)
    federation.load_state_dict(saved["state"])
    return int(saved["seq"]), int(saved["trace"])


def _restore(federation: Federation, checkpoint: Path, snapshot: Path | None, w0: Vector) -> int:
    """Restores the checkpoint, or the snapshot the replay began with (None: w^0); returns the seq of its record."""
    file = checkpoint if checkpoint.is_file() else snapshot
    saved = None if file is None else state.load(file)
    federation.restore(saved and saved["state"], lambda: w0)
    return int(saved["seq"]) if saved else 0


def _newest(settings: Configuration, kept: list[Path], w0: Vector) -> tuple[int, Vector]:
    """The seq and the model of the newest sound snapshot; 0 and w^0 if there is none."""
    for snapshot in kept:
        federation = settings.federation(w0)
        with suppress(StateError):
            return _load(federation, snapshot)[0], federation.model
    return 0, w0


def _lines(trace: Path, begin: int) -> list[dict[str, Any]]:
    """The whole lines of a trace from the byte `begin` on."""
    with open(trace, "rb") as file:
        file.seek(begin)
        try:
            return [json.loads(line) for line in file if line.endswith(b"\n")]
        except ValueError:
            raise InputError(f"{trace} is not a trace: one of its lines is not JSON") from None


def _agree(trace: list[dict[str, Any]], events: list[dict[str, Any]], *, complete: bool) -> bool:
    """Whether the lines of a trace are the events; unless it must be `complete`, the last ones may be missing."""
    return trace == (events if complete else events[: len(trace)])
