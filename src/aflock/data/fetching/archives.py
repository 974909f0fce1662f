"""Reads files from folders and archives (tar, zip, gz, also one inside another) in one pass, in memory."""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from ...errors import InputError

Wanted = Callable[[str], bool]
"""Whether a file with that path is to be read."""

_TARS = (".tar", ".tgz", ".tar.gz", ".tar.xz", ".tar.bz2")
_ZIPS = (".zip", ".whl")
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, EOFError, lzma.LZMAError, zlib.error)


def by_name(paths: Iterable[Path], names: Iterable[str]) -> dict[str, bytes]:
    """The contents of the files with these names, in any folder or archive; missing ones are left out."""
    wanted = frozenset(names)
    found = contents(paths, lambda path: PurePosixPath(path).name in wanted)
    return {PurePosixPath(path).name: raw for path, raw in found}


def all_of(found: dict[str, bytes], names: Sequence[str]) -> list[bytes]:
    """The contents of the files of those names, in that order; raises InputError if one is missing."""
    for name in names:
        if name not in found:
            raise InputError(f"there is no file {name}; expected {', '.join(names)}")
    return [found[name] for name in names]


def contents(paths: Iterable[Path], wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    """Path and bytes of every wanted file; a .gz file is unpacked, and its path has no .gz."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and _worth_opening(file.as_posix(), wanted):
                with file.open("rb") as stream:
                    try:
                        yield from _unwrapped(file.as_posix(), stream, wanted)
                    except _BROKEN as error:
                        raise InputError(f"{file} cannot be unpacked ({error}); it may be incomplete") from error


def _worth_opening(name: str, wanted: Wanted) -> bool:
    return name.endswith(_TARS + _ZIPS) or wanted(name.removesuffix(".gz"))


def _unwrapped(name: str, stream: IO[bytes], wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    if name.endswith(_TARS):
        yield from _from_tar(stream, wanted)
    elif name.endswith(_ZIPS):
        yield from _from_zip(stream, wanted)
    elif name.endswith(".gz"):
        with gzip.open(stream) as plain:
            yield name.removesuffix(".gz"), plain.read()
    else:
        yield name, stream.read()


def _from_tar(stream: IO[bytes], wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=stream) as archive:
        for entry in archive:
            inside = archive.extractfile(entry) if entry.isfile() and _worth_opening(entry.name, wanted) else None
            if inside is not None:
                yield from _unwrapped(entry.name, inside, wanted)


def _from_zip(stream: IO[bytes], wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(stream) as archive:
        for entry in archive.infolist():
            if not entry.is_dir() and _worth_opening(entry.filename, wanted):
                # A zip is read from its end; a compressed stream would be unpacked from its start for every seek back.
                yield from _unwrapped(entry.filename, io.BytesIO(archive.read(entry)), wanted)
