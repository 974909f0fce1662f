"""The executor `processes`: other processes, the same bits; a dead worker costs time and nothing else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aflock.errors import AflockError
from aflock.sim.executors import WorkerDied
from aflock.sim.experiment import Experiment
from aflock.sim.processes import Processes
from aflock.sim.shared_vectors import BufferTooSmall, SharedBuffer
from aflock.sim.simulation import Simulation
from aflock.sim.worker import Failed, WorkerTask, work

SMALL = [
    "data.name=synthetic",
    "data.examples=300",
    "data.features=6",
    "data.classes=3",
    "partition.clients=8",
    "partition.alpha=0.5",
    "budget.uploads=60",
    "evaluation.every=30",
    "training.batch=8",
    "clock.concurrency=5",
]


def experiment(*changes: str) -> Experiment:
    return Experiment.build({}, [*SMALL, *changes])


def sha(chosen: Experiment, workers: int, **options: Any) -> str:
    with Simulation(chosen, workers=workers, **options) as simulation:
        simulation.run()
        return simulation.result().model_sha256


def workers() -> list[int]:
    """The process numbers of the workers that this process has started."""
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not Path(f"/proc/{pid}/stat").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


@pytest.mark.parametrize("rule", ["ace:memory=client", "masfl", "fedbuff+scaffold", "fedavg"])
def test_the_result_is_the_same_to_the_last_bit(rule: str) -> None:
    """Rules with client memory, extra vectors, changes and rounds; K is drawn, some jobs are lost."""
    changes = ["training.kind=dynamic", "training.steps=3", "fleet.loss=0.1", "fleet.lease=5"]
    chosen = experiment(*changes).variant(rule, 0)
    assert sha(chosen, 2) == sha(chosen, 0)


def test_any_number_of_workers_and_a_torch_model() -> None:
    chosen = experiment("data.features=64", "model.name=cnn", "budget.uploads=12", "strategy.name=fedbuff")
    assert len({sha(chosen, workers) for workers in (0, 1, 3)}) == 1


def test_workers_killed_with_sigkill_cost_only_time() -> None:
    killed: list[int] = []

    def kill(simulation: Simulation) -> None:
        if simulation.engine.tally.updates % 15 == 0:
            pid = next(pid for pid in workers() if pid not in killed)
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    chosen = experiment("strategy.name=fedbuff")
    assert sha(chosen, 2, on_upload=kill) == sha(chosen, 0)
    assert len(set(killed)) == 4


def test_a_job_that_ends_every_worker_ends_the_run() -> None:
    with Simulation(experiment(), workers=1) as simulation:
        over = threading.Event()

        def hunt() -> None:
            while not over.is_set():
                for pid in workers():
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)

        hunter = threading.Thread(target=hunt)
        hunter.start()
        try:
            with pytest.raises(WorkerDied, match="has ended 3 workers"):
                simulation.run()
        finally:
            over.set()
            hunter.join()


def test_close_leaves_nothing_behind() -> None:
    with Simulation(experiment(), workers=2) as simulation:
        executor = simulation.executor
        assert isinstance(executor, Processes)
        pids, folder = workers(), executor.folder
        simulation.run()
        assert folder.is_dir()
    assert not folder.exists()
    assert not any(map(alive, pids))


def test_workers_go_when_the_run_is_killed(tmp_path: Path) -> None:
    """SIGKILL of the parent: the workers notice, end, and remove the shared files."""
    script = tmp_path / "killed.py"
    script.write_text(
        textwrap.dedent(f"""
        from multiprocessing import active_children
        from aflock.sim.experiment import Experiment
        from aflock.sim.simulation import Simulation
        if __name__ == "__main__":
            chosen = Experiment.build({{}}, {SMALL!r} + ["budget.uploads=100000000"])
            with Simulation(chosen, workers=2) as simulation:
                print(*(worker.pid for worker in active_children()), simulation.executor.folder, flush=True)
                simulation.run(lambda: simulation.engine.tally.updates == 10 and bool(print("on", flush=True)))
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    *pids, folder = parent.stdout.readline().split()
    assert parent.stdout.readline() == "on\n"
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (any(alive(int(pid)) for pid in pids) or Path(folder).exists()):
        time.sleep(0.05)
    assert not any(alive(int(pid)) for pid in pids)
    assert not Path(folder).exists()


def test_a_shared_buffer_that_is_too_small_is_replaced() -> None:
    chosen = experiment("strategy.name=masfl")
    with Simulation(chosen, workers=1) as simulation:
        assert isinstance(simulation.executor, Processes)
        simulation.executor.buffer_bytes = 128
        simulation.run()
        assert simulation.result().model_sha256 == sha(chosen, 0)


def test_what_is_not_known_to_a_worker_is_said_in_one_sentence() -> None:
    """A worker builds the experiment on its own: here from a file that has gone."""
    chosen = experiment()
    chosen.sections["data"] = type(chosen.section("data"))("nowhere", {})
    simulation = Simulation(experiment())
    simulation.engine.executor = executor = Processes(chosen, simulation.client_training, 1)
    with pytest.raises(WorkerDied, match=r"a worker cannot build the experiment: .*nowhere"):
        simulation.run()
    executor.close()


# --- the worker's side ----------------------------------------------------------------------------------------------


class Broken:
    """Client training whose model fails."""

    def train(self, *_: Any) -> Any:
        raise self.error

    error: Exception = ZeroDivisionError("by zero")


def task(path: Path) -> tuple[WorkerTask, dict[int, SharedBuffer]]:
    buffer = SharedBuffer(path, 4096, create=True)
    locations, free = buffer.write({"model": np.arange(4, dtype=np.float32)})
    return WorkerTask(0, str(path), 4096, 3, 7, False, 1, 0, 1, 0.0, locations[0], [], [], free), {}


def test_an_error_in_a_worker_reaches_the_run(tmp_path: Path) -> None:
    made, buffers = task(tmp_path / "buffer")
    found = work(Broken(), buffers, made)  # type: ignore[arg-type]
    assert isinstance(found, Failed)
    assert str(found.error) == "ZeroDivisionError while client 3 was trained: by zero"
    known = Broken()
    known.error = AflockError("plain words")
    found = work(known, buffers, made)  # type: ignore[arg-type]
    assert isinstance(found, Failed)
    assert str(found.error) == "plain words"


def test_a_shared_buffer_gives_back_what_was_written_to_it(tmp_path: Path) -> None:
    buffer = SharedBuffer(tmp_path / "buffer", 1024, create=True)
    written = {"a": np.arange(5, dtype=np.float32), "b": np.array(2.5), "c": np.ones((2, 3), np.float64)}
    locations, free = buffer.write(written)
    other = SharedBuffer(tmp_path / "buffer", 1024)
    assert all(np.array_equal(other.view(location), written[location.name]) for location in locations)
    assert all(location.offset % 64 == 0 for location in locations)
    with pytest.raises(BufferTooSmall) as error:
        buffer.write({"d": np.zeros(200)}, free)
    assert error.value.needed == free + 1600
