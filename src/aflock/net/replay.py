"""A federation lived through again: from its oldest snapshot, or from the beginning, to the last record of its journal.

The vectors are those of the journal, so the model must come out the same, bit for bit; and what happens on the way must
be what the trace says, line by line. The server must be stopped: the journal belongs to one process at a time.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import state
from ..errors import InputError
from .federation import Federation
from .journal import Journal
from .refusals import Refused
from .settings import Settings
from .store import snapshots


def replay(trace: Path) -> dict[str, Any]:
    """What came of it, beside what the newest snapshot and the trace say."""
    folder = trace.parent
    settings = Settings.read(folder / "federation.toml")
    lines: list[dict[str, Any]] = []
    w0 = settings.start().w0
    federation = Federation(settings, w0, lambda event: lines.append(event.line()))
    kept = snapshots(folder)
    seq, begin = 0, 0
    if kept and not settings.section("server").archive:
        saved = state.load(kept[-1])
        federation.load_state_dict(saved["state"])
        seq, begin = int(saved["seq"]), int(saved["trace"])
    since, records, checked = federation.version, 0, True
    newest = _newest(settings, kept, w0)
    with Journal(folder / "journal") as journal:
        for record in journal.recover(after=seq):
            records += 1
            with suppress(Refused):
                federation.apply(json.loads(record.head), record.body)
            if newest is not None and record.seq == newest[0]:
                checked = bool((federation.model == newest[1]).all())
    return {
        "from_version": since,
        "version": federation.version,
        "records": records,
        "updates": federation.counts.updates,
        "model_sha256": hashlib.sha256(federation.model.tobytes()).hexdigest(),
        "agrees": checked and _told(trace, begin) == lines,
    }


def _newest(settings: Settings, kept: list[Path], w0: Any) -> tuple[int, Any] | None:
    """The record of the newest snapshot, and the model in it."""
    if not kept:
        return None
    saved = state.load(kept[0])
    federation = Federation(settings, w0)
    federation.load_state_dict(saved["state"])
    return int(saved["seq"]), federation.model


def _told(trace: Path, begin: int) -> list[dict[str, Any]]:
    """The whole lines of a trace from a place on."""
    with open(trace, "rb") as file:
        file.seek(begin)
        try:
            return [json.loads(line) for line in file if line.endswith(b"\n")]
        except ValueError:
            raise InputError(f"{trace} is not a trace: a line is not JSON") from None
