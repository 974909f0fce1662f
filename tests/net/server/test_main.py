"""`aflock serve` where it cannot start: one line says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import aflock
from tests.net.real_server import SMALL, NotStarted, start


@pytest.mark.parametrize(
    ("options", "changes", "says"),
    [
        (["--http"], ["server.host=0.0.0.0"], "--insecure"),
        (["--http", "--client-ca", "x.pem"], [], "certificates are not used without TLS"),
        ([], ["server.port=99999"], "port"),
        (["--certificate", "x.pem"], [], "key"),
        ([], ["evaluation.every=1"], "[evaluation]"),
        ([], ["model.length=100000000000000"], "memory"),
        ([], ["strategy.name=ace", "federation.clients=100000", "model.length=10000000"], "memory"),
    ],
)
def test_a_server_that_cannot_start_says_why(tmp_path: Path, options: list[str], changes: list[str], says: str) -> None:
    with pytest.raises(NotStarted) as stopped:
        start(tmp_path / "fed", SMALL, tls=True, options=options, changes=changes)
    assert stopped.value.code == (1 if says == "memory" else 2), stopped.value.errors  # not every error is the user's
    assert stopped.value.errors.count("\n") == 1
    assert says in stopped.value.errors


def test_a_data_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fed").touch()
    (tmp_path / "federation.toml").write_text(aflock("serve", "--example")[1])
    code, _, err = aflock("serve", tmp_path / "federation.toml", "--data-dir", tmp_path / "fed")
    assert (code, err) == (
        2,
        f"aflock: --data-dir {tmp_path / 'fed'} is a file; expected a folder, or a name that is free\n",
    )
