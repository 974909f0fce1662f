"""A client's state on disk: its memory between jobs, and the update that the server may not have taken yet.

    STATE/pending.safetensors     the update to send, and the memory that is valid once the server has taken it
    STATE/memory.safetensors      the memory: the pending file of the last update that was taken, renamed
    STATE/lock                    held by the process that uses the folder

`run.py` writes an update here before it sends it. When the server has taken the update, a single rename turns the
pending file into the memory, so a kill at any moment leaves client and server in agreement: if `pending` still exists,
the next start sends it again, and the server answers with the receipt it gave before. If the server rejects or refuses
the update, the pending file is removed and the memory stays as it was.
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

from ... import state
from ...errors import AflockError, StateError
from ...system.files import PRIVATE, locked, remove_leftovers
from ...types import State
from ..protocol.wire import BytesLike, UpdateHead

log = logging.getLogger("aflock.client")

SavedMemory = dict[str, npt.NDArray[Any]]

_PENDING, _MEMORY, _LOCK = "pending.safetensors", "memory.safetensors", "lock"


class StateInUse(AflockError):
    """Another process uses the same state folder."""


@dataclass(frozen=True, slots=True)
class EncodedUpdate:
    """An update as it is sent: its vectors are encoded, and in the order of the body."""

    job: int
    version: int
    steps: int
    examples: int
    encoding: str
    vectors: Mapping[str, BytesLike]

    @property
    def head(self) -> UpdateHead:
        """What the request's headers say about it."""
        return UpdateHead(self.version, self.steps, self.examples, tuple(self.vectors), self.encoding)

    @property
    def nbytes(self) -> int:
        """The length of the request's body."""
        return sum(memoryview(vector).nbytes for vector in self.vectors.values())


class ClientState:
    """One client's state in one federation; with `folder` None it is in this process's memory only.

    memory     the vectors that the local rule keeps between jobs
    pending    the update that is to be sent, or was sent without an answer
    """

    def __init__(self, folder: Path | None, federation: str) -> None:
        self.memory: SavedMemory = {}
        self.pending: EncodedUpdate | None = None
        self._folder, self._federation = folder, federation
        self._next: SavedMemory = {}
        self._lock: int | None = None
        if folder is not None:
            _make_private_folder(folder)
            self._lock = _lock_folder(folder)
            try:
                with _errors_name(folder):
                    self._load(folder)
            except BaseException:
                self.close()
                raise

    def store_pending(self, update: EncodedUpdate, fresh: Mapping[str, npt.NDArray[Any]]) -> None:
        """Stores an update before it is sent; `fresh` is what changes in the memory once the server has taken it."""
        # Without changes the memory is not stored again: `accept_pending` then removes the pending file and leaves the
        # memory file as it is. A rule without memory, the usual case, never writes one.
        after = {**self.memory, **fresh} if fresh else {}
        if self._folder is not None:
            with _errors_name(self._folder):
                state.save(self._folder / _PENDING, self._document(update, after), mode=PRIVATE)
        self.pending, self._next = update, after

    def accept_pending(self) -> None:
        """The server has taken the update: the memory stored with it becomes the client's memory."""
        # The pending file holds the whole memory after the update (see `store_pending`): one rename, which is atomic,
        # accepts the update and replaces the memory.
        if self._folder is not None and self._next:
            with _errors_name(self._folder):
                os.replace(self._folder / _PENDING, self._folder / _MEMORY)
        else:
            self._remove(_PENDING)
        self.memory = self._next or self.memory
        self.pending, self._next = None, {}

    def discard_pending(self) -> None:
        """The server has not taken the update and never will: the memory stays as it was."""
        self._remove(_PENDING)
        self.pending, self._next = None, {}

    def forget(self) -> None:
        """Removes memory and update: the federation does not know this client any more, or the client left it."""
        self.discard_pending()
        self._remove(_MEMORY)
        self.memory = {}

    def close(self) -> None:
        """Unlocks the folder for other processes; its files stay."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- on disk ----------------------------------------------------------------------------------------------------

    def _load(self, folder: Path) -> None:
        remove_leftovers(folder, _PENDING)
        if (found := self._read(folder / _MEMORY)) is not None:
            self.memory = _copies(found["memory"])
        if (found := self._read(folder / _PENDING)) is not None:
            self.pending, self._next = _update_from(found), _copies(found["memory"])
            log.info("an earlier run left an update for job %d; it is sent first", self.pending.job)

    def _remove(self, name: str) -> None:
        if self._folder is not None:
            with _errors_name(self._folder):
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

    def _document(self, update: EncodedUpdate, after: SavedMemory) -> State:
        fields = ("job", "version", "steps", "examples", "encoding")
        vectors = {name: np.frombuffer(vector, np.uint8) for name, vector in update.vectors.items()}
        document: State = {"federation": self._federation, "vectors": vectors, "memory": after}
        return document | {name: getattr(update, name) for name in fields}


def _update_from(found: State) -> EncodedUpdate:
    vectors = {name: vector.data for name, vector in found["vectors"].items()}
    return EncodedUpdate(found["job"], found["version"], found["steps"], found["examples"], found["encoding"], vectors)


def _copies(memory: Mapping[str, npt.NDArray[Any]]) -> SavedMemory:
    """Copies of a file's vectors: the file is replaced while the client still uses them."""
    return {name: np.array(vector) for name, vector in memory.items()}


def _make_private_folder(folder: Path) -> None:
    """Makes a folder that only its owner may read; the mode of an existing folder stays: it may hold other files."""
    try:
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise StateError(f"the folder {folder} cannot be made ({error.strerror}); give another state_dir") from None


def _lock_folder(folder: Path) -> int:
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StateError(f"{folder} cannot be written to ({error.strerror}); give another state_dir") from None
    if not locked(handle):
        os.close(handle)
        raise StateInUse(f"another process uses {folder}; stop it, or give this client a state_dir of its own")
    return handle


@contextmanager
def _errors_name(folder: Path) -> Iterator[None]:
    """Turns an OSError inside the block into a StateError that names the folder."""
    try:
        yield
    except OSError as error:
        why = error.strerror
        raise StateError(f"{folder} cannot be used ({why}); check its permissions and the free space there") from None
