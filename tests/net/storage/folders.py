"""A federation's folder with one member, and records that are written to it and happen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from aflock.net.federation.federation import Given
from aflock.net.server.settings import Settings
from aflock.net.storage.data_folder import DataFolder, encoded
from aflock.net.storage.segment import entry

LENGTH = 1000


def settings(strategy: dict[str, Any] | None = None, budget: dict[str, int] | None = None, **server: Any) -> Settings:
    return Settings.build(
        {
            "strategy": strategy or {"name": "asgd"},
            "model": {"name": "vector", "length": LENGTH},
            "federation": {"clients": 1},
            "budget": budget or {},
            "server": server,
        }
    )


def begun(folder: Path, **other: Any) -> DataFolder:
    """A federation with one member."""
    made = DataFolder(folder, settings(**other))
    let(made, "hello", name="alice", gen=1)
    return made


def let(store: DataFolder, kind: str, body: bytes = b"", **head: Any) -> Any:
    """A record is written and happens."""
    record = {"k": kind, "t": store.now(), **head}
    store.write([entry(encoded(record), body)])
    happened = store.federation.apply(record, body)
    store.write_trace()
    return happened


def work(store: DataFolder, jobs: int = 1) -> None:
    for _ in range(jobs):
        given: Given = let(store, "pull", name="alice")
        gradient, names = np.full(LENGTH, given.id, np.float32), list(store.federation.strategy.needs)
        let(
            store, "update", gradient.tobytes(),
            name="alice", j=given.id, v=given.job.version, s=1, e=1, n=names, enc="float32", next=0,
        )  # fmt: skip


def save_often(store: DataFolder, times: int) -> None:
    """Two jobs before each snapshot."""
    for _ in range(times):
        work(store, 2)
        store.snapshot()
        store.delete_old()


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


HOLDING = {"name": "fedbuff", "buffer": 4}
