"""The members of a federation and their tokens: invite, revoke, authenticate; token files.

    fed/members.json    {"format": 1, "members": {"alice": {"hash": "...", "invited": "...", "revoked": false, ...}}}
    fed/members.lock    held by the command that changes members.json

The commands `invite`, `revoke` and `members` call the functions; the server authenticates requests with `Members`.

A token is `aflock1.<name>.<secret>`; the secret is 32 random bytes in base64url. Only the token file has it: what
members.json has is the SHA-256 of the secret. A slow hash would not add safety: it slows down the guessing of weak
passwords, and 256 random bits cannot be guessed. It would let anyone keep the server busy by sending wrong tokens.
"""

from __future__ import annotations

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

from ...errors import InputError, did_you_mean
from ...system import files
from ...system.files import PRIVATE, alone, remove_leftovers, to_json, write_whole

_FORMAT = 1
_NAME = r"[a-z0-9_][a-z0-9_-]{0,63}"
_TOKEN = re.compile(rf"aflock1\.({_NAME})\.([A-Za-z0-9_-]{{43}})")
_CERTIFICATES = re.compile(r"\s*(-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----\s*)+", re.ASCII)
_LONGEST_TOKEN = 200
_LARGEST_TOKEN_FILE = 1_000_000
_UNCERTAIN_STAMP = (-1,)  # differs from every file's stamp, so that the next `refresh` reads the file
_CLOCK_TICK = 100_000_000  # ns; two changes within the resolution of a file system's clock have the same time


class BadToken(InputError):
    """The token is not one of this federation, or was replaced by a newer one; the error does not say which."""


class Revoked(InputError):
    """The token is valid, but its member was revoked."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member; `hash` is of its present token's secret, `generation` counts the tokens made for the name."""

    name: str
    hash: str = field(repr=False)
    invited: str
    revoked: bool
    generation: int


_UNKNOWN = Member("", secrets.token_hex(32), "", revoked=True, generation=0)
"""Stands for every name that is not a member, so that an unknown name takes the same time to refuse."""


@dataclass(frozen=True, slots=True)
class TokenFile:
    """The contents of a token file; `exposed`: other users of the machine may read it."""

    token: str = field(repr=False)
    ca: str | None
    exposed: bool


def invite(folder: Path, name: str, *, again: bool = False, deliver: Callable[[str], None] | None = None) -> str:
    """Makes a token for a name and returns it; with `again`, the name's token before becomes invalid.

    Calls `deliver` with the token before it changes members.json; if `deliver` raises, members.json stays as it was.
    """
    checked_name(name)
    secret = secrets.token_urlsafe(32)
    token = f"aflock1.{name}.{secret}"
    with _changing(folder) as members:
        old = members.get(name)
        if old and not old.revoked and not again:
            raise InputError(f"{name!r} is already a member; revoke it first, or replace its token with --again")
        generation = old.generation + 1 if old else 1
        members[name] = Member(name, _hash(secret), _now(), revoked=False, generation=generation)
        if deliver is not None:
            deliver(token)
    return token


def revoke(folder: Path, name: str) -> None:
    """Revokes a member; to revoke it again is not an error."""
    with _changing(folder) as members:
        if name not in members:
            raise InputError(_unknown(name, list(members)))
        old = members[name]
        members[name] = Member(name, old.hash, old.invited, revoked=True, generation=old.generation)


def names(folder: Path) -> dict[str, Member]:
    """Every member by name, the revoked ones included."""
    try:
        return _read(existing(folder) / "members.json")
    except FileNotFoundError:
        return {}


class Members:
    """The members as the server knows them: the contents of members.json at the last `refresh` that could read it.

    known        every member by name
    revoked      the names of the revoked members
    generations  the generation of each member's token
    problem      why members.json cannot be used now, or None; meanwhile the last good contents stay in use

    `refresh` replaces these objects and never changes them, so a request may keep using the ones it has.
    """

    def __init__(self, folder: Path) -> None:
        self._file = existing(folder) / "members.json"
        self._stamp: tuple[int, ...] = ()
        self.problem: str | None = None
        self._use({})
        self.refresh()

    def refresh(self) -> bool:
        """Reads members.json again if it was replaced; true if that changed the members or the problem."""
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return False
        before = self.known, self.problem
        self._stamp = _UNCERTAIN_STAMP if _is_recent(stamp) else stamp
        self._load()
        return (self.known, self.problem) != before

    def authenticate(self, token: str) -> Member:
        """The member whose token this is; raises `BadToken` or `Revoked`.

        An unknown name takes the same work as a known one, so that the time does not show who is a member.
        """
        match = _match_token(token)
        if match is None:
            raise BadToken("this is not a token; expected aflock1.<name>.<secret>, as `aflock invite` wrote it")
        name, secret = match.groups()
        member = self.known.get(name, _UNKNOWN)
        if not hmac.compare_digest(_hash(secret), member.hash):
            raise BadToken("this token is not valid; ask the operator of the federation for a new one")
        if member.revoked:
            raise Revoked(f"{name!r} was revoked and may no longer take part; ask the operator of the federation")
        return member

    def _load(self) -> None:
        try:
            self._use(_read(self._file))
            self.problem = None
        except FileNotFoundError:
            self.problem = f"{self._file} does not exist any more; put it back, or invite all members again"
        except InputError as error:
            self.problem = str(error)

    def _use(self, members: dict[str, Member]) -> None:
        self.known = members
        self.revoked: set[str] = {member.name for member in members.values() if member.revoked}
        self.generations = {member.name: member.generation for member in members.values()}


def token_text(token: str, ca: str | None) -> str:
    """The contents of a token file: the token, and the authority's certificate if it is given."""
    if _match_token(token) is None:
        raise InputError("this is not a token; expected one that `invite` returned")
    if ca is not None and not _CERTIFICATES.fullmatch(ca):
        raise InputError("the authority's certificate is not plain PEM text; expected the contents of ca.pem")
    authority = "" if ca is None else f'ca = """{ca.strip()}\n"""\n'
    return f'# aflock: keep this file to yourself\ntoken = "{token}"\n{authority}'


def read_token_file(path: Path) -> TokenFile:
    """Reads a file with the text of `token_text`, or with nothing but the token."""
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST_TOKEN_FILE)
            mode = os.fstat(file.fileno()).st_mode
        text = raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(
            f"the token file {path} does not exist; expected the one that you got with your invitation"
        ) from None
    except OSError as error:
        raise InputError(f"the token file {path} cannot be read ({error.strerror}); check its permissions") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file; expected the token file of your invitation") from None
    exposed = os.name == "posix" and bool(mode & 0o077)
    if _match_token(text.strip()):
        return TokenFile(text.strip(), None, exposed)
    found = _parse_toml(text, path)
    return TokenFile(found.token, found.ca, exposed)


def checked_name(name: str) -> str:
    """The name, if it is a valid name for a client."""
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        raise InputError(f"the name {name!r} is not valid; expected 1 to 64 of a-z, 0-9, _ and -, not - as the first")
    return name


@contextmanager
def _changing(folder: Path) -> Iterator[dict[str, Member]]:
    """Yields the members for the block to change, and writes them afterwards if the block raised nothing."""
    with alone(existing(folder) / "members.lock"):
        remove_leftovers(folder, "members.json")
        members = names(folder)
        yield members
        entries = {member.name: _entry(member) for member in members.values()}
        text = to_json({"format": _FORMAT, "members": entries}, indent=1) + "\n"
        write_whole(folder / "members.json", text, mode=PRIVATE)


def write_new(path: Path, content: str | bytes) -> None:
    """Writes a file that must not exist yet and that only its owner may read."""
    try:
        files.write_new(path, content, mode=PRIVATE)
    except FileExistsError:
        raise InputError(f"{path} already exists; remove it, or choose another file") from None
    except FileNotFoundError:
        raise InputError(f"the folder {path.parent} does not exist; make it, or choose another file") from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror}); choose a file in a folder that you may write to"
        ) from None


def existing(folder: Path) -> Path:
    """The folder, if it exists."""
    if not folder.is_dir():
        raise InputError(f"the folder {folder} does not exist; expected the data folder of a federation")
    return folder


def _read(file: Path) -> dict[str, Member]:
    try:
        document = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); check its owner and permissions") from None
    except (ValueError, RecursionError):
        raise InputError(_unusable(file, "it is not valid JSON")) from None
    if not isinstance(document, dict) or not isinstance(document.get("members"), dict):
        raise InputError(_unusable(file, "it has no object `members`"))
    if document.get("format") != _FORMAT:
        raise InputError(_unusable(file, f"its format is not {_FORMAT}, the only one that this version reads"))
    return {name: _member(file, name, entry) for name, entry in document["members"].items()}


def _member(file: Path, name: str, entry: Any) -> Member:
    if not re.fullmatch(_NAME, name) or not _is_entry(entry):
        raise InputError(_unusable(file, f"the entry of {name!r} is not valid"))
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


def _unusable(file: Path, why: str) -> str:
    return f"{file} cannot be used: {why}; put back a good copy, or remove it and invite all members again"


def _unknown(name: str, known: list[str]) -> str:
    return f"there is no member {name!r}; " + (
        did_you_mean(name, known, cutoff=0).strip() or "no member was invited yet"
    )


def _match_token(token: str) -> re.Match[str] | None:
    if not isinstance(token, str) or len(token) > _LONGEST_TOKEN:
        return None
    return _TOKEN.fullmatch(token)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _parse_toml(text: str, path: Path) -> TokenFile:
    """The token and the authority in a TOML text; errors leave out the parser's text, which may quote the token."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        raise InputError(f'{path} is not TOML; expected token = "aflock1....", or the token and nothing else') from None
    token, ca = document.get("token"), document.get("ca")
    if not isinstance(token, str) or _match_token(token) is None:
        raise InputError(
            f'{path} holds no token; expected token = "aflock1.<name>.<secret>", as `aflock invite` wrote it'
        )
    if ca is not None and not (isinstance(ca, str) and "-----BEGIN CERTIFICATE-----" in ca):
        raise InputError(f"{path}: ca is not a certificate; expected PEM text, or no ca at all")
    return TokenFile(token, ca, exposed=False)


def _stamp(file: Path) -> tuple[int, ...]:
    """Changes when the file is replaced; empty if the file does not exist."""
    try:
        found = os.stat(file)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _is_recent(stamp: tuple[int, ...]) -> bool:
    return bool(stamp) and abs(time.time_ns() - stamp[0]) < _CLOCK_TICK


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
