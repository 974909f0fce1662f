"""Runs experiments: in memory, into a folder (`recorder.py` says what is in it), or several rules for a comparison."""

from __future__ import annotations

import gc
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from ..errors import InputError
from ..sim.executors import Placement
from ..sim.experiment import Experiment
from ..sim.simulation import Measurement, Result, Simulation
from ..system import ray_tasks
from ..system.ray_cluster import Cluster
from .recorder import Recorder, Watch


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: the run was saved and can be resumed."""


def simulate(
    experiment: Mapping[str, Any] | str | Path,
    *changes: str,
    workers: int = 0,
    executor: str = "auto",
    address: str | None = None,
) -> Result:
    """Runs an experiment in memory: a TOML file or nested dictionaries, with changes such as "strategy.name=ace".

    With `workers`, that many processes train the clients; with `executor="ray"`, a Ray cluster does (`address`; None:
    one on this machine, for this run). The result is the same to the last bit.
    """
    given = isinstance(experiment, Mapping)
    made = Experiment.build(experiment, changes) if given else Experiment.read(experiment, changes)  # type: ignore[arg-type]
    with Simulation(made, placement=Placement(workers, executor, address)) as simulation:
        simulation.run()
        return simulation.result()


def run(
    experiment: Experiment,
    folder: Path,
    *,
    watch: Watch | None = None,
    placement: Placement | None = None,
    tensorboard: bool = False,
) -> Result:
    """Runs an experiment into a new folder."""
    if folder.exists():
        raise InputError(f"{folder} exists already; choose another --out, or --resume {folder}")
    with Recorder(experiment, folder, watch, placement, tensorboard) as recorder:
        recorder.create()  # only now: an experiment that cannot run leaves no folder
        return _to_the_end(recorder)


def resume(
    experiment: Experiment,
    folder: Path,
    *,
    watch: Watch | None = None,
    placement: Placement | None = None,
    tensorboard: bool = False,
) -> Result:
    """Resumes an interrupted run, to the same bits as without the interruption."""
    config = folder / "config.toml"
    if not config.is_file():
        raise InputError(f"{folder} is not the folder of a run; expected a config.toml in it")
    if Experiment.read(config).resolved() != experiment.resolved():
        raise InputError(f"{folder} was run with another experiment; resume with {config}, unchanged")
    if (folder / "result.json").is_file():
        raise InputError(f"{folder} has ended already; its result is in {folder / 'result.json'}")
    with Recorder(experiment, folder, watch, placement, tensorboard) as recorder:
        recorder.load()
        return _to_the_end(recorder)


def changes_of(folder: Path) -> list[str]:
    """The changes (--set) a run was started with, as the first line of its config.toml has them."""
    try:
        with open(folder / "config.toml", encoding="utf-8") as file:
            words = shlex.split(file.readline().removeprefix("#"))
    except (OSError, ValueError):
        return []
    return [change for word, change in pairwise(words) if word == "--set"]


def _to_the_end(recorder: Recorder) -> Result:
    with _listening() as stop:
        result = recorder.run(stop)
    if result is None:
        raise Interrupted(f"interrupted and saved; go on with --resume {recorder.folder}")
    return result


@contextmanager
def _listening() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks the run to stop between two steps; a second one stops it at once."""
    asked: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(signum)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # signals can be handled in the main thread only
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


def compare(
    experiment: Experiment,
    names: Sequence[str],
    seeds: int,
    *,
    watch: Callable[[str, int, Simulation], None] | None = None,
    placement: Placement | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, list[tuple[Result, list[Measurement]]]]:
    """Every rule on the same data, initial model, client draws and durations, for each of several seeds.

    On a Ray cluster, whole runs are tasks if there are enough of them for all cores; `say` gets a sentence about it.
    """
    if placement is not None and placement.executor == "ray":
        with Cluster(placement.address, cpus=placement.workers or None) as cluster:
            if len(names) * seeds >= cluster.cores:
                say(f"every run is one task of the Ray cluster: {len(names) * seeds} runs on {cluster.cores} cores")
                return _compare_by_tasks(experiment, names, seeds)
        say("the jobs of each run are shared out over the Ray cluster: it has more cores than there are runs")
    found: dict[str, list[tuple[Result, list[Measurement]]]] = {}
    for name in names:
        for seed in range(seeds):
            variant = experiment.variant(name, seed)
            on_upload = None if watch is None else partial(watch, name, seed)
            with Simulation(variant, on_upload=on_upload, placement=placement) as simulation:
                simulation.run()
                found.setdefault(name, []).append((simulation.result(), simulation.measurements))
            del simulation
            gc.collect()  # its parts refer to each other: only a collection frees the memory for the next run
    return found


def _compare_by_tasks(
    experiment: Experiment, names: Sequence[str], seeds: int
) -> dict[str, list[tuple[Result, list[Measurement]]]]:
    wanted = [(name, seed) for name in names for seed in range(seeds)]
    calls = [(experiment.variant(name, seed).resolved(),) for name, seed in wanted]
    ended = dict(ray_tasks.results(_run_whole, calls))
    found: dict[str, list[tuple[Result, list[Measurement]]]] = {name: [] for name in names}
    for number, (name, _) in enumerate(wanted):
        found[name].append(ended[number])
    return found


def _run_whole(document: dict[str, Any]) -> tuple[Result, list[Measurement]]:
    with Simulation(Experiment.build(document)) as simulation:
        simulation.run()
        return simulation.result(), simulation.measurements


def describe(found: dict[str, list[tuple[Result, list[Measurement]]]]) -> dict[str, Any]:
    """JSON values of a comparison."""
    return {
        name: [asdict(result) | {"curve": [asdict(m) for m in curve]} for result, curve in runs]
        for name, runs in found.items()
    }
