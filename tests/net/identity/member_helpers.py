"""What the tests of members and of token files share."""

from __future__ import annotations

import stat
import traceback
from pathlib import Path

PEM = "-----BEGIN CERTIFICATE-----\nQUJD\nREVG\n-----END CERTIFICATE-----\n"
SECRET = "s" * 43


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def all_text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error) + str(error)
