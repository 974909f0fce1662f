"""The commands of the network room: serve, invite, revoke, members, join, status, export. Parse, call, print."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..errors import InputError


def add(commands: Any) -> None:
    """Adds the commands to the parser."""
    _add_serve(commands)
    _add_membership(commands)
    _add_join(commands)
    _add_looks(commands)


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser("serve", help="serve a federation over the network")
    serve.add_argument("file", nargs="?", help="the federation, a TOML file (--example prints one)")
    serve.add_argument("--data-dir", metavar="FOLDER", help="where everything is kept; made if it does not exist")
    serve.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change one key")
    serve.add_argument("--http", action="store_true", help="plain HTTP; on this machine only")
    serve.add_argument("--insecure", action="store_true", help="plain HTTP on any network: tokens can be read")
    serve.add_argument("--certificate", metavar="FILE", help="a certificate of your own (PEM), with --key")
    serve.add_argument("--key", metavar="FILE", help="its key (PEM)")
    serve.add_argument("--client-ca", metavar="FILE", help="clients must show a certificate of this authority (mTLS)")
    serve.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"], help="info")
    serve.add_argument("--log-json", action="store_true", help="one JSON object per line of the log")
    serve.add_argument("--explain", action="store_true", help="every key of the file with its meaning")
    serve.add_argument("--example", action="store_true", help="a file to start from")
    serve.set_defaults(run=_serve)


def _add_membership(commands: Any) -> None:
    invite = commands.add_parser("invite", help="make a token for a client")
    invite.add_argument("folder", help="the federation's folder")
    invite.add_argument("name", help="the client: a-z, 0-9, _ and -")
    invite.add_argument("--out", metavar="FILE", help="where the token goes; default: NAME.token")
    invite.add_argument("--again", action="store_true", help="a new token for a client that has one; the old one ends")
    invite.add_argument("--mtls", action="store_true", help="also NAME.pem and NAME.key, for a server with --client-ca")
    invite.set_defaults(run=_invite)

    revoke = commands.add_parser("revoke", help="shut a client out of a federation")
    revoke.add_argument("folder", help="the federation's folder")
    revoke.add_argument("name", help="the client")
    revoke.set_defaults(run=_revoke)

    members = commands.add_parser("members", help="who was invited to a federation, and who was shut out")
    members.add_argument("folder", help="the federation's folder")
    members.add_argument("--json", action="store_true", help="print JSON")
    members.set_defaults(run=_members)


def _add_join(commands: Any) -> None:
    join = commands.add_parser("join", help="take part in a federation as a client")
    join.add_argument("url", help="the server, https://host:port")
    join.add_argument("--token-file", required=True, metavar="FILE", help="what `aflock invite` made")
    join.add_argument("--recipe", required=True, metavar="FILE", help="Python file with `model` and `batches`")
    join.add_argument("--state-dir", metavar="FOLDER", help="what the client remembers; default: in your state folder")
    join.add_argument("--jobs", type=int, metavar="N", help="stop after so many jobs")
    join.add_argument("--ca", metavar="FILE", help="the server's certificate authority, if not in the token file")
    join.add_argument("--certificate", metavar="FILE", help="the client's certificate (mTLS), with --key")
    join.add_argument("--key", metavar="FILE", help="its key")
    join.add_argument("--insecure", action="store_true", help="plain HTTP to another machine: the token can be read")
    join.add_argument("--quiet", action="store_true", help="no line per job")
    join.set_defaults(run=_join)


def _add_looks(commands: Any) -> None:
    status = commands.add_parser("status", help="a running federation: clients, versions, staleness, rates")
    status.add_argument("where", help="the server's URL, or the federation's folder on its own machine")
    status.add_argument("--token-file", metavar="FILE", help='a member\'s, if the server has [server] status = "token"')
    status.add_argument("--ca", metavar="FILE", help="the server's certificate authority, if not in the token file")
    status.add_argument("--certificate", metavar="FILE", help="yours, if the server asks for one, with --key")
    status.add_argument("--key", metavar="FILE", help="its key")
    status.add_argument("--insecure", action="store_true", help="plain HTTP to another machine: the token can be read")
    status.add_argument("--json", action="store_true", help="print JSON, once")
    status.add_argument("--once", action="store_true", help="print the table once, even on a terminal")
    status.set_defaults(run=_status)

    export = commands.add_parser("export", help="the model of a federation as a file")
    export.add_argument("folder", help="the federation's folder")
    export.add_argument("--out", default="model.safetensors", metavar="FILE", help="model.safetensors")
    export.add_argument("--best", action="store_true", help="the best one measured, not the latest")
    export.add_argument("--recipe", metavar="FILE", help="with its `model`, an nn.Module: a state_dict for torch.load")
    export.set_defaults(run=_export)


def _serve(options: argparse.Namespace) -> int:
    from . import settings as files

    if options.explain or options.example:
        print(files.SCHEMA.explain() if options.explain else files.EXAMPLE, end="")
        return 0
    if options.file is None or options.data_dir is None:
        raise InputError("serve needs a federation file and --data-dir; `aflock serve --example` prints a file")
    folder = Path(options.data_dir)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--data-dir {folder} is a file; expected a folder, or a name that is free")
    from ..extras import need

    need("uvicorn", "httptools", "cryptography", extra="net", what="a server")
    from .logs import log_to_stderr
    from .serve import Options, serve

    log_to_stderr(options.log_level, as_json=options.log_json)
    given = Options(
        insecure=options.insecure,
        plain=options.http,
        certificate=_path(options.certificate),
        key=_path(options.key),
        client_ca=_path(options.client_ca),
    )
    settings = files.Settings.read(options.file, options.set)
    return serve(settings, folder, given, lambda line: print(line, flush=True))


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _invite(options: argparse.Namespace) -> int:
    from . import invitation

    folder, again, mtls = Path(options.folder), options.again, options.mtls
    for line in invitation.write(folder, options.name, _path(options.out), again=again, mtls=mtls):
        print(line)
    return 0


def _revoke(options: argparse.Namespace) -> int:
    from . import members

    members.revoke(Path(options.folder), options.name)
    print(f"{options.name} is shut out; a running server takes notice within a second")
    return 0


def _members(options: argparse.Namespace) -> int:
    from . import roll

    folder = Path(options.folder)
    print(json.dumps(roll.listing(folder), indent=2) if options.json else roll.text(folder))
    return 0


def _join(options: argparse.Namespace) -> int:
    from . import join

    return join.run(options)


def _status(options: argparse.Namespace) -> int:
    from . import look

    return look.show(
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

    print(export.write(Path(options.folder), Path(options.out), best=options.best, recipe=options.recipe))
    return 0
