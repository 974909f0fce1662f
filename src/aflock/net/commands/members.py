"""`aflock members`: lists who was invited to a federation, when, and who was revoked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..identity import members


def listing(folder: Path) -> list[dict[str, Any]]:
    """Everyone who was ever invited, by name; `invited` is when the member's present token was made."""
    found = members.names(folder)
    return [{"name": name, "invited": found[name].invited, "revoked": found[name].revoked} for name in sorted(found)]


def text(folder: Path) -> str:
    """The same as text, one line per member."""
    found = listing(folder)
    if not found:
        return f"no member was invited yet; make a token with: aflock invite {folder} alice"
    width = max(len(member["name"]) for member in found)
    return "\n".join(
        f"{member['name']:<{width}}  invited {member['invited']}{'  revoked' if member['revoked'] else ''}"
        for member in found
    )
