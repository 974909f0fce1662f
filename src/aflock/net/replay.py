"""A federation lived through again: from the beginning, or its oldest snapshot, to the last record of its journal.

The vectors are those of the journal, so the model must come out the same, bit for bit; and what happens on the way must
be what the trace says, line by line. The server must be stopped: the journal belongs to one process at a time. If it
was killed, the journal may know more than the trace; the next start of the server makes that good.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import state
from ..errors import InputError
from ..types import Vector
from .federation import Federation
from .journal import Journal
from .refusals import Refused
from .settings import Settings
from .store import snapshots


def replay(trace: Path) -> dict[str, Any]:
    """What came of it, beside what the newest snapshot and the trace say."""
    folder = trace.parent
    settings = Settings.read(folder / "federation.toml")
    w0, kept, lines = settings.start().w0, snapshots(folder), list[dict[str, Any]]()
    federation = Federation(settings, w0, lambda event: lines.append(event.line()))
    with Journal(folder / "journal") as journal:
        seq, begin = (0, 0) if journal.oldest == 1 or not kept else _load(federation, kept[-1])
        since, records = federation.version, 0
        newest, there = _newest(settings, kept, w0)
        agrees = newest in (0, seq)
        for record in journal.recover(after=seq):
            records += 1
            with suppress(Refused):
                federation.apply(json.loads(record.head), record.body)
            if record.seq == newest:
                agrees = federation.model.tobytes() == there.tobytes()
        was_stopped = journal.next - 1 == newest
    return {
        "from_version": since,
        "version": federation.version,
        "records": records,
        "updates": federation.counts.updates,
        "model_sha256": hashlib.sha256(federation.model.tobytes()).hexdigest(),
        "agrees": agrees and _agree(_told(trace, begin), lines, whole=was_stopped),
    }


def _load(federation: Federation, snapshot: Path) -> tuple[int, int]:
    """The record of a snapshot, and how long the trace was then."""
    saved = state.load(snapshot)
    federation.load_state_dict(saved["state"])
    return int(saved["seq"]), int(saved["trace"])


def _newest(settings: Settings, kept: list[Path], w0: Vector) -> tuple[int, Vector]:
    """The record of the newest snapshot, and the model in it."""
    if not kept:
        return 0, w0
    federation = Federation(settings, w0)
    return _load(federation, kept[0])[0], federation.model


def _told(trace: Path, begin: int) -> list[dict[str, Any]]:
    """The whole lines of a trace from a place on."""
    with open(trace, "rb") as file:
        file.seek(begin)
        try:
            return [json.loads(line) for line in file if line.endswith(b"\n")]
        except ValueError:
            raise InputError(f"{trace} is not a trace: a line is not JSON") from None


def _agree(told: list[dict[str, Any]], lived: list[dict[str, Any]], *, whole: bool) -> bool:
    """Whether a trace tells what was lived; one that need not be `whole` may break off."""
    return told == (lived if whole else lived[: len(told)])
