"""`aflock status`: asks a running server for its status and prints it, as a table or as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ...system.optional import need
from .status_table import table

Fetch = Callable[[], dict[str, Any]]

REFRESH_SECONDS = 2.0
"""Seconds between two requests of the live table."""


def show(where: str, *, token_file: str | None, ca: str | None, as_json: bool, once: bool, **trust: Any) -> int:
    """Prints the status once, or every few seconds until Ctrl-C.

    `where` is a URL or a data folder; `trust` holds `certificate`, `key` and `insecure` for `client.status.status`.
    """
    need("aiohttp", extra="net", what="the status of a server")
    token, found_ca = _token(token_file)
    url, ca = _url_and_ca(where, ca or found_ca)
    fetch = partial(_fetch, url, token, {"ca": ca, **trust}, None if url == where else Path(where))
    found = fetch()
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
        _live(fetch, found)
    return 0


def _token(file: str | None) -> tuple[str | None, str | None]:
    """The token and the authority of a token file."""
    if file is None:
        return None, None
    from ..identity.members import read_token_file

    found = read_token_file(Path(file))
    if found.exposed:
        sys.stderr.write(f"aflock: other users of this machine may read {file}; run chmod 600 on it\n")
    return found.token, found.ca


def _url_and_ca(where: str, ca: str | None) -> tuple[str, str | None]:
    """The server's URL and the authority to trust; for a data folder, those that its server uses."""
    folder = Path(where)
    if where.startswith(("http://", "https://")) or not folder.is_dir():
        return where, ca
    from ..server.main import address, has_own_authority

    own = folder / "tls" / "ca.pem"
    return address(folder), ca or (str(own) if has_own_authority(folder) and own.is_file() else None)


def _fetch(url: str, token: str | None, trust: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    from ..client.errors import Unavailable
    from ..client.status import status
    from ..protocol.refusals import Refused

    try:
        return status(url, token=token, **trust)
    except Unavailable:
        if folder is None or _server_runs(folder):
            raise
        text = f"the server of {folder} is not running (its last address was {url}); start it with aflock serve"
        raise Unavailable(text) from None
    except Refused as refusal:
        if refusal.status != 401 or token is not None:
            raise
        text = f"{url} shows its status to members only; give a member's token with --token-file"
        raise Refused(401, refusal.code, text) from None


def _server_runs(folder: Path) -> bool:
    """Whether the process that last served the folder is alive; true if that cannot be found out."""
    from ..server.main import ADDRESS

    try:
        os.kill(int(json.loads((folder / ADDRESS).read_text(encoding="utf-8"))["pid"]), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, KeyError, TypeError, OverflowError):  # another user's process, or no valid process id
        return True
    return True


def _console() -> Any:
    from rich.console import Console

    return Console()


def _live(fetch: Fetch, found: dict[str, Any]) -> None:
    from rich.live import Live

    console = _console()
    with Live(table(found, console.width), console=console, refresh_per_second=4) as live:
        try:
            while True:
                time.sleep(REFRESH_SECONDS)
                live.update(table(fetch(), console.width))
        except KeyboardInterrupt:
            return
