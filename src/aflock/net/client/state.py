"""What a client keeps on disk: what it remembers between jobs, and the update it does not know to be taken.

    STATE/pending.safetensors     the update on its way, and what the client remembers once the server has taken it
    STATE/memory.safetensors      what it remembers: the file of the last update that was taken, renamed
    STATE/lock                    held by the process that works there

An update is written before it is sent. One that was taken becomes the memory by a single rename, so there is no moment
at which a kill leaves the two in disagreement: with `pending` still there, the next start sends it again and is told
what had become of it. What was rejected or refused is removed, and the memory is as it was before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import state
from ..errors import AflockError, StateError
from ..files import locked
from ..types import State
from .wire import Buffer, UpdateHead

log = logging.getLogger("aflock.client")

Remembered = dict[str, npt.NDArray[Any]]

_PENDING, _MEMORY, _LOCK = "pending.safetensors", "memory.safetensors", "lock"


class Occupied(AflockError):
    """Another process works with the same state."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """An update as it travels: its vectors are bytes, in the order they are sent."""

    job: int
    version: int
    steps: int
    examples: int
    encoding: str
    vectors: Mapping[str, Buffer]

    @property
    def head(self) -> UpdateHead:
        """What is said about it in headers."""
        return UpdateHead(self.version, self.steps, self.examples, tuple(self.vectors), self.encoding)

    @property
    def nbytes(self) -> int:
        """How long its body is."""
        return sum(memoryview(vector).nbytes for vector in self.vectors.values())


class Keep:
    """One client's memory of one federation; without a folder it lasts as long as the object."""

    def __init__(self, folder: Path | None, federation: str) -> None:
        self.memory: Remembered = {}
        self.pending: Parcel | None = None
        self._folder, self._federation = folder, federation
        self._next: Remembered = {}
        self._lock: int | None = None
        if folder is not None:
            _make(folder)
            self._lock = _taken(folder)
            try:
                with _in_use(folder):
                    self._load(folder)
            except BaseException:
                self.close()
                raise

    def hold(self, parcel: Parcel, fresh: Mapping[str, npt.NDArray[Any]]) -> None:
        """An update is about to be sent; `fresh` is what the client will remember once it is taken."""
        after = {**self.memory, **fresh} if fresh else {}
        if self._folder is not None:
            with _in_use(self._folder), _private_files():
                state.save(self._folder / _PENDING, self._document(parcel, after))
        self.pending, self._next = parcel, after

    def take(self) -> None:
        """The server has taken the update: what came of it is remembered."""
        if self._folder is not None and self._next:
            with _in_use(self._folder):
                os.replace(self._folder / _PENDING, self._folder / _MEMORY)
        else:
            self._remove(_PENDING)
        self.memory = self._next or self.memory
        self.pending, self._next = None, {}

    def drop(self) -> None:
        """The update is void: the memory stays as it was."""
        self._remove(_PENDING)
        self.pending, self._next = None, {}

    def forget(self) -> None:
        """The federation no longer knows this client: it begins anew."""
        self.drop()
        self._remove(_MEMORY)
        self.memory = {}

    def close(self) -> None:
        """Lets another process work here; what is on disk stays."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- on disk ----------------------------------------------------------------------------------------------------

    def _load(self, folder: Path) -> None:
        for leftover in folder.glob(f".{_PENDING}.*"):  # of a process that was killed while it wrote
            leftover.unlink(missing_ok=True)
        if (found := self._read(folder / _MEMORY)) is not None:
            self.memory = _copied(found["memory"])
        if (found := self._read(folder / _PENDING)) is not None:
            self.pending, self._next = _parcel(found), _copied(found["memory"])
            log.info("an update for job %d is still to be sent", self.pending.job)

    def _remove(self, name: str) -> None:
        if self._folder is not None:
            with _in_use(self._folder):
                (self._folder / name).unlink(missing_ok=True)

    def _read(self, file: Path) -> State | None:
        if not file.exists():
            return None
        found = state.load(file)
        if found.get("federation") != self._federation:
            raise StateError(
                f"{file} belongs to another federation ({found.get('federation')}); give each its own state_dir"
            )
        return found

    def _document(self, parcel: Parcel, after: Remembered) -> State:
        fields = ("job", "version", "steps", "examples", "encoding")
        vectors = {name: np.frombuffer(vector, np.uint8) for name, vector in parcel.vectors.items()}
        document: State = {"federation": self._federation, "vectors": vectors, "memory": after}
        return document | {name: getattr(parcel, name) for name in fields}


def _parcel(found: State) -> Parcel:
    vectors = {name: vector.data for name, vector in found["vectors"].items()}
    return Parcel(found["job"], found["version"], found["steps"], found["examples"], found["encoding"], vectors)


def _copied(memory: Mapping[str, npt.NDArray[Any]]) -> Remembered:
    """Out of the file: it will be replaced while the vectors are in use."""
    return {name: np.array(vector) for name, vector in memory.items()}


def _make(folder: Path) -> None:
    """A folder for the owner alone; one that is there is left as it is: it may be somebody's home."""
    try:
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise StateError(f"the folder {folder} cannot be made ({error.strerror}); give another state_dir") from None


def _taken(folder: Path) -> int:
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StateError(f"{folder} cannot be written to ({error.strerror}); give another state_dir") from None
    if not locked(handle):
        os.close(handle)
        raise Occupied(f"another process works in {folder}; stop it, or give this client a state_dir of its own")
    return handle


@contextmanager
def _in_use(folder: Path) -> Iterator[None]:
    """What the system says inside is told with the folder's name."""
    try:
        yield
    except OSError as error:
        why = error.strerror
        raise StateError(f"{folder} cannot be used ({why}); check its permissions, or make room there") from None


@contextmanager
def _private_files() -> Iterator[None]:
    """What is made inside is the owner's alone from its first moment on."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
