"""A run on disk: one folder with everything about it, safe against a crash at any moment.

    config.toml               the resolved experiment: every key with its value
    metrics.jsonl             one line per evaluation
    trace.jsonl               one line per event: pull, arrival, drop, join, leave ...
    checkpoint.safetensors    the last checkpoint; replaced whole
    model.safetensors         the final model
    result.json               what the run came to; its presence means that the run has ended
    accuracy.png

Lines are appended as they happen. A checkpoint remembers how long the two files were, and resuming cuts them back to
it, so that a resumed run leaves the same files as one that was never interrupted.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

import numpy as np

from . import state
from .errors import InputError, StateError
from .events import Event
from .reports.figures import accuracy_figure
from .sim.experiment import Experiment
from .sim.simulation import Measurement, Result, Simulation

Watch = Callable[[Simulation], None]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: the run was saved and can be resumed."""


def simulate(experiment: Mapping[str, Any] | str | Path, *changes: str, workers: int = 0) -> Result:
    """Runs an experiment in memory: a TOML file or nested dictionaries, with changes such as "strategy.name=ace".

    With `workers`, that many processes train the clients; the result is the same to the last bit.
    """
    given = isinstance(experiment, Mapping)
    made = Experiment.build(experiment, changes) if given else Experiment.read(experiment, changes)  # type: ignore[arg-type]
    with Simulation(made, workers=workers) as simulation:
        simulation.run()
        return simulation.result()


def run(experiment: Experiment, folder: Path, *, watch: Watch | None = None, workers: int = 0) -> Result:
    """Runs an experiment into a new folder."""
    if folder.exists():
        raise InputError(f"{folder} exists already; choose another --out, or --resume {folder}")
    with _Recorder(experiment, folder, watch, workers) as recorder:  # what cannot run says so before a folder is made
        folder.mkdir(parents=True)
        write_whole(folder / "config.toml", experiment.text())
        return recorder.run()


def resume(experiment: Experiment, folder: Path, *, watch: Watch | None = None, workers: int = 0) -> Result:
    """Goes on with an interrupted run, to the same bits as if nothing had happened."""
    if not (folder / "config.toml").is_file():
        raise InputError(f"{folder} is not the folder of a run; expected a config.toml in it")
    if (folder / "config.toml").read_text(encoding="utf-8") != experiment.text():
        raise InputError(f"{folder} was run with another experiment; resume with {folder / 'config.toml'}, unchanged")
    if (folder / "result.json").is_file():
        raise InputError(f"{folder} has ended already; its result is in {folder / 'result.json'}")
    with _Recorder(experiment, folder, watch, workers) as recorder:
        recorder.load()
        return recorder.run()


class _Recorder:
    """A simulation and the files it writes."""

    def __init__(self, experiment: Experiment, folder: Path, watch: Watch | None, workers: int) -> None:
        self.folder = folder
        self._watch = watch
        self._every = experiment.section("checkpoint").every
        self._saved_at = 0
        self._due = False
        self.simulation = Simulation(
            experiment,
            on_event=self._on_event,
            on_measurement=self._on_measurement,
            on_upload=self._on_upload,
            workers=workers,
        )
        self._files: dict[str, IO[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.simulation.close()

    def load(self) -> None:
        """Back to the last checkpoint, or to the start if there is none."""
        file, lengths = self.folder / "checkpoint.safetensors", {"metrics": 0, "trace": 0}
        if file.is_file():
            saved = state.load(file)
            if "lengths" not in saved:
                raise StateError(f"{file} is not the checkpoint of a run")
            lengths = saved["lengths"]
            self.simulation.load_state_dict(saved["simulation"])
            self._saved_at = self.simulation.strategy.version
        for leftover in self.folder.glob(".*.*"):  # half-written by a process that was killed
            leftover.unlink()
        for name, length in lengths.items():
            path = self.folder / f"{name}.jsonl"
            if path.exists():
                os.truncate(path, length)

    def run(self) -> Result:
        """To the end, or to the next Ctrl-C."""
        with self._open_files(), _listening() as stop:
            ended = False
            while not ended:
                self._due = False
                ended = self.simulation.run(lambda: stop() or self._due)
                if not ended:
                    self._checkpoint()
                if stop():
                    break
        if not ended:
            raise Interrupted(f"interrupted and saved; go on with --resume {self.folder}")
        return self._write_result()

    @contextmanager
    def _open_files(self) -> Iterator[None]:
        try:
            for name in ("metrics", "trace"):
                self._files[name] = open(self.folder / f"{name}.jsonl", "a", encoding="utf-8")  # noqa: SIM115
            yield
        finally:
            for file in self._files.values():
                file.close()

    def _on_event(self, event: Event) -> None:
        empty = (None, False, "")  # by identity: a client, a version or a time may be 0
        line = {name: value for name, value in asdict(event).items() if not any(value is e for e in empty)}
        self._files["trace"].write(json.dumps(line) + "\n")

    def _on_measurement(self, measurement: Measurement) -> None:
        self._files["metrics"].write(json.dumps(asdict(measurement)) + "\n")
        self._files["metrics"].flush()

    def _on_upload(self, simulation: Simulation) -> None:
        if simulation.strategy.version - self._saved_at >= self._every:
            self._due = True
        if self._watch is not None:
            self._watch(simulation)

    def _checkpoint(self) -> None:
        lengths = {}
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            lengths[name] = file.tell()
        saved = {"lengths": lengths, "simulation": self.simulation.state_dict()}
        state.save(self.folder / "checkpoint.safetensors", saved)
        self._saved_at = self.simulation.strategy.version

    def _write_result(self) -> Result:
        result = self.simulation.result()
        state.save(self.folder / "model.safetensors", {"model": np.array(self.simulation.strategy.model)})
        curve = [asdict(measurement) for measurement in self.simulation.measurements]
        accuracy_figure(
            self.folder / "accuracy.png", {result.strategy: [curve]}, f"{result.strategy}", ("uploads", "time")
        )
        write_whole(self.folder / "result.json", json.dumps(asdict(result), indent=2) + "\n")
        (self.folder / "checkpoint.safetensors").unlink(missing_ok=True)
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
    except ValueError:  # not in the main thread: nobody can press Ctrl-C here
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


def write_whole(file: Path, text: str) -> None:
    """Writes a file that is there whole or not at all."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)


def compare(
    experiment: Experiment,
    names: Sequence[str],
    seeds: int,
    *,
    watch: Callable[[str, int, Simulation], None] | None = None,
    workers: int = 0,
) -> dict[str, list[tuple[Result, list[Measurement]]]]:
    """Every rule on the same data, initial model, client draws and durations, for each of several seeds."""
    found: dict[str, list[tuple[Result, list[Measurement]]]] = {}
    for name in names:
        for seed in range(seeds):
            variant = experiment.variant(name, seed)
            on_upload = None if watch is None else partial(watch, name, seed)
            with Simulation(variant, on_upload=on_upload, workers=workers) as simulation:
                simulation.run()
                found.setdefault(name, []).append((simulation.result(), simulation.measurements))
    return found


def describe(found: dict[str, list[tuple[Result, list[Measurement]]]]) -> dict[str, Any]:
    """JSON values of a comparison."""
    return {
        name: [asdict(result) | {"curve": [asdict(m) for m in curve]} for result, curve in runs]
        for name, runs in found.items()
    }
