"""`aflock invite`: writes the files for a new client; the client becomes a member only if all of them are written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..identity import members, tls
from ..server import main


def write(folder: Path, name: str, out: Path | None = None, *, again: bool = False, mtls: bool = False) -> list[str]:
    """Writes the token file, with `mtls` also NAME.pem and NAME.key; returns lines for the user."""
    token_file = out or Path(f"{members.checked_name(name)}.token")
    certificate, key = Path(f"{name}.pem"), Path(f"{name}.key")
    written: list[Path] = []

    def deliver(token: str) -> None:
        authority = tls.ca_text(folder) if main.has_own_authority(folder) else None
        contents: list[tuple[Path, str | bytes]] = [(token_file, members.token_text(token, authority))]
        if mtls:
            contents += zip((certificate, key), tls.issue_client(folder, name), strict=True)
        for file, content in contents:
            members.write_new(file, content)
            written.append(file)

    try:
        members.invite(folder, name, again=again, deliver=deliver)
    except BaseException:
        _remove(written)
        raise
    lines = [f"{token_file}: give it to {name} over a channel that nobody else can read"]
    return [*lines, f"{certificate} and {key}: its certificate and key"] if mtls else lines


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)
