"""The folder where data is kept: AFLOCK_DATA, or aflock/ in the user's XDG cache.

A file with a name of its own is complete: `state` writes arrays to a temporary file and renames it. They are read
memory-mapped. A process that makes a file holds its lock meanwhile: the kernel's lock on an open file, which the kernel
frees when the process ends, however it ends, so that no lock is ever stale.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ... import state
from ...errors import AflockError, StateError
from ...system import files
from ...types import State
from .download_progress import DownloadProgress

_MAKING = 1
"""Increase it when derived arrays are computed in another way: their names change, and older files are not used."""


def folder() -> Path:
    """The folder of the cache."""
    own = os.environ.get("AFLOCK_DATA")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "aflock"


def file_of(name: str) -> Path:
    """The file of that name, whether it exists or not."""
    return folder() / f"{name}.safetensors"


def downloads(name: str) -> Path:
    """The folder for downloads of `name` that are not complete."""
    return folder() / ".downloads" / name


def derived(name: str, **settings: Any) -> str:
    """The name of the arrays that are computed from `name` with these settings; other settings give another name."""
    text = json.dumps([_MAKING, settings], sort_keys=True)
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def kept(name: str, make: Callable[[], State], meter: DownloadProgress | None = None) -> State:
    """The arrays of that name. If the cache has none, one process calls `make`; the others wait for it."""
    file = file_of(name)
    if not file.exists():
        with locked(name, meter or DownloadProgress()):
            if not file.exists():  # somebody else may have made it while this process waited
                files.remove_leftovers(file.parent, file.name)
                state.save(file, make())
    try:
        return state.load(file, mapped=True)  # the processes of a run share one copy in memory
    except StateError as error:
        raise StateError(f"{error}; delete the file, and aflock makes it again") from None


@contextmanager
def locked(name: str, meter: DownloadProgress) -> Iterator[None]:
    """Holds the lock of that name inside; waits while another process holds it."""
    with _made(folder() / ".locks").joinpath(name).open("w") as lock:
        if not files.locked(lock.fileno()):
            meter.say(f"{name}: waiting for another process that is getting it")
            files.locked(lock.fileno(), wait=True)
        yield


def _made(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(None, "Permission denied")
    except OSError as error:
        raise AflockError(
            f"the folder {path.parent} is not writable ({error.strerror}); set AFLOCK_DATA to one that is"
        ) from error
    return path
