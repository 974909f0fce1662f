"""The files that `aflock invite` writes and a client reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from aflock.errors import AflockError, InputError
from aflock.net.commands import invite as invitation
from aflock.net.identity import members
from aflock.net.identity.members import Members, TokenFile, invite, names
from tests.net.identity.member_helpers import PEM, SECRET, all_text, mode


@pytest.mark.parametrize("out", ["no/alice.token", "file/alice.token", "taken", "alice.key"])
def test_who_cannot_be_given_a_token_file_keeps_the_old_token(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fed = tmp_path / "fed"
    fed.mkdir()
    old = invite(fed, "alice")
    (tmp_path / "file").touch()
    (tmp_path / "taken").write_text("precious")
    before = {file.name for file in tmp_path.iterdir()}
    for name in ("alice", "bob"):
        with pytest.raises(InputError, match=r"exist|a folder that you may write to") as caught:
            invitation.write(fed, name, Path(out.replace("alice", name)), again=True, mtls=True)
        assert "aflock1" not in all_text(caught.value)
    assert Members(fed).authenticate(old).generation == 1
    assert set(names(fed)) == {"alice"}
    assert {file.name for file in tmp_path.iterdir()} == before
    assert (tmp_path / "taken").read_text() == "precious"


@pytest.mark.parametrize("file", ["alice.token", "alice.pem", "alice.key"])
def test_nothing_is_overwritten_by_an_invitation(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fed").mkdir()
    Path(file).write_text("precious")
    with pytest.raises(InputError, match=f"{file} already exists"):
        invitation.write(Path("fed"), "alice", mtls=True)
    assert {found.name for found in tmp_path.iterdir()} == {"fed", file}
    assert Path(file).read_text() == "precious"
    assert names(Path("fed")) == {}


def test_a_member_that_cannot_be_stored_gets_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fed" / "members.json").mkdir(parents=True)  # it can be neither read nor written
    with pytest.raises(InputError, match="cannot be read"):
        invitation.write(Path("fed"), "alice", mtls=True)
    (tmp_path / "fed" / "members.json").rmdir()

    def full(file: Path, content: str | bytes, mode: int) -> None:
        assert Path("alice.key").exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(members, "write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        invitation.write(Path("fed"), "alice", mtls=True)
    assert [file.name for file in tmp_path.iterdir()] == ["fed"]


def test_a_wrong_folder_is_told_of_before_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("alice.token").touch()
    with pytest.raises(InputError, match="the folder nofed does not exist"):
        invitation.write(Path("nofed"), "alice")


@pytest.mark.parametrize("ca", [None, PEM, PEM + PEM, PEM.strip(), PEM.replace("\n", "\r\n")])
def test_a_token_file_is_read_as_it_was_written(tmp_path: Path, ca: str | None) -> None:
    token = invite(tmp_path, "alice")
    file = tmp_path / "alice.token"
    members.write_new(file, members.token_text(token, ca))
    assert mode(file) == 0o600
    found = members.read_token_file(file)
    assert (found.token, found.exposed) == (token, False)
    assert found.ca == (None if ca is None else ca.replace("\r\n", "\n").strip() + "\n")
    assert file.read_text().startswith("# aflock: keep this file to yourself\n")


def test_a_token_file_is_not_overwritten(tmp_path: Path) -> None:
    token = invite(tmp_path, "alice")
    file = tmp_path / "alice.token"
    file.write_text("precious")
    with pytest.raises(InputError, match="already exists; remove it, or choose another file") as caught:
        members.write_new(file, members.token_text(token, None))
    assert token not in all_text(caught.value)
    assert file.read_text() == "precious"
    with pytest.raises(InputError, match="does not exist; make it"):
        members.write_new(tmp_path / "no" / "alice.token", members.token_text(token, None))


@pytest.mark.parametrize("ca", ["", "PEM", PEM + '"""\ntoken = "x"', PEM + "\\", "ä" + PEM])
def test_a_ca_that_is_none_is_not_written(tmp_path: Path, ca: str) -> None:
    token = invite(tmp_path, "alice")
    with pytest.raises(InputError, match="is not plain PEM text"):
        members.token_text(token, ca)


@pytest.mark.parametrize("form", ["{}", "{}\n", "\ufeff{}\r\n", "\n  {}  \n"])
def test_the_bare_token_will_do(tmp_path: Path, form: str) -> None:
    token = invite(tmp_path, "alice")
    file = tmp_path / "alice.token"
    file.write_text(form.format(token))
    file.chmod(0o600)
    assert members.read_token_file(file) == TokenFile(token, None, exposed=False)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_token_others_may_read_is_exposed(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "alice.token"
    members.write_new(file, members.token_text(invite(tmp_path, "alice"), PEM))
    file.chmod(mode)
    assert members.read_token_file(file).exposed


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "holds no token"),
        ("ca = 'x'", "holds no token"),
        ("token = 3", "holds no token"),
        ("token = 'aflock1.alice.TOKEN'", "holds no token"),
        ("token = TOKEN", "is not TOML"),
        ("aflock1.alice.TOKEN aflock1.alice.TOKEN", "is not TOML"),
        ("[aflock1.alice.TOKEN]\n[aflock1.alice.TOKEN]", "is not TOML"),
        ("x = " + "[" * 100_000, "is not TOML"),
        ("token = 'aflock1.alice.SECRET'\nca = 'none'", "ca is not a certificate"),
        ("token = 'aflock1.alice.SECRET'\nca = 3", "ca is not a certificate"),
        ("\udcff\udcfe", "is not a text file"),
    ],
    ids=range(11),
)
def test_bad_token_files_are_refused_in_one_sentence(tmp_path: Path, content: str, why: str) -> None:
    file = tmp_path / "alice.token"
    file.write_bytes(content.replace("SECRET", SECRET).encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=why) as caught:
        members.read_token_file(file)
    assert not isinstance(caught.value, UnicodeError)
    for secret in ("TOKEN", SECRET):
        assert secret not in str(caught.value)
        assert secret not in all_text(caught.value)


def test_a_token_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AflockError, match=r"the token file .*alice.token does not exist"):
        members.read_token_file(tmp_path / "alice.token")
    with pytest.raises(AflockError, match="cannot be read"):
        members.read_token_file(tmp_path)


def test_a_token_file_does_not_show_its_token(tmp_path: Path) -> None:
    assert SECRET not in repr(TokenFile(f"aflock1.alice.{SECRET}", None, exposed=False))
