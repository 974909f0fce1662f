"""What an operator sees: files that are refused, addresses, the list of members, the status table, log lines."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from aflock import Client, cli
from aflock.errors import ParameterError, StateError
from aflock.net.client.state import ClientState
from aflock.net.commands import status_table
from aflock.net.server import settings
from tests.net.real_server import NotStarted, Server, invite, joined, output, running, working

pytestmark = pytest.mark.timeout(120)

LONG = "a-very-long-name-of-a-hospital-in-a-town-by-the-sea-ward-no-0001"


def _aflock(*arguments: str | Path) -> tuple[int, str, str]:
    """The command line: exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([*map(str, arguments)])
    return code, out.getvalue(), err.getvalue()


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["local.name=scaffold"], "[local] scaffold does not go with asgd: it needs the job to carry 'control'"),
        (["strategy.name=fedbuff+scaffold", "local.name=sgd"], "sgd does not go with fedbuff+scaffold: it sends no"),
        (["server.port=65536"], "[server]: port=65536 is not valid; expected an integer from 0 to 65535"),
        (["server.names=7"], "[server]: names=7 is not valid; expected names or addresses, separated by commas"),
    ],
)
def test_a_file_that_cannot_work_is_refused_at_start(changes: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(NotStarted) as stopped, running(tmp_path / "fed", changes=changes, orderly=False):
        pass
    assert (stopped.value.code, stopped.value.errors.count("\n")) == (2, 1)
    assert says in stopped.value.errors
    assert list((tmp_path / "fed").iterdir()) == []


def test_a_port_that_is_taken_may_be_free_at_the_next_start(tmp_path: Path) -> None:
    """Code 2 would tell systemd not to try again (docs/server.md)."""
    with running(tmp_path / "fed") as server:
        other = running(tmp_path / "other", changes=[f"server.port={server.port}"], orderly=False)
        with pytest.raises(NotStarted) as stopped, other:
            pass
    assert stopped.value.code == 1
    assert "Address already in use; change [server] host or port" in stopped.value.errors


def test_a_federation_goes_on_with_better_advice_than_it_began_with(tmp_path: Path) -> None:
    with running(tmp_path / "fed") as server:
        joined(server, "alice")
    began = tmp_path / "fed" / "federation.toml"
    began.write_text(re.sub(r'\[local\]\nname = "\w+"', '[local]\nname = "scaffold"', began.read_text()))
    assert 'name = "scaffold"' in began.read_text()
    with running(tmp_path / "fed", orderly=False) as server:
        assert server.status()["clients"][0]["name"] == "alice"


def test_host_and_names_are_explained_as_what_they_are() -> None:
    machine = settings.SCHEMA.explain().split("[server]")[1].split("[evaluation]")[0]
    assert "the path of" not in machine
    assert "only this machine can reach it" in machine


# --- the address -----------------------------------------------------------------------------------------------------


def test_the_url_for_others_has_the_first_name_and_this_machine_needs_none(tmp_path: Path) -> None:
    names = "server.names=fed.example.org, 127.0.0.1"
    with running(tmp_path / "fed", tls=True, changes=[names], orderly=False) as server:
        public = f"https://fed.example.org:{server.port}"
        printed = output(server.folder, "out").read_text()
        assert f"8 weights, at {public}\n" in printed
        assert f"aflock join {public} " in printed
        assert server.url == f"https://127.0.0.1:{server.port}"
        assert json.loads(_aflock("status", server.folder, "--json")[1])["verified"] is True


def test_an_address_among_the_names_has_brackets_where_a_url_needs_them(tmp_path: Path) -> None:
    with running(tmp_path / "fed", tls=True, changes=["server.names=2001:db8::7"], orderly=False) as server:
        assert f"at https://[2001:db8::7]:{server.port}\n" in output(server.folder, "out").read_text()


# --- the log ---------------------------------------------------------------------------------------------------------


def test_a_line_of_the_log_says_when_in_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    with running(tmp_path / "fed", orderly=False) as server:
        found = re.match(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) INFO serving at ", server.errors)
    assert found
    assert abs(datetime.fromisoformat(found[1]) - datetime.now(UTC)) < timedelta(hours=1)


# --- the members -----------------------------------------------------------------------------------------------------


def test_the_members_are_listed_without_their_secrets(tmp_path: Path) -> None:
    code, out, _ = _aflock("members", tmp_path)
    assert (code, out) == (0, f"no member was invited yet; make a token with: aflock invite {tmp_path} alice\n")
    for name in ("bob", "alice-of-the-hills"):
        assert _aflock("invite", tmp_path, name, "--out", tmp_path / f"{name}.token")[0] == 0
    assert _aflock("revoke", tmp_path, "bob")[0] == 0
    lines = _aflock("members", tmp_path)[1].splitlines()
    when = r"invited \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    assert re.fullmatch(f"alice-of-the-hills  {when}", lines[0])
    assert re.fullmatch(f"bob {{17}}{when}  revoked", lines[1])
    found = json.loads(_aflock("members", tmp_path, "--json")[1])
    assert [(member["name"], member["revoked"]) for member in found] == [("alice-of-the-hills", False), ("bob", True)]
    assert {key for member in found for key in member} == {"name", "invited", "revoked"}


def test_members_of_no_federation(tmp_path: Path) -> None:
    code, _, err = _aflock("members", tmp_path / "nowhere")
    assert (code, err.count("\n")) == (2, 1)
    assert "does not exist" in err


# --- clients ---------------------------------------------------------------------------------------------------------


def test_a_client_with_another_model_is_not_waited_for(tmp_path: Path) -> None:
    with running(tmp_path / "fed", changes=["federation.clients=2", "model.length=15"]) as server:
        client = Client(server.url, invite(tmp_path / "fed", "alice"), keep=False)
        with pytest.raises(ParameterError, match="has 6 weights, the federation's 15"):
            client.run(nn.Linear(2, 2), [(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))])
        assert server.status()["waiting_for"] == 2


# --- a backup --------------------------------------------------------------------------------------------------------


def test_a_copy_in_the_documented_order_is_whole_while_updates_come(tmp_path: Path) -> None:
    folder, backup = tmp_path / "fed", tmp_path / "backup"
    changes, vector = ["model.length=1000", "server.snapshot=1"], np.ones(1000, np.float32)
    with running(folder, changes=changes, orderly=False) as server:
        alice = working(server, "alice")
        while not list(folder.glob("snapshot-*")):
            assert alice.push(vector, next=True)[0] == 200
        pushing = threading.Thread(target=lambda: [alice.push(vector, next=True) for _ in range(100)])
        pushing.start()  # too few for the next snapshot
        acknowledged = _copied(server, backup)
        pushing.join()
    with running(backup, changes=changes) as server:
        assert server.status()["updates"] >= acknowledged > 0
        assert "lost" not in server.errors
    assert _aflock("replay", backup / "trace.jsonl")[0] == 0


def _copied(server: Server, backup: Path) -> int:
    """Copies as docs/server.md says; returns how many updates were taken before the journal was copied."""
    section = (Path(__file__).parents[3] / "docs" / "server.md").read_text().split("**Backup.**")[1]
    snapshots, trace, *rest = re.findall(r"^    (cp [^#\n]*)", section, re.M)
    assert ("snapshot" in snapshots, "trace" in trace, "journal" in rest[0]) == (True, True, True)
    backup.mkdir(mode=0o700)
    for command in (snapshots, trace):
        _cp(command, backup.parent)
    acknowledged = int(server.status()["updates"])
    for command in rest:
        _cp(command.replace(" fed/tls", ""), backup.parent)  # this one speaks plain HTTP
    return acknowledged


def _cp(command: str, where: Path) -> None:
    subprocess.run(command, shell=True, check=True, cwd=where)


# --- the table -------------------------------------------------------------------------------------------------------


def _printed(found: dict[str, Any], width: int) -> list[str]:
    """The lines of the table, without the summary."""
    out = io.StringIO()
    Console(file=out, width=width).print(status_table.table(found, width))
    return [line for line in out.getvalue().splitlines() if line[0] in "┃│"]


def test_a_client_has_one_line_however_long_its_name_and_numbers(tmp_path: Path) -> None:
    found = _crowded(tmp_path)
    for width in (40, 60, 80, 100, 200):
        head, first, second = _printed(found, width)
        assert max(map(len, (head, first, second))) <= width
        assert "123456789" in first
        name = first.split()[1]
        assert name == LONG if width == 200 else re.fullmatch(r"a-very.*….*0001", name)
        assert "bob" in second
        assert ("seen" in head, "143 d ago" in first) == (width >= 60, width >= 60)


def _crowded(folder: Path) -> dict[str, Any]:
    """The status of a real server after years."""
    with running(folder / "fed", orderly=False) as server:
        joined(server, LONG)
        joined(server, "bob")
        found = server.status()
    found["clients"].sort(key=lambda client: client["name"])
    found["clients"][0] |= {"number": 123456, "state": "suspended", "version": 12345678, "jobs": 12345678}
    found["clients"][0] |= {"updates": 123456789, "share": 1.0, "staleness_mean": 12345.67, "seen": 12345678.0}
    return found


def test_short_names_leave_room_for_every_column(tmp_path: Path) -> None:
    with running(tmp_path / "fed", orderly=False) as server:
        joined(server, "alice")
        head, row = _printed(server.status(), 80)
    assert head.replace("┃", " ").split() == list(status_table.COLUMNS)
    assert "alice" in row


@pytest.mark.parametrize(
    ("seconds", "says"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (172_800, "2 d")]
)
def test_a_time_in_its_largest_unit(seconds: float, says: str) -> None:
    assert status_table.duration(seconds) == says


# --- a client's folder -----------------------------------------------------------------------------------------------


def test_a_state_folder_that_fails_is_named(tmp_path: Path) -> None:
    kept = ClientState(tmp_path, "fed")
    (tmp_path / "pending.safetensors").mkdir()
    with pytest.raises(StateError, match=re.escape(f"{tmp_path} cannot be used (Is a directory)")):
        kept.discard_pending()
    kept.close()
