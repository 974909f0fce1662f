"""Measures the model on the test set every so many versions, in a thread of its own, and saves the best model.

main.py makes the `Evaluator`; `App` calls `on_version` whenever the model has a new version. The accuracy of the best
model so far is in `best.json`, the model in `best.safetensors`. With `[evaluation] target` the federation ends when a
model is accurate enough.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...models.base import Evaluation
from ...system.files import write_whole
from ...types import Vector
from ..protocol.refusals import Refused
from ..storage import model_file
from ..storage.data_folder import DataFolder
from .app import App
from .logs import fields, log


class Evaluator:
    """Measures one model at a time; versions that are made meanwhile are not measured."""

    def __init__(self, store: DataFolder, app: App) -> None:
        p = store.settings.section("evaluation")
        self._store, self._app = store, app
        self._every, self._target = p.every, p.target
        self._thread = ThreadPoolExecutor(1, "evaluation") if p.every is not None else None
        self._last = store.federation.version
        self._best = self._saved_best()
        self._task: asyncio.Task[None] | None = None

    def _saved_best(self) -> float:
        """The accuracy of the best model that was saved; -1 if there is none, so that the first one is better."""
        file = self._store.folder / "best.json"
        try:
            return float(json.loads(file.read_text(encoding="utf-8"))["accuracy"])
        except (OSError, ValueError, KeyError, TypeError):
            return -1.0

    def on_version(self, version: int) -> None:
        """The model has a new version: measures it if it is due and no measurement is running."""
        if self._thread is None or (self._task and not self._task.done()):
            return
        if version // self._every == self._last // self._every:  # by version, so that a restart changes nothing
            return
        self._last = version
        # The strategy never changes a model it has published, so the thread may read it while updates are applied.
        self._task = asyncio.get_running_loop().create_task(self._measure(version, self._store.federation.model))

    async def _measure(self, version: int, model: Vector) -> None:
        found: Evaluation = await asyncio.get_running_loop().run_in_executor(self._thread, self._evaluate, model)
        about = {"version": version, "accuracy": found.accuracy, "loss": found.loss}
        log.info(
            "version %(version)d: accuracy %(accuracy).4f, loss %(loss).4f",
            about,
            extra=fields(event="evaluation", **about),
        )
        self._app.counters.evaluation.update(version=version, accuracy=found.accuracy, loss=found.loss)
        if found.accuracy > self._best:
            self._best = found.accuracy
            self._save_best(version, model, found)
        if self._target is not None and found.accuracy >= self._target:
            try:
                why = f"accuracy {found.accuracy:.4f} at version {version} reaches the target"
                await self._app.end(why, found.accuracy)
            except Refused as refusal:
                log.warning("the federation cannot be ended now: %s", refusal)

    def _evaluate(self, model: Vector) -> Evaluation:
        assert self._store.judge is not None
        judge, dataset = self._store.judge
        return judge.evaluate(model, dataset.test_inputs, dataset.test_y)

    def _save_best(self, version: int, model: Vector, found: Evaluation) -> None:
        about: dict[str, Any] = {"version": version, "accuracy": found.accuracy, "loss": found.loss}
        try:
            model_file.save(self._store.folder / "best.safetensors", model, **about)
            write_whole(self._store.folder / "best.json", json.dumps(about))
        except OSError as error:
            log.error("cannot save the best model: %s", error)

    async def close(self) -> None:
        """Waits for the measurement that is running, and ends the thread."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        if self._thread is not None:
            self._thread.shutdown()
