"""The error that says that a strategy raised while a record was applied."""

from __future__ import annotations

import re

from ...errors import AflockError

_LONGEST_REASON = 200
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class RuleFailed(AflockError):
    """The strategy raised while a record was applied; the caller must restore the federation before it goes on.

    `reason` becomes part of the receipt and of the trace.
    """

    def __init__(self, error: Exception) -> None:
        self.reason = f"the rule failed: {_in_one_line(f'{type(error).__name__}: {error}')}"
        super().__init__(self.reason)


def _in_one_line(text: str) -> str:
    """The text of an error without line breaks, fit for a header, and without the addresses of objects.

    Addresses differ from process to process, and a replay must make the same trace.
    """
    plain = "".join(c if c.isascii() and c.isprintable() else " " for c in _ADDRESS.sub("0x", text))
    return " ".join(plain.split())[:_LONGEST_REASON]
