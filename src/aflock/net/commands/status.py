"""`aflock status`: a running federation at a glance."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..extras import need
from .board import table

Look = Callable[[], dict[str, Any]]

PAUSE = 2.0
"""Seconds between two looks."""


def show(where: str, *, token_file: str | None, ca: str | None, as_json: bool, once: bool, **trust: Any) -> int:
    """Prints a status: once, or again and again until Ctrl-C; `trust`: certificate, key and insecure of `status`."""
    need("aiohttp", extra="net", what="a look at a server")
    token, found_ca = _token(token_file)
    url, ca = _place(where, ca or found_ca)
    look = partial(_get, url, token, {"ca": ca, **trust}, None if url == where else Path(where))
    found = look()
    if found["certificate"] and not found["verified"]:
        sys.stderr.write(
            "aflock: the server's certificate is not verified; --token-file or --ca verifies it, or compare its sha256 "
            f"with what `aflock serve` printed: {found['certificate']}\n"
        )
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    elif once:
        console = _console()
        console.print(table(found, console.width))
    else:
        _live(look, found)
    return 0


def _token(file: str | None) -> tuple[str | None, str | None]:
    """The token, and the authority that came with it."""
    if file is None:
        return None, None
    from .members import read_token_file

    found = read_token_file(Path(file))
    if found.exposed:
        sys.stderr.write(f"aflock: others on this machine may read {file}; run chmod 600 on it\n")
    return found.token, found.ca


def _place(where: str, ca: str | None) -> tuple[str, str | None]:
    """The URL and the authority; of a folder, its own."""
    folder = Path(where)
    if where.startswith(("http://", "https://")) or not folder.is_dir():
        return where, ca
    from .serve import address, has_own_authority

    own = folder / "tls" / "ca.pem"
    return address(folder), ca or (str(own) if has_own_authority(folder) and own.is_file() else None)


def _get(url: str, token: str | None, trust: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    from .glance import status
    from .refusals import Refused
    from .trouble import Unavailable

    try:
        return status(url, token=token, **trust)
    except Unavailable:
        if folder is None or _runs(folder):
            raise
        text = f"the server of {folder} is not running (its last address was {url}); start it with aflock serve"
        raise Unavailable(text) from None
    except Refused as refusal:
        if refusal.status != 401 or token is not None:
            raise
        text = f"{url} shows its status to members only; give a member's token with --token-file"
        raise Refused(401, refusal.code, text) from None


def _runs(folder: Path) -> bool:
    """Whether the process that last served the folder is alive; true where nobody can tell."""
    from .serve import ADDRESS

    try:
        os.kill(int(json.loads((folder / ADDRESS).read_text(encoding="utf-8"))["pid"]), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, KeyError, TypeError, OverflowError):  # somebody else's, or no number of a process
        return True
    return True


def _console() -> Any:
    from rich.console import Console

    return Console()


def _live(look: Look, found: dict[str, Any]) -> None:
    from rich.live import Live

    console = _console()
    with Live(table(found, console.width), console=console, refresh_per_second=4) as live:
        try:
            while True:
                time.sleep(PAUSE)
                live.update(table(look(), console.width))
        except KeyboardInterrupt:
            return
