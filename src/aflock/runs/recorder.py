"""Records a run in one folder, so that a crash at any moment loses nothing before the last checkpoint.

    config.toml               the resolved experiment: every key with its value
    partition.txt, .png       who holds how much of which class
    metrics.jsonl             one line per evaluation
    trace.jsonl               one line per event: pull, arrival, drop, join, leave ...
    checkpoint.safetensors    the last checkpoint; replaced whole
    model.safetensors         the final model
    result.json               the result; it exists only when the run has ended
    accuracy.png
    tensorboard/              if asked for

Events and evaluations are appended as they happen. A checkpoint holds the lengths of the two files, and a resumed run
cuts them back to these, so that a resumed run leaves the same files as one that was never interrupted.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from .. import state
from ..errors import AflockError, InputError, StateError
from ..events import Event
from ..reports.figures import accuracy_figure, partition_figure
from ..reports.tensorboard import TensorBoardWriter
from ..sim.executors import Placement
from ..sim.experiment import Experiment
from ..sim.simulation import Measurement, Result, Simulation
from ..system.files import locked, to_json, write_whole

Watch = Callable[[Simulation], None]


class Unwritable(AflockError):
    """The folder of a run cannot be written any more, for example because the disk is full."""


class Recorder:
    """A simulation and the files it writes."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        watch: Watch | None,
        placement: Placement | None,
        tensorboard: bool,
    ) -> None:
        self.folder = folder
        self._watch = watch
        self._every = experiment.section("checkpoint").every
        self._saved_at = 0
        self._due = False
        self._tensorboard = TensorBoardWriter(folder / "tensorboard") if tensorboard else None
        self._files: dict[str, IO[str]] = {}
        self._lock: IO[str] | None = None
        self.simulation = Simulation(
            experiment,
            on_event=self._on_event,
            on_measurement=self._on_measurement,
            on_upload=self._on_upload,
            placement=placement,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.simulation.close()
        if self._lock is not None:
            self._lock.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    # -- beginning, going on, ending --------------------------------------------------------------------------------

    def _lock_folder(self) -> None:
        """Locks the folder, so that no other process writes into it."""
        self._lock = open(self.folder / "config.toml", encoding="utf-8")  # noqa: SIM115  # closed with the recorder
        if not locked(self._lock.fileno()):
            raise InputError(f"{self.folder} is being written by another process; wait until it has ended")

    def create(self) -> None:
        """Makes the folder; removes it again if its first file cannot be written."""
        text = self.simulation.experiment.text()
        try:
            self.folder.mkdir(parents=True)
        except FileExistsError:
            raise InputError(f"{self.folder} exists already; another run may just have made it") from None
        try:
            write_whole(self.folder / "config.toml", _header(self.simulation.experiment) + text)
        except OSError:
            self.folder.rmdir()
            raise
        self._lock_folder()

    def load(self) -> None:
        """Loads the last checkpoint, or begins again if there is none."""
        self._lock_folder()
        file, lengths = self.folder / "checkpoint.safetensors", {"metrics": 0, "trace": 0}
        if file.is_file():
            saved = state.load(file)
            if "lengths" not in saved:
                raise StateError(f"{file} is not the checkpoint of a run")
            lengths = saved["lengths"]
            try:
                self.simulation.load_state_dict(saved["simulation"])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                if isinstance(error, StateError):
                    raise
                raise StateError(f"{file} is damaged ({error!r}); remove it to begin again") from None
            self._saved_at = self.simulation.strategy.version
        for leftover in self.folder.glob(".*.*"):  # half-written by a process that was killed
            leftover.unlink()
        for name, length in lengths.items():
            path = self.folder / f"{name}.jsonl"
            if path.exists():
                os.truncate(path, length)
        if self._tensorboard is not None:
            self._tensorboard.forget_after(self.simulation.engine.tally.updates)

    def run(self, stop: Callable[[], bool]) -> Result | None:
        """Runs to the end, or until `stop` returns true: then it saves a checkpoint and returns no result."""
        try:
            with self._open_files():
                ended = False
                while not ended:
                    self._due = False
                    ended = self.simulation.run(lambda: stop() or self._due)
                    if not ended:
                        self._checkpoint()
                    if stop():
                        break
            self._write_executor()
            return self._write_result() if ended else None
        except OSError as error:
            self._trim()
            what = error.strerror or str(error)
            raise Unwritable(f"{self.folder}: {what}; make room and go on with --resume {self.folder}") from error

    # -- while it runs ----------------------------------------------------------------------------------------------

    @contextmanager
    def _open_files(self) -> Iterator[None]:
        try:
            for name in ("metrics", "trace"):
                self._files[name] = open(self.folder / f"{name}.jsonl", "a", encoding="utf-8")  # noqa: SIM115
            yield
        finally:
            for file in self._files.values():
                file.close()

    def _trim(self) -> None:
        """Cuts off incomplete lines and removes incomplete files."""
        for file in self._files.values():
            with suppress(OSError):
                file.close()
        for name in self._files:
            path = self.folder / f"{name}.jsonl"
            os.truncate(path, _whole_lines(path))
        for leftover in self.folder.glob(".*.*"):
            leftover.unlink()

    def _on_event(self, event: Event) -> None:
        self._files["trace"].write(event.text())

    def _on_measurement(self, measurement: Measurement) -> None:
        described = asdict(measurement)
        self._files["metrics"].write(to_json(described) + "\n")
        self._files["metrics"].flush()
        if self._tensorboard is not None:
            self._tensorboard.add(measurement.uploads, described)

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

    def _write_executor(self) -> None:
        """Adds to executor.json where the clients were trained: one entry per sitting that was not killed."""
        file = self.folder / "executor.json"
        before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
        write_whole(file, to_json([*before, self.simulation.executor.describe()], 2) + "\n")

    def _write_result(self) -> Result:
        simulation, result = self.simulation, self.simulation.result()
        state.save(self.folder / "model.safetensors", {"model": np.array(simulation.strategy.model)})
        curve = [asdict(measurement) for measurement in simulation.measurements]
        accuracy_figure(
            self.folder / "accuracy.png", {result.strategy: [curve]}, f"{result.strategy}", ("uploads", "time")
        )
        write_partition(simulation.dataset, simulation.partition, self.folder)
        write_whole(self.folder / "result.json", to_json(asdict(result), 2) + "\n")
        (self.folder / "checkpoint.safetensors").unlink(missing_ok=True)
        return result


def _header(experiment: Experiment) -> str:
    """How the experiment differs from its file; `runs.changes_of` reads it."""
    words = [word for change in experiment.changes for word in ("--set", change)]
    return f"# {shlex.join(words)}\n\n" if words else ""


def write_partition(dataset: Any, partition: Any, folder: Path) -> str:
    """Writes partition.txt and partition.png; returns the table."""
    table: str = partition.table(dataset.train_y, dataset.classes)
    write_whole(folder / "partition.txt", table + "\n")
    counts = partition.counts(dataset.train_y, dataset.classes)
    partition_figure(folder / "partition.png", counts, f"{dataset.name}: {len(counts)} clients")
    return table


def _whole_lines(path: Path) -> int:
    """The length of a file up to the end of its last complete line."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        begin = max(0, size - 2**16)
        file.seek(begin)
        return begin + file.read().rfind(b"\n") + 1
