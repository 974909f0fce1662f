"""The command line: parse, call, print; no logic.

Heavy modules are imported by the command that needs them, so that `aflock --help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import __version__
from .errors import AflockError, InputError
from .net.commands import parser as network


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
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt as interrupt:
        print(f"aflock: {str(interrupt) or 'interrupted'}", file=sys.stderr)
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
    _add_lookups(commands)
    _add_simulations(commands)
    _add_showcases(commands)
    _add_recipes(commands)
    network.add(commands)
    return parser


def _add_lookups(commands: Any) -> None:
    listing = commands.add_parser("list", help="print rules, datasets, models ... with their parameters and defaults")
    listing.add_argument("what", choices=list(_LISTS), help="what to list")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)

    data = commands.add_parser("data", help="list the datasets, fetch one, describe one")
    data.add_argument("what", choices=["list", "get", "info"], help="list all, fetch one, or describe one")
    data.add_argument("name", nargs="?", help="the dataset")
    data.add_argument("--from", dest="mine", metavar="PATH", help="get: a file or folder you have already")
    data.add_argument("--quiet", action="store_true", help="no progress")
    data.add_argument("--json", action="store_true", help="print JSON")
    data.set_defaults(run=_data)

    config = commands.add_parser("config", help="explain the experiment file, or check one")
    config.add_argument("file", nargs="?", help="print this file with every default filled in")
    config.add_argument("--explain", action="store_true", help="every key with its default, range and meaning")
    config.add_argument("--example", action="store_true", help="a file to start from")
    _add_changes(config)
    config.set_defaults(run=_config)


def _add_simulations(commands: Any) -> None:
    partition = commands.add_parser("partition", help="who holds what: the split of an experiment's data")
    partition.add_argument("file", help="the experiment, a TOML file")
    _add_changes(partition)
    partition.add_argument("--out", metavar="FOLDER", help="write partition.txt and partition.png there")
    partition.set_defaults(run=_partition)

    run = commands.add_parser("run", help="simulate a federation from an experiment file")
    run.add_argument("file", help="the experiment, a TOML file (`aflock config --example` prints one)")
    _add_changes(run)
    run.add_argument("--out", metavar="FOLDER", help="where the run goes; default: runs/FILE-RULE-NUMBER")
    run.add_argument("--resume", metavar="FOLDER", help="go on with an interrupted run (with the --set it had)")
    run.add_argument("--tensorboard", action="store_true", help="write measurements for TensorBoard, too")
    _add_output(run)
    run.set_defaults(run=_run)

    compare = commands.add_parser("compare", help="several rules on the same data, clients and durations")
    compare.add_argument("file", help="the experiment, a TOML file")
    compare.add_argument("--strategies", required=True, metavar="A,B,...", help="the rules; fedbuff:buffer=5 sets one")
    compare.add_argument("--seeds", type=_positive, default=1, metavar="N", help="runs per rule (default 1)")
    _add_changes(compare)
    compare.add_argument("--out", metavar="FOLDER", help="write table, JSON and figure there")
    _add_output(compare)
    compare.set_defaults(run=_compare)

    replay = commands.add_parser("replay", help="what would another rule have done with the arrivals of a run?")
    replay.add_argument("trace", help="the trace.jsonl of a run or a federation, or its folder")
    replay.add_argument("--strategy", metavar="NAME", help="another rule; fedbuff:buffer=5 sets a parameter")
    replay.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")
    replay.set_defaults(run=_replay)


def _add_showcases(commands: Any) -> None:
    demo = commands.add_parser("demo", help="twelve rules on handwritten digits: what uneven clients do to each")
    demo.add_argument("--uploads", type=_positive, default=None, metavar="N", help="client reports per rule")
    demo.add_argument("--out", default="runs/demo", metavar="FOLDER", help="where the figure goes (runs/demo)")
    demo.add_argument("--json", action="store_true", help="print JSON")
    demo.set_defaults(run=_demo)

    optimum = commands.add_parser("optimum", help="every rule on quadratics: who reaches the true optimum?")
    optimum.add_argument("--arrivals", type=_positive, default=None, metavar="N", help="client reports per rule")
    optimum.add_argument("--json", action="store_true", help="print JSON")
    optimum.set_defaults(run=_optimum)

    bench = commands.add_parser("bench", help="measure speed; all ratios from one run")
    bench.add_argument("what", choices=["server", "sim", "net"], help="an arrival, simulations, the network")
    bench.add_argument("--quick", action="store_true", help="fewer repeats; not precise enough to compare")
    bench.add_argument("--json", action="store_true", help="print JSON instead of the table")
    bench.add_argument("--out", metavar="FILE", help="also write the JSON to a file")
    bench.set_defaults(run=_bench)


def _add_recipes(commands: Any) -> None:
    recipes = commands.add_parser("recipes", help="the tables and figures of the papers that can be run")
    recipes.add_argument("--json", action="store_true", help="print JSON")
    recipes.set_defaults(run=_list, what="recipes")

    again = commands.add_parser("reproduce", help="run a table or figure of a paper; a killed one goes on where it was")
    again.add_argument("name", nargs="?", help="the recipe (`aflock recipes` lists them)")
    again.add_argument(
        "--check", action="store_true", help="run some stored cells again, of all recipes or the one named"
    )
    again.add_argument(
        "--cells", type=_positive, default=1, metavar="N", help="with --check: runs per stored result (1)"
    )
    again.add_argument(
        "--scale", default="laptop", help="smoke (seconds), laptop (the default), cnn or paper, as the recipe has them"
    )
    again.add_argument("--seeds", type=_positive, default=None, metavar="N", help="runs per cell")
    again.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, metavar="N", help="runs side by side")
    _add_executor(again)
    again.add_argument("--out", default="results", metavar="FOLDER", help="where results are kept (results)")
    again.add_argument("--quiet", action="store_true", help="no progress")
    again.set_defaults(run=_reproduce)

    page = commands.add_parser("reproduction", help="write the page of all stored results")
    page.add_argument("--results", default="results", metavar="FOLDER", help="where results are kept (results)")
    page.add_argument("--out", default="docs/reproduction.md", metavar="FILE", help="docs/reproduction.md")
    page.set_defaults(run=_reproduction)


def _add_changes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change one key")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=_positive, default=0, metavar="N", help="train in N processes; the result is the same bits"
    )
    _add_executor(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")


def _add_executor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--executor",
        choices=("auto", "inline", "processes", "ray"),
        default="auto",
        help="where clients are trained: in this process, in others, or on a Ray cluster; the same bits everywhere",
    )
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="of the Ray cluster: auto, HOST:PORT or ray://HOST:PORT; without it, one on this machine for this run",
    )


def _stdout_for_results(options: argparse.Namespace) -> AbstractContextManager[Any]:
    """Ray writes messages about lost workers to the standard output, where a program reads our result: not inside."""
    return redirect_stdout(sys.stderr) if options.executor == "ray" else nullcontext()


def _placement(options: argparse.Namespace) -> Any:
    from .sim.executors import Placement

    return Placement(options.workers, options.executor, options.address)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


_LISTS = {
    "strategies": "strategies",
    "local": "local",
    "datasets": "data",
    "partitions": "data.partition",
    "models": "models",
    "delays": "sim.delays",
    "recipes": "recipes",
}


def _list(options: argparse.Namespace) -> int:
    entries = importlib.import_module(f".{_LISTS[options.what]}", __package__).entries()
    described = [entry.describe() for entry in entries]
    if options.json:
        print(json.dumps(described, indent=2))
    else:
        print("\n\n".join(map(_entry_text, described)))
    return 0


def _data(options: argparse.Namespace) -> int:
    from .data import commands

    if options.what != "list" and options.name is None:
        raise InputError(f"aflock data {options.what} needs the name of a dataset; `aflock data list` prints them")
    if options.what == "list":
        print(json.dumps(commands.listing(), indent=2) if options.json else commands.listing_text())
        return 0
    if options.what == "get":
        got = commands.fetch(options.name, mine=options.mine, quiet=options.quiet or options.json)
        print(json.dumps(got, indent=2) if options.json else commands.fetch_text(got))
        return 0
    known = commands.info(options.name)
    print(json.dumps(known, indent=2) if options.json else commands.info_text(known))
    return 0


def _run(options: argparse.Namespace) -> int:
    from .runs import running
    from .runs.progress import ProgressBar
    from .sim.experiment import Experiment

    if options.resume and options.out:
        raise InputError("--out and --resume do not go together; a resumed run stays in its folder")
    resumed = Path(options.resume) if options.resume else None
    changes = options.set or (running.changes_of(resumed) if resumed else [])
    experiment = Experiment.read(options.file, changes)
    folder = resumed or (Path(options.out) if options.out else _free_folder(options.file, experiment))
    begin = running.resume if resumed else running.run
    with ProgressBar(experiment, quiet=options.quiet or options.json) as progress, _stdout_for_results(options):
        result = begin(
            experiment, folder, watch=progress.update, placement=_placement(options), tensorboard=options.tensorboard
        )
    _print_result(asdict(result) | ({} if options.json else {"folder": folder, **_trained(folder)}), options.json)
    return 0


def _trained(folder: Path) -> dict[str, str]:
    """Where the clients were trained, if that was for the executor to decide."""
    last = json.loads((folder / "executor.json").read_text(encoding="utf-8"))[-1]
    return {"trained": f"{last['computed']}: {last['why']}"} if last["executor"] == "ray" else {}


def _free_folder(file: str, experiment: Any) -> Path:
    stem = f"{Path(file).stem}-{experiment.section('strategy').name}"
    number = 1
    while (folder := Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return folder


def _compare(options: argparse.Namespace) -> int:
    from .reports import figures, tables
    from .runs import running
    from .runs.progress import ProgressBar
    from .sim.experiment import Experiment
    from .sim.simulation import Simulation
    from .system.files import to_json, write_whole

    experiment = Experiment.read(options.file, options.set)
    names = split_rules(options.strategies)
    folder = Path(options.out) if options.out else None
    if folder is not None and folder.exists():
        raise InputError(f"{folder} exists already; choose another --out")
    for name in names:
        Simulation(experiment.variant(name, 0))  # what cannot run says so before anything is run
    if folder is not None:
        folder.mkdir(parents=True)
    bar = ProgressBar(experiment, quiet=options.quiet or options.json, runs=len(names) * options.seeds)
    with bar as progress, _stdout_for_results(options):
        found = running.compare(
            experiment,
            names,
            options.seeds,
            watch=progress.update_named,
            placement=_placement(options),
            say=lambda line: None if options.quiet or options.json else print(line, file=sys.stderr),
        )
    described = running.describe(found)
    table = tables.comparison(described)
    if folder is not None:
        write_whole(folder / "comparison.json", to_json(described, 1) + "\n")
        write_whole(folder / "comparison.txt", table + "\n")
        curves = {name: [run["curve"] for run in listed] for name, listed in described.items()}
        figures.accuracy_figure(folder / "comparison.png", curves, _title(options), list(figures.AXES))
    print(to_json(described) if options.json else table)
    return 0


def split_rules(text: str) -> list[str]:
    """Rules apart by commas, each with parameters of its own: "ace,fedbuff:buffer=5,lr=0.5,asgd"."""
    rules: list[str] = []
    for part in filter(None, text.split(",")):
        if rules and "=" in part and ":" not in part:
            rules[-1] += f",{part}"
        else:
            rules.append(part)
    if not rules or len(set(rules)) < len(rules):
        raise InputError(f"--strategies {text!r} names {'a rule twice' if rules else 'no rule'}")
    return rules


def _title(options: argparse.Namespace) -> str:
    seeds = f", mean and 95 % interval over {options.seeds} seeds" if options.seeds > 1 else ""
    return f"{Path(options.file).stem}{seeds}"


def _partition(options: argparse.Namespace) -> int:
    from .runs.recorder import write_partition
    from .sim.experiment import Experiment
    from .sim.parts import split

    dataset, shares = split(Experiment.read(options.file, options.set))
    if options.out:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        write_partition(dataset, shares, folder)
    print(shares.table(dataset.train_y, dataset.classes))
    return 0


def _replay(options: argparse.Namespace) -> int:
    from .sim import replay
    from .sim.experiment import Experiment
    from .sim.simulation import Simulation

    given = Path(options.trace)
    trace = given / "trace.jsonl" if given.is_dir() else given
    if not trace.is_file():
        raise InputError(f"{trace} does not exist; expected the trace.jsonl of a run or a federation")
    if trace.with_name("federation.toml").exists() or trace.with_name("journal").is_dir():
        return _replay_federation(trace, options)
    experiment = Experiment.read(trace.with_name("config.toml"))
    simulation = Simulation(experiment.variant(options.strategy, 0) if options.strategy else experiment)
    skipped = replay.replay(simulation, replay.read(trace))
    described = asdict(simulation.result()) | {"skipped": skipped}
    _print_result(described, options.json)
    return 0


def _replay_federation(trace: Path, options: argparse.Namespace) -> int:
    from .net.commands.replay import replay

    if options.strategy:
        raise InputError("the updates of a federation were made for its own rule; leave --strategy out")
    described = replay(trace)
    _print_result(described, options.json)
    return 0 if described["agrees"] else 1


def _print_result(described: dict[str, Any], as_json: bool) -> None:
    from .system.files import to_json

    if as_json:
        print(to_json(described, 2))
    else:
        print("\n".join(f"{name:<22}{value}" for name, value in described.items()))


def _config(options: argparse.Namespace) -> int:
    from .sim import experiment

    if options.explain:
        print(experiment.explain())
    elif options.example or not options.file:
        print(experiment.Experiment.build({}, options.set).template(), end="")
    else:
        print(experiment.Experiment.read(options.file, options.set).template(), end="")
    return 0


def _entry_text(entry: dict[str, Any]) -> str:
    lines = [entry["name"]]
    lines += [f"    {entry[key]}" for key in ("rule", "paper", "description", "source") if key in entry]
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
    "true": "reaches the optimum of all clients",
    "step": "reaches the optimum of all clients, to the order of its step",
    "biased": "ends nearer to the optimum of the fast clients",
}


def _demo(options: argparse.Namespace) -> int:
    from .runs.progress import ProgressBar
    from .showcase import demo
    from .sim.experiment import Experiment
    from .system.files import write_whole

    uploads = options.uploads or demo.UPLOADS
    experiment = Experiment.build(demo.EXPERIMENT, [f"budget.uploads={uploads}"])
    with ProgressBar(
        experiment, quiet=options.json, runs=len(demo.RULES) * len(demo.SETTINGS) * demo.SEEDS
    ) as progress:
        found = demo.run(progress.update_named, uploads)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    demo.picture(found, folder / "demo.png")
    write_whole(folder / "demo.json", json.dumps(found) + "\n")
    print(json.dumps(found) if options.json else f"{demo.table(found)}\n\nfigure: {folder / 'demo.png'}")
    return 0


def _reproduce(options: argparse.Namespace) -> int:
    from .recipes import read, report
    from .recipes.reproduce import reproduce
    from .sim.executors import Placement

    def say(line: str) -> None:
        if not options.quiet:
            print(line, file=sys.stderr, flush=True)

    folder = Path(options.out)
    if options.check:
        return _check_results(options, folder, say)
    if options.name is None:
        raise InputError("which recipe? `aflock recipes` lists them; --check runs stored cells of all of them again")
    recipe = read(options.name)
    Placement(options.jobs if options.executor == "processes" else 0, options.executor, options.address)
    with _stdout_for_results(options):
        found = reproduce(
            recipe, options.scale, folder, seeds=options.seeds, jobs=options.jobs, executor=options.executor,
            address=options.address, report=say,
        )  # fmt: skip
    print(report.text(recipe, options.scale, found))
    return 0


def _check_results(options: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> int:
    from .recipes import names, read
    from .recipes.check import check
    from .recipes.recipe import SCALES

    chosen = [read(options.name)] if options.name else [read(name) for name in names()]
    stored = [(r, s) for r in chosen for s in SCALES if (folder / f"{r.name}.{s}.json").is_file()]
    if not stored:
        raise InputError(f"{folder} holds no results of {options.name or 'any recipe'}; run `aflock reproduce` first")
    found = [check(recipe, scale, folder, count=options.cells, report=say) for recipe, scale in stored]
    agree, differ = (sum(counts) for counts in zip(*found, strict=True))
    told = f"; {differ} do not and are marked as stale in {folder}" if differ else ""
    print(f"{agree} of {agree + differ} runs agree{told}")
    return 1 if differ else 0


def _reproduction(options: argparse.Namespace) -> int:
    from .recipes import report

    shown = report.write(Path(options.results), Path(options.out))
    print(f"{options.out}: {', '.join(shown) or 'no stored results'}")
    return 0


def _optimum(options: argparse.Namespace) -> int:
    from . import strategies
    from .showcase import optimum

    found = []
    for name in strategies.names():
        found.append(optimum.run(name, arrivals=options.arrivals or optimum.ARRIVALS))
        if sys.stderr.isatty():
            print(f"\r\033[K{len(found)} rules done", end="\r", file=sys.stderr, flush=True)
    print(json.dumps([optimum.describe(run) for run in found], indent=2) if options.json else optimum.table(found))
    return 0


def _bench(options: argparse.Namespace) -> int:
    from .system import threads
    from .system.files import write_whole

    threads.ask_for_one()
    bench = importlib.import_module(f".bench.{options.what}", __package__)

    def progress(text: str) -> None:
        print(f"bench: {text}", file=sys.stderr, flush=True)

    if options.out and not os.access(os.path.dirname(options.out) or ".", os.W_OK):
        raise NotADirectoryError(f"{options.out} cannot be written: its folder does not exist or is read-only")
    report = bench.measure(quick=options.quick, progress=progress)
    document = json.dumps(report, indent=2)
    if options.out:
        write_whole(Path(options.out), document + "\n")
    print(document if options.json else bench.table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
