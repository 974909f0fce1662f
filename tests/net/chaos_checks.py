"""What must be true after a storm: every acknowledged update is in the journal once and was applied once."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aflock import state
from aflock.net.commands.replay import replay
from aflock.net.federation.federation import Federation
from aflock.net.protocol.refusals import Refused
from aflock.net.server.settings import Settings
from aflock.net.storage import model_file as weights
from aflock.net.storage.data_folder import snapshots
from aflock.net.storage.journal import Journal
from aflock.types import State
from tests.net.chaos_actors import Acknowledged

Line = dict[str, Any]


@dataclass(frozen=True)
class Numbers:
    """What there was to check."""

    acknowledged: int
    """Different updates some client knows to be taken."""
    arrivals: int
    """Updates that were taken."""
    records: int
    """In the journal as it is now."""
    versions: int
    lost: int
    """Jobs that were dropped because their client asked again, or because their lease ran out."""
    late: int
    """The latter."""


def check(folder: Path, acknowledged: Iterable[Acknowledged], *, archive: bool) -> Numbers:
    """Raises an AssertionError if anything is amiss; the server must be stopped."""
    told = _agreed(acknowledged)
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_bytes().splitlines()]
    arrivals = _check_trace(lines)
    saved = state.load(snapshots(folder)[0])
    _check_receipts(told, arrivals, saved)
    records = _check_journal(folder, told, arrivals, from_the_start=archive)
    _check_replay(folder, saved, from_the_start=archive)
    _check_tidiness(folder, archive=archive)
    counts = saved["state"]["federation"]["counts"]
    assert sum(counts[outcome] for outcome in ("applied", "buffered", "rejected")) == len(arrivals)
    lost = Counter(line["reason"] for line in lines if line["kind"] == "drop")
    return Numbers(len(told), len(arrivals), records, lines[-1]["server"], lost.total(), lost["lease ran out"])


def check_memories(folder: Path, memories: Iterable[Path]) -> None:
    """What the server adds up is what the clients believe to have told it."""
    federation = _loaded(folder)
    total: Any = federation.strategy.total  # type: ignore[attr-defined]
    told = [state.load(memory / "memory.safetensors")["memory"]["told gradient"] for memory in memories]
    assert len(told) == len(federation.clients)
    np.testing.assert_allclose(total, np.sum(told, axis=0), rtol=0, atol=1e-6 * float(np.abs(told).max()))


def _agreed(acknowledged: Iterable[Acknowledged]) -> dict[int, Acknowledged]:
    """By job: whoever is told twice is told the same, and no job belongs to two clients."""
    told: dict[int, Acknowledged] = {}
    for one in acknowledged:
        assert told.setdefault(one.job, one) == one, f"job {one.job} was answered in two ways: {told[one.job]}, {one}"
    return told


def _check_trace(lines: list[Line]) -> dict[int, Line]:
    """Every job is given once and ends at most once; time and versions never run backwards. The arrivals, by job."""
    kinds = ("pull", "arrival", "drop", "leave")
    seen = {kind: Counter(line["job"] for line in lines if line["kind"] == kind and "job" in line) for kind in kinds}
    assert set(seen["pull"].values()) <= {1}, "a job was given twice"
    ends = seen["arrival"] + seen["drop"] + seen["leave"]
    assert set(ends.values()) <= {1}, "a job ended twice"
    assert set(ends) <= set(seen["pull"]), "a job ended that was never given"
    assert sorted(seen["pull"]) == list(range(len(seen["pull"]))), "the numbers of the jobs have gaps"
    for name in ("time", "server"):
        values = [line[name] for line in lines]
        assert values == sorted(values), f"{name} runs backwards"
    assert sum(line["kind"] == "start" for line in lines) == 1
    return {line["job"]: line for line in lines if line["kind"] == "arrival"}


def _check_receipts(told: Mapping[int, Acknowledged], arrivals: Mapping[int, Line], saved: State) -> None:
    """What was acknowledged was applied, and as it was acknowledged."""
    numbers = {seat[0]: seat[1] for seat in saved["state"]["federation"]["seats"]}
    for job, one in told.items():
        assert job in arrivals, f"acknowledged but never applied: {one}"
        line = arrivals[job]
        applied = (line["client"], line["outcome"], line["staleness"], line["server"])
        assert applied == (numbers[one.client], one.outcome, one.staleness, one.version), (line, one)


def _check_journal(
    folder: Path, told: Mapping[int, Acknowledged], arrivals: Mapping[int, Line], *, from_the_start: bool
) -> int:
    """Every update is in the journal once, with the bytes its client sent; how many records there are."""
    found: Counter[int] = Counter()
    records = 0
    with Journal(folder / "journal") as journal:
        oldest = 0 if from_the_start else int(state.load(snapshots(folder)[-1])["seq"])
        for record in journal.read(after=oldest):
            records += 1
            head = json.loads(record.head)
            if head["k"] != "update" or head["j"] not in arrivals:  # or: it came for a job that was dropped meanwhile
                continue
            found[head["j"]] += 1
            one = told.get(head["j"])
            if one is not None:
                assert (head["name"], hashlib.sha256(record.body).hexdigest()) == (one.client, one.sha256), one
    assert set(found.values()) <= {1}, "an update is in the journal twice"
    if from_the_start:
        assert set(found) == set(arrivals), "the journal and the trace tell of different updates"
    return records


def _check_replay(folder: Path, saved: State, *, from_the_start: bool) -> None:
    """The journal lived through again ends where the server did: the model, and everything else it knew."""
    lived = replay(folder / "trace.jsonl")
    assert lived["agrees"], "the journal tells another story than the trace"
    model = weights.flat(folder / "model.safetensors")
    assert lived["model_sha256"] == hashlib.sha256(model.tobytes()).hexdigest(), "the model is not that of the replay"
    again = _lived(folder, from_the_start=from_the_start)
    _check_same(saved["state"], _as_saved(folder, again.state_dict()), "state")


def _check_tidiness(folder: Path, *, archive: bool) -> None:
    """Kills leave nothing behind that grows."""
    assert not list(folder.glob(".snapshot-*"))
    assert len(snapshots(folder)) <= 2
    segments = list((folder / "journal").glob("journal-*.log"))
    assert archive or len(segments) <= 3, [segment.name for segment in segments]


def _federation(folder: Path) -> Federation:
    settings = Settings.read(folder / "federation.toml")
    return settings.federation(settings.start().w0)


def _loaded(folder: Path, snapshot: int = 0) -> Federation:
    federation = _federation(folder)
    federation.load_state_dict(state.load(snapshots(folder)[snapshot])["state"])
    return federation


def _lived(folder: Path, *, from_the_start: bool) -> Federation:
    """The federation after its last record, from the beginning or from the oldest snapshot."""
    federation = _federation(folder) if from_the_start else _loaded(folder, -1)
    seq = 0 if from_the_start else int(state.load(snapshots(folder)[-1])["seq"])
    with Journal(folder / "journal") as journal:
        for record in journal.read(after=seq):
            with suppress(Refused):
                federation.apply(json.loads(record.head), record.body)
    return federation


def _as_saved(folder: Path, found: State) -> State:
    """A state as it comes out of a file."""
    file = folder.with_name("again.safetensors")
    state.save(file, found)
    return state.load(file)


def _check_same(one: Any, other: Any, where: str) -> None:
    if isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray), where
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), where
    elif isinstance(one, dict):
        assert isinstance(other, dict), where
        assert one.keys() == other.keys(), where
        for key in one:
            _check_same(one[key], other[key], f"{where}/{key}")
    else:
        assert one == other, (where, one, other)
