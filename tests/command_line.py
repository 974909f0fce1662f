"""The command line, called in this process."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from aflock import cli


def aflock(*arguments: str | Path, cwd: Path | None = None) -> tuple[int, str, str]:
    """The command line: exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(cwd or "."):
        code = cli.main([*map(str, arguments)])
    return code, out.getvalue(), err.getvalue()
