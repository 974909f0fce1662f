"""Downloads one file: resumes a partial one, and gives it its name only when its checksum is right.

The bytes received so far stay in NAME.part, across errors, kills and reboots. After an attempt that received something
comes another one; an attempt that received nothing is the last. So a connection that breaks again and again still ends
with the whole file, and a server that does not answer ends the download at once.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path

from ...errors import AflockError
from ...system.files import sync_folder
from .download_progress import DownloadProgress

SECONDS = 30.0
"""Seconds a server may send nothing before the attempt fails."""

_BLOCK = 1 << 18
_REST_OF_FILE, _NOTHING_LEFT = 206, 416


class NoAnswer(AflockError):
    """A source did not give the data; the message says why."""


def download(url: str, target: Path, sha256: str, meter: DownloadProgress) -> None:
    """Downloads the file at `url` to `target`."""
    part = target.with_name(f"{target.name}.part")
    resumed = _size(part) > 0
    _complete(url, part, target.name, meter)
    if resumed and checksum(part) != sha256:  # the partial file may have been another one
        part.unlink()
        _complete(url, part, target.name, meter)
    check(part, sha256)
    os.replace(part, target)
    sync_folder(target.parent)


def check(file: Path, sha256: str) -> None:
    """Removes the file and raises unless its checksum is the one expected."""
    found = checksum(file)
    if found != sha256:
        file.unlink()
        raise NoAnswer(f"{file.name.removesuffix('.part')} has the sha256 {found[:12]}..., expected {sha256[:12]}...")


def checksum(file: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _complete(url: str, part: Path, name: str, meter: DownloadProgress) -> None:
    """Makes attempts until the whole file is there."""
    while True:
        before = _size(part)
        try:
            return _append(url, part, name, meter)
        except urllib.error.HTTPError as error:
            if error.code == _NOTHING_LEFT and before:
                return None
            raise NoAnswer(f"HTTP {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            if _size(part) <= before:
                reason = error.reason if isinstance(error, urllib.error.URLError) else error
                raise NoAnswer(str(reason) or type(reason).__name__) from error


def _append(url: str, part: Path, name: str, meter: DownloadProgress) -> None:
    """One attempt: requests the missing part; a server that ignores the range sends the whole file again."""
    have = _size(part)
    wanted = {"Range": f"bytes={have}-"} if have else {}
    request = urllib.request.Request(url, headers={"User-Agent": "aflock", **wanted})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer, part.open("ab", buffering=0) as file:
        if answer.status != _REST_OF_FILE:
            file.truncate(have := 0)
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else None
        with meter.watch(name, have, total) as advance:
            # read1 returns what has arrived, without waiting for a whole block: a broken connection loses none of it.
            while block := answer.read1(_BLOCK):
                file.write(block)
                advance(len(block))
        os.fsync(file.fileno())
        if total is not None and file.tell() < total:
            raise ConnectionError(f"the connection ended after {file.tell()} of {total} bytes")


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
