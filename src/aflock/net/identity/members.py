"""Who may take part: the members of a federation, and the tokens they show.

    fed/members.json    {"format": 1, "members": {"alice": {"hash": "...", "invited": "...", "revoked": false, ...}}}
    fed/members.lock    held by the command that changes it

A token is `aflock1.<name>.<secret>` with 32 random bytes in base64url. It is told once, when it is made; what stays is
the SHA-256 of its secret. A slow hash would add nothing: it makes the guessing of weak passwords dear, and nobody
guesses 256 random bits. What it would do is let anybody who sends wrong tokens keep the server busy.
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import json
import os
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import to_json

_FORMAT = 1
_NAME = r"[a-z0-9_][a-z0-9_-]{0,63}"
_TOKEN = re.compile(rf"aflock1\.({_NAME})\.([A-Za-z0-9_-]{{43}})")
_CERTIFICATES = re.compile(r"\s*(-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----\s*)+", re.ASCII)
_LONGEST_TOKEN = 200
_LARGEST_TOKEN_FILE = 1_000_000
_UNSURE = (-1,)
_CLOCK_TICK = 100_000_000  # ns; file systems stamp coarsely: two changes this close may look like one


class BadToken(InputError):
    """The token is not one this federation has given out, or one that was replaced; nothing says which."""

    status = 401


class Revoked(InputError):
    """The token is right, but its member may no longer take part."""

    status = 403


@dataclass(frozen=True, slots=True)
class Member:
    """One who was invited; `generation` counts the tokens made for the name."""

    name: str
    hash: str = field(repr=False)
    invited: str
    revoked: bool
    generation: int


_NOBODY = Member("", secrets.token_hex(32), "", revoked=True, generation=0)  # whom an unknown name is compared with


@dataclass(frozen=True, slots=True)
class TokenFile:
    """What a client was given; `exposed` says that others on its machine may open the file."""

    token: str = field(repr=False)
    ca: str | None
    exposed: bool


def invite(folder: Path, name: str, *, again: bool = False, deliver: Callable[[str], None] | None = None) -> str:
    """Makes a token for a name and returns it; with `again`, one the name had before stops working.

    `deliver` is called with the token before anything is changed; if it fails, all is as before.
    """
    checked_name(name)
    secret = secrets.token_urlsafe(32)
    token = f"aflock1.{name}.{secret}"
    with _changing(folder) as members:
        old = members.get(name)
        if old and not old.revoked and not again:
            raise InputError(f"{name!r} is a member already; revoke it first, or replace its token with --again")
        generation = old.generation + 1 if old else 1
        members[name] = Member(name, _hash(secret), _now(), revoked=False, generation=generation)
        if deliver is not None:
            deliver(token)
    return token


def revoke(folder: Path, name: str) -> None:
    """Shuts a member out; doing so twice is no error."""
    with _changing(folder) as members:
        if name not in members:
            raise InputError(_unknown(name, list(members)))
        old = members[name]
        members[name] = Member(name, old.hash, old.invited, revoked=True, generation=old.generation)


def names(folder: Path) -> dict[str, Member]:
    """All who were ever invited, the revoked ones included."""
    try:
        return _read(existing(folder) / "members.json")
    except FileNotFoundError:
        return {}


class Members:
    """The server's view of the members; what `refresh` replaces is never changed in place.

    known        every member by name
    revoked      the names of those who may not take part
    generations  the generation of each member's token
    problem      why the file cannot be used as it is now, or None; until it can, the last good view holds
    """

    def __init__(self, folder: Path) -> None:
        self._file = existing(folder) / "members.json"
        self._seen: tuple[int, ...] = ()
        self.problem: str | None = None
        self._take({})
        self.refresh()

    def refresh(self) -> bool:
        """Reads the file again if it is another than before; true if that has changed anything."""
        mark = _mark(self._file)
        if mark == self._seen:
            return False
        before = self.known, self.problem
        self._seen = _UNSURE if _is_recent(mark) else mark
        self._load()
        return (self.known, self.problem) != before

    def authenticate(self, token: str) -> Member:
        """Whose token this is; `BadToken` (401) or `Revoked` (403) otherwise.

        An unknown name costs the same work as a known one: the time does not tell who is a member.
        """
        match = _parsed(token)
        if match is None:
            raise BadToken("this is no token; expected aflock1.<name>.<secret> as it was handed out")
        name, secret = match.groups()
        member = self.known.get(name, _NOBODY)
        if not hmac.compare_digest(_hash(secret), member.hash):
            raise BadToken("this token is not valid (any more); ask whoever runs the federation for a new one")
        if member.revoked:
            raise Revoked(f"{name!r} may no longer take part; ask whoever runs the federation")
        return member

    def _load(self) -> None:
        try:
            self._take(_read(self._file))
            self.problem = None
        except FileNotFoundError:
            self.problem = f"{self._file} is gone; put it back, or invite everybody anew"
        except InputError as error:
            self.problem = str(error)

    def _take(self, members: dict[str, Member]) -> None:
        self.known = members
        self.revoked: set[str] = {member.name for member in members.values() if member.revoked}
        self.generations = {member.name: member.generation for member in members.values()}


def write_token_file(path: Path, token: str, ca: str | None) -> None:
    """Writes what a client is given, for its eyes only; a file that is there stays as it is."""
    write_new(path, token_text(token, ca))


def token_text(token: str, ca: str | None) -> str:
    """What is in a token file."""
    if _parsed(token) is None:
        raise InputError("this is no token; expected one that `invite` has returned")
    if ca is not None and not _CERTIFICATES.fullmatch(ca):
        raise InputError("the certificate of the authority is not plain PEM text; expected the contents of ca.pem")
    trusted = "" if ca is None else f'ca = """{ca.strip()}\n"""\n'
    return f'# aflock: keep this file to yourself\ntoken = "{token}"\n{trusted}'


def read_token_file(path: Path) -> TokenFile:
    """Reads what `write_token_file` has written, or a file with nothing but the token in it."""
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST_TOKEN_FILE)
            mode = os.fstat(file.fileno()).st_mode
        text = raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"there is no token file {path}; expected the one you got with your invitation") from None
    except OSError as error:
        raise InputError(f"the token file {path} cannot be read ({error.strerror}); check its permissions") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file; expected the token file of your invitation") from None
    exposed = os.name == "posix" and bool(mode & 0o077)
    if _parsed(text.strip()):
        return TokenFile(text.strip(), None, exposed)
    found = _contents(text, path)
    return TokenFile(found.token, found.ca, exposed)


def checked_name(name: str) -> str:
    """The name of a client, if it can be one."""
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        raise InputError(f"the name {name!r} is not valid; expected 1 to 64 of a-z, 0-9, _ and -, not - at first")
    return name


def write_private(file: Path, content: str | bytes) -> None:
    """Writes a file only its owner may read: beside its place, synced, then moved there.

    Two at a time would meet in the file beside it: `alone` keeps them apart.
    """
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.unlink(missing_ok=True)  # what a killed process has left
    try:
        write_new(temporary, content)
        os.replace(temporary, file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Waits for its turn: one process at a time is past this line; a killed one is past it no more."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _wait_for(handle)
        yield
    finally:
        os.close(handle)


@contextmanager
def _changing(folder: Path) -> Iterator[dict[str, Member]]:
    """The members, to be changed; written if nothing goes wrong meanwhile."""
    with alone(existing(folder) / "members.lock"):
        members = names(folder)
        yield members
        entries = {member.name: _entry(member) for member in members.values()}
        write_private(folder / "members.json", to_json({"format": _FORMAT, "members": entries}, indent=1) + "\n")


def _wait_for(handle: int) -> None:
    try:
        import fcntl
    except ModuleNotFoundError:  # no such thing on this system
        return
    fcntl.flock(handle, fcntl.LOCK_EX)


def write_new(path: Path, content: str | bytes) -> None:
    """Writes and syncs a file that must not exist yet; never are its contents open to others, not even at first."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InputError(f"{path} exists already; remove it, or choose another place") from None
    except FileNotFoundError:
        raise InputError(f"the folder {path.parent} does not exist; make it, or choose another place") from None
    except OSError as error:
        raise InputError(f"{path} cannot be made ({error.strerror}); expected a place you may write to") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Makes sure that the names in a folder outlast a loss of power, as their contents do."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def existing(folder: Path) -> Path:
    """The folder of a federation, if it is there."""
    if not folder.is_dir():
        raise InputError(f"the folder {folder} does not exist; expected the folder of a federation")
    return folder


def _read(file: Path) -> dict[str, Member]:
    try:
        document = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); check its owner and permissions") from None
    except (ValueError, RecursionError):
        raise InputError(_broken(file, "it is not JSON")) from None
    if not isinstance(document, dict) or not isinstance(document.get("members"), dict):
        raise InputError(_broken(file, "it holds no members"))
    if document.get("format") != _FORMAT:
        raise InputError(_broken(file, f"its format is not {_FORMAT}, the one this version reads"))
    return {name: _member(file, name, entry) for name, entry in document["members"].items()}


def _member(file: Path, name: str, entry: Any) -> Member:
    if not re.fullmatch(_NAME, name) or not _is_entry(entry):
        raise InputError(_broken(file, f"the entry of {name!r} is not one of a member"))
    return Member(name, **entry)


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"hash", "invited", "revoked", "generation"}:
        return False
    digest, generation = entry["hash"], entry["generation"]
    return (
        isinstance(digest, str)
        and re.fullmatch("[0-9a-f]{64}", digest) is not None
        and isinstance(entry["invited"], str)
        and isinstance(entry["revoked"], bool)
        and type(generation) is int
        and generation >= 1
    )


def _entry(member: Member) -> dict[str, Any]:
    return {
        "hash": member.hash,
        "invited": member.invited,
        "revoked": member.revoked,
        "generation": member.generation,
    }


def _broken(file: Path, why: str) -> str:
    return f"{file} cannot be used: {why}; put back a good copy, or remove it and invite everybody anew"


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0)
    return f"there is no member {name!r}; " + (f"did you mean {near[0]!r}?" if near else "nobody was invited yet")


def _parsed(token: str) -> re.Match[str] | None:
    if not isinstance(token, str) or len(token) > _LONGEST_TOKEN:
        return None
    return _TOKEN.fullmatch(token)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _contents(text: str, path: Path) -> TokenFile:
    """What a token file says; the parser's own words are left out of errors: they may quote the token."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        raise InputError(f'{path} is not TOML; expected token = "aflock1....", or the token and nothing else') from None
    token, ca = document.get("token"), document.get("ca")
    if not isinstance(token, str) or _parsed(token) is None:
        raise InputError(f'{path} holds no token; expected token = "aflock1.<name>.<secret>" as it was handed out')
    if ca is not None and not (isinstance(ca, str) and "-----BEGIN CERTIFICATE-----" in ca):
        raise InputError(f"{path}: ca is not a certificate; expected PEM text, or no ca at all")
    return TokenFile(token, ca, exposed=False)


def _mark(file: Path) -> tuple[int, ...]:
    """What is different when the file is another; empty if there is none."""
    try:
        found = os.stat(file)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _is_recent(mark: tuple[int, ...]) -> bool:
    return bool(mark) and abs(time.time_ns() - mark[0]) < _CLOCK_TICK


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
