"""From a supply to arrays: tries the sources in order and takes the first that gives the right content.

    images = SUPPLY.arrays()                         # memory-mapped; fetched first if they are not there yet
    images = SUPPLY.arrays(mine=Path("train.zip"))   # from a file or folder of one's own instead

What is fetched is read once into arrays, which are kept in the cache under the supply's name; what they were read from
is deleted. Where the source has no checksums of its own, the arrays are checked against the supply's digest, which
does not depend on the archive they came in. Without `mine` the last source is the sub-folder of AFLOCK_FILES that has
the supply's name, if there is one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import AflockError, InputError
from ...types import State
from . import cache
from .download import NoAnswer
from .download_progress import DownloadProgress
from .sources import Mine, Source

Reader = Callable[[Sequence[Path]], State]
"""From files and folders to arrays (and JSON values); raises InputError if they do not hold the data."""


@dataclass(frozen=True)
class Supply:
    """How to get one collection of files: its sources in order, the reader, and the digest of what it must read."""

    name: str
    sources: tuple[Source, ...]
    read: Reader
    digest: str | None
    """The sha256 of the arrays (see `digest_of`); None if it is not known."""
    licence: str

    @property
    def kept_as(self) -> str:
        """The name in the cache, with the digest: a version of aflock that expects other content uses another file."""
        return self.name if self.digest is None else f"{self.name}-{self.digest[:8]}"

    @property
    def file(self) -> Path:
        """Where the arrays are, or will be."""
        return cache.file_of(self.kept_as)

    def arrays(self, *, mine: Path | None = None, meter: DownloadProgress | None = None) -> State:
        """The arrays, read-only and memory-mapped, and under "origin" where they came from."""
        speaker = meter or DownloadProgress()
        arrays = cache.kept(self.kept_as, lambda: self._fetched(mine, speaker), speaker)
        folder = cache.downloads(self.kept_as)
        if folder.exists():  # only now: a process that is killed before the arrays are saved need not download again
            shutil.rmtree(folder, ignore_errors=True)
        return arrays

    def _fetched(self, mine: Path | None, meter: DownloadProgress) -> State:
        folder = cache.downloads(self.kept_as)
        folder.mkdir(parents=True, exist_ok=True)
        if mine is not None:
            return self._from_mine(Mine(mine), folder, meter)
        return self._from_first(self._all_sources(), folder, meter)

    def _from_mine(self, source: Mine, folder: Path, meter: DownloadProgress) -> State:
        try:
            return self._from(source, folder, meter)
        except (NoAnswer, InputError) as error:
            raise InputError(f"{source}: {error}") from error

    def _all_sources(self) -> list[Source]:
        own = os.environ.get("AFLOCK_FILES")
        return [*self.sources, *([Mine(Path(own).expanduser() / self.name)] if own else [])]

    def _from_first(self, sources: list[Source], folder: Path, meter: DownloadProgress) -> State:
        failures = []
        for source in sources:
            meter.say(f"{self.name}: {source}")
            try:
                return self._from(source, folder, meter)
            except (NoAnswer, InputError) as error:
                meter.say(f"{self.name}: this source failed: {error}")
                failures.append(f"  {source}: {error}")
        raise AflockError(self._nothing_answered(failures))

    def _from(self, source: Source, folder: Path, meter: DownloadProgress) -> State:
        made = self.read(source.bring(folder, meter))
        found = digest_of(made)
        if not source.pinned and self.digest not in (None, found):
            raise InputError(
                f"it has other content: the sha256 of its content is {found[:12]}..., "
                f"that of {self.name} is {str(self.digest)[:12]}..."
            )
        checked = source.pinned or self.digest is not None
        return made | {"origin": {"source": str(source), "sha256": found, "checked": checked}}

    def _nothing_answered(self, failures: list[str]) -> str:
        names = dict.fromkeys(name for source in self.sources for name in source.names())
        return "\n".join(
            [
                f"{self.name} could not be fetched from any of its sources:",
                *failures,
                "What you can do:",
                "  try again when the network is back; what has been downloaded is kept and continued",
                f"  aflock data get {self.name} --from PATH, a file or folder with {' '.join(names) or 'the data'}",
                f"  or put that into the folder {self.name} of a folder that AFLOCK_FILES names",
            ]
        )


def digest_of(content: State) -> str:
    """The sha256 of arrays and JSON values: names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(content):
        value = content[name]
        if isinstance(value, np.ndarray):
            digest.update(f"{name} {value.dtype.newbyteorder('<').str} {value.shape}".encode())
            digest.update(np.ascontiguousarray(value, value.dtype.newbyteorder("<")).data)
        else:
            digest.update(f"{name} {json.dumps(value, sort_keys=True)}".encode())
    return digest.hexdigest()
