"""The folder where data is kept: AFLOCK_DATA, or aflock/ in the user's XDG cache.

A name in it is a finished file: arrays are written beside it and moved into place whole (see `state`), and come back
memory-mapped. Whoever makes something holds its lock meanwhile. It is the kernel's lock on an open file: it ends with
its holder, however that ends, so there is no such thing as a stale one.
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
"""To be raised when something derived is made in another way, so that nobody finds what was made before."""


def folder() -> Path:
    """Where everything is kept."""
    own = os.environ.get("AFLOCK_DATA")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "aflock"


def file_of(name: str) -> Path:
    """The file of that name, whether it exists or not."""
    return folder() / f"{name}.safetensors"


def downloads(name: str) -> Path:
    """Where what is being fetched for `name` waits until it is whole."""
    return folder() / ".downloads" / name


def derived(name: str, **settings: Any) -> str:
    """A name for what is made of `name` with those settings: other settings, another name."""
    text = json.dumps([_MAKING, settings], sort_keys=True)
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def kept(name: str, make: Callable[[], State], meter: DownloadProgress | None = None) -> State:
    """What is kept under that name; made now if nothing is, by one process however many ask."""
    file = file_of(name)
    if not file.exists():
        with locked(name, meter or DownloadProgress()):
            if not file.exists():  # somebody else may have made it while this process waited
                files.remove_leftovers(file.parent, file.name)
                state.save(file, make())
    try:
        return state.load(file, mapped=True)  # the processes of a run share one copy in memory
    except StateError as error:
        raise StateError(f"{error}; delete it and it will be made anew") from None


@contextmanager
def locked(name: str, meter: DownloadProgress) -> Iterator[None]:
    """Inside, no other process is inside with the same name."""
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
            f"{path.parent} cannot be written ({error.strerror}); set AFLOCK_DATA to a folder that can"
        ) from error
    return path
