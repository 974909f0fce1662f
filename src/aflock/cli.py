"""The command line: parse, call, print; no logic.

Heavy modules are imported by the command that needs them, so that `aflock --help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from . import __version__
from .errors import AflockError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code (0 done, 1 the run failed, 2 wrong usage)."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help()
        return 0
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough (`| head`); nothing more can be said, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (AflockError, OSError) as error:
        if options.debug:
            raise
        print(f"aflock: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("aflock: interrupted", file=sys.stderr)
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aflock",
        description="Asynchronous federated learning: many clients train one model, nobody waits for anybody.",
    )
    parser.add_argument("--version", action="version", version=f"aflock {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    listing = commands.add_parser("list", help="print the rules with their papers, parameters and defaults")
    listing.add_argument("what", choices=["strategies", "local"], help="server rules or client rules")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)

    demo = commands.add_parser("demo", help="run every rule on an uneven federation; who reaches the optimum?")
    demo.add_argument("--arrivals", type=_positive, default=None, metavar="N", help="client reports per rule")
    demo.add_argument("--json", action="store_true", help="print JSON")
    demo.set_defaults(run=_demo)

    bench = commands.add_parser("bench", help="measure speed; all ratios from one run")
    bench.add_argument("what", choices=["server"], help="server: what one arrival costs, rule by rule")
    bench.add_argument("--quick", action="store_true", help="smaller models, fewer repeats: a look, not a measurement")
    bench.add_argument("--json", action="store_true", help="print JSON instead of the table")
    bench.add_argument("--out", metavar="FILE", help="also write the JSON to a file")
    bench.set_defaults(run=_bench)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _list(options: argparse.Namespace) -> int:
    from . import local, strategies

    entries = strategies.entries() if options.what == "strategies" else local.entries()
    described = [entry.describe() for entry in entries]
    if options.json:
        print(json.dumps(described, indent=2))
    else:
        print("\n\n".join(map(_entry_text, described)))
    return 0


def _entry_text(entry: dict[str, Any]) -> str:
    lines = [f"{entry['name']}", f"    {entry['rule']}", f"    {entry['paper']}"]
    if "needs" in entry:
        opening = "; first: every client's gradient at w0" if entry["first"] else ""
        lines.append(f"    needs: {', '.join(entry['needs'])}{opening}")
        lines.append(f"    uneven clients: {_ENDS[entry['optimum']]}")
    for parameter in entry["parameters"]:
        default = parameter["default"]
        shown = f"{default:.6g}" if isinstance(default, float) else str(default)
        text = f"{parameter['help']} ({parameter['expected']})"
        lines.append(f"      {parameter['name'] + '=' + shown:<24} {text}")
    return "\n".join(lines)


_ENDS = {
    "true": "reaches the optimum of all of them",
    "step": "reaches the optimum of all of them, to the order of its step",
    "biased": "ends nearer to what the fast ones want",
}


def _demo(options: argparse.Namespace) -> int:
    from . import demo, strategies

    names, runs = strategies.names(), []
    for count, name in enumerate(names, 1):
        if sys.stderr.isatty():
            print(f"\r\033[K{count}/{len(names)} {name} ...", end="", file=sys.stderr, flush=True)
        runs.append(demo.run(name, arrivals=options.arrivals or demo.ARRIVALS))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    print(json.dumps([demo.describe(run) for run in runs], indent=2) if options.json else demo.table(runs))
    return 0


def _bench(options: argparse.Namespace) -> int:
    from .bench import server

    def progress(text: str) -> None:
        print(f"bench: {text}", file=sys.stderr, flush=True)

    if options.out and not os.access(os.path.dirname(options.out) or ".", os.W_OK):
        raise NotADirectoryError(f"{options.out} cannot be written: its folder does not exist or is read-only")
    report = server.measure(quick=options.quick, progress=progress)
    document = json.dumps(report, indent=2)
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            file.write(document + "\n")
    print(document if options.json else server.table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
