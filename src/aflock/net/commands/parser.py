"""The commands of the network: serve, invite, revoke, members, join, status, export.

`cli.py` calls `add`. A command parses its options, calls a function and prints what it returns; it imports what it
needs when it runs, so that `aflock --help` stays quick.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ...errors import InputError


def add(commands: Any) -> None:
    """Adds the commands to the parser of `aflock`."""
    _add_serve(commands)
    _add_membership(commands)
    _add_join(commands)
    _add_status_and_export(commands)


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser("serve", help="serve a federation over the network")
    serve.add_argument("file", nargs="?", help="the federation, a TOML file (--example prints one)")
    serve.add_argument(
        "--data-dir", metavar="FOLDER", help="the data folder of the federation; made if it does not exist"
    )
    serve.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change one key of the file"
    )
    serve.add_argument("--http", action="store_true", help="plain HTTP, for clients on this machine only")
    serve.add_argument("--insecure", action="store_true", help="plain HTTP on any network: others can read the tokens")
    serve.add_argument("--certificate", metavar="FILE", help="a certificate of your own (PEM), with --key")
    serve.add_argument("--key", metavar="FILE", help="its key (PEM)")
    serve.add_argument(
        "--client-ca", metavar="FILE", help="clients must have a certificate signed by this authority (mTLS)"
    )
    serve.add_argument(
        "--accept-loss",
        action="store_true",
        help="start although acknowledged updates are missing, and record the loss",
    )
    serve.add_argument(
        "--log-level", default="info", choices=["debug", "info", "warning", "error"], help="default: info"
    )
    serve.add_argument("--log-json", action="store_true", help="one JSON object per line of the log")
    serve.add_argument("--explain", action="store_true", help="print every key of the file with its meaning")
    serve.add_argument("--example", action="store_true", help="print a file to start from")
    serve.set_defaults(run=_serve)


def _add_membership(commands: Any) -> None:
    invite = commands.add_parser("invite", help="make a token for a client")
    invite.add_argument("folder", help="the federation's data folder")
    invite.add_argument("name", help="the client: a-z, 0-9, _ and -")
    invite.add_argument("--out", metavar="FILE", help="the token file to write; default: NAME.token")
    invite.add_argument(
        "--again", action="store_true", help="a new token for a client that has one; the old one becomes invalid"
    )
    invite.add_argument(
        "--mtls", action="store_true", help="also write NAME.pem and NAME.key, for a server with --client-ca"
    )
    invite.set_defaults(run=_invite)

    revoke = commands.add_parser("revoke", help="revoke a client's right to take part")
    revoke.add_argument("folder", help="the federation's data folder")
    revoke.add_argument("name", help="the client")
    revoke.set_defaults(run=_revoke)

    members = commands.add_parser("members", help="list who was invited to a federation, and who was revoked")
    members.add_argument("folder", help="the federation's data folder")
    members.add_argument("--json", action="store_true", help="print JSON")
    members.set_defaults(run=_members)


def _add_join(commands: Any) -> None:
    join = commands.add_parser("join", help="take part in a federation as a client")
    join.add_argument("url", help="the server, https://host:port")
    join.add_argument("--token-file", required=True, metavar="FILE", help="the token file that `aflock invite` wrote")
    _add_client_file(join, "a Python file that defines `model` and `batches`", required=True)
    join.add_argument(
        "--state-dir", metavar="FOLDER", help="where the client keeps its state; default: in ~/.local/state/aflock"
    )
    join.add_argument("--jobs", type=int, metavar="N", help="stop after so many jobs")
    join.add_argument("--ca", metavar="FILE", help="the server's certificate authority, if not in the token file")
    join.add_argument("--certificate", metavar="FILE", help="the client's certificate (mTLS), with --key")
    join.add_argument("--key", metavar="FILE", help="its key")
    join.add_argument(
        "--insecure", action="store_true", help="plain HTTP to another machine: others can read the token"
    )
    join.add_argument("--quiet", action="store_true", help="print warnings only, not a line per job")
    join.set_defaults(run=_join)


def _add_status_and_export(commands: Any) -> None:
    status = commands.add_parser("status", help="show a running federation: clients, versions, staleness, rates")
    status.add_argument("where", help="the server's URL, or the data folder on the server's own machine")
    status.add_argument("--token-file", metavar="FILE", help='of a member, if the server has [server] status = "token"')
    status.add_argument("--ca", metavar="FILE", help="the server's certificate authority, if not in the token file")
    status.add_argument("--certificate", metavar="FILE", help="your own, if the server asks for one (mTLS), with --key")
    status.add_argument("--key", metavar="FILE", help="its key")
    status.add_argument(
        "--insecure", action="store_true", help="plain HTTP to another machine: others can read the token"
    )
    status.add_argument("--json", action="store_true", help="print JSON, once")
    status.add_argument("--once", action="store_true", help="print the table once, even on a terminal")
    status.set_defaults(run=_status)

    export = commands.add_parser("export", help="write the model of a federation to a file")
    export.add_argument("folder", help="the federation's data folder")
    export.add_argument(
        "--out", default="model.safetensors", metavar="FILE", help="the file to write; default: model.safetensors"
    )
    export.add_argument("--best", action="store_true", help="the best model measured, not the latest")
    _add_client_file(export, "write a state_dict (for torch.load) of this file's `model`, an nn.Module", required=False)
    export.set_defaults(run=_export)


def _add_client_file(command: Any, text: str, *, required: bool) -> None:
    """Adds --client-file, and its old name --recipe, which --help does not show."""
    either = command.add_mutually_exclusive_group(required=required)
    either.add_argument("--client-file", metavar="FILE", help=text)
    either.add_argument("--recipe", dest="client_file", metavar="FILE", help=argparse.SUPPRESS)


def _serve(options: argparse.Namespace) -> int:
    from ..server.settings import EXAMPLE, SCHEMA, Settings

    if options.explain or options.example:
        print(SCHEMA.explain() if options.explain else EXAMPLE, end="")
        return 0
    if options.file is None or options.data_dir is None:
        raise InputError("serve needs a federation file and --data-dir; `aflock serve --example` prints a file")
    folder = Path(options.data_dir)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--data-dir {folder} is a file; expected a folder, or a name that is free")
    from ...system.optional import need

    need("httptools", "cryptography", extra="net", what="a server")
    from ..server.logs import log_to_stderr
    from ..server.main import Options, serve

    log_to_stderr(options.log_level, as_json=options.log_json)
    given = Options(
        insecure=options.insecure,
        plain=options.http,
        certificate=_path(options.certificate),
        key=_path(options.key),
        client_ca=_path(options.client_ca),
        accept_loss=options.accept_loss,
    )
    settings = Settings.read(options.file, options.set)
    return serve(settings, folder, given, lambda line: print(line, flush=True))


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _invite(options: argparse.Namespace) -> int:
    from . import invite

    folder, again, mtls = Path(options.folder), options.again, options.mtls
    for line in invite.write(folder, options.name, _path(options.out), again=again, mtls=mtls):
        print(line)
    return 0


def _revoke(options: argparse.Namespace) -> int:
    from ..identity import members

    members.revoke(Path(options.folder), options.name)
    print(f"{options.name} is revoked; a running server refuses it within a second")
    return 0


def _members(options: argparse.Namespace) -> int:
    from . import members

    folder = Path(options.folder)
    print(json.dumps(members.listing(folder), indent=2) if options.json else members.text(folder))
    return 0


def _join(options: argparse.Namespace) -> int:
    from . import join

    return join.run(options)


def _status(options: argparse.Namespace) -> int:
    from . import status

    return status.show(
        options.where,
        token_file=options.token_file,
        ca=options.ca,
        certificate=options.certificate,
        key=options.key,
        insecure=options.insecure,
        as_json=options.json,
        once=options.once or not sys.stdout.isatty(),
    )


def _export(options: argparse.Namespace) -> int:
    from . import export

    print(export.write(Path(options.folder), Path(options.out), best=options.best, client_file=options.client_file))
    return 0
