"""The model on held-out data, every so many versions, beside the server's work; the best one is kept."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..files import write_whole
from ..models.base import Evaluation
from ..types import Vector
from . import weights
from .logs import fields, log
from .refusals import Refused
from .service import Service
from .store import Store


class Evaluator:
    """Measures one model at a time; versions that come meanwhile are passed over."""

    def __init__(self, store: Store, service: Service) -> None:
        p = store.settings.section("evaluation")
        self._store, self._service = store, service
        self._every, self._target = p.every, p.target
        self._thread = ThreadPoolExecutor(1, "evaluation") if p.every is not None else None
        self._last = store.federation.version
        self._best = self._kept_best()
        self._task: asyncio.Task[None] | None = None

    def _kept_best(self) -> float:
        file = self._store.folder / "best.json"
        try:
            return float(json.loads(file.read_text(encoding="utf-8"))["accuracy"])
        except (OSError, ValueError, KeyError, TypeError):
            return -1.0

    def on_version(self, version: int) -> None:
        """The model has moved."""
        if self._thread is None or (self._task and not self._task.done()):
            return
        if version // self._every == self._last // self._every:  # a restart in between changes nothing
            return
        self._last = version
        self._task = asyncio.get_running_loop().create_task(self._measure(version, self._store.federation.model))

    async def _measure(self, version: int, model: Vector) -> None:
        found: Evaluation = await asyncio.get_running_loop().run_in_executor(self._thread, self._evaluate, model)
        about = {"version": version, "accuracy": found.accuracy, "loss": found.loss}
        log.info(
            "version %(version)d: accuracy %(accuracy).4f, loss %(loss).4f",
            about,
            extra=fields(event="evaluation", **about),
        )
        self._service.meter.evaluation.update(version=version, accuracy=found.accuracy, loss=found.loss)
        if found.accuracy > self._best:
            self._best = found.accuracy
            self._keep(version, model, found)
        if self._target is not None and found.accuracy >= self._target:
            try:
                why = f"accuracy {found.accuracy:.4f} at version {version} reaches the target"
                await self._service.end(why, found.accuracy)
            except Refused as refusal:
                log.warning("the federation cannot be ended now: %s", refusal)

    def _evaluate(self, model: Vector) -> Evaluation:
        assert self._store.judge is not None
        judge, dataset = self._store.judge
        return judge.evaluate(model, dataset.test_inputs, dataset.test_y)

    def _keep(self, version: int, model: Vector, found: Evaluation) -> None:
        about: dict[str, Any] = {"version": version, "accuracy": found.accuracy, "loss": found.loss}
        try:
            weights.save(self._store.folder / "best.safetensors", model, **about)
            write_whole(self._store.folder / "best.json", json.dumps(about))
        except OSError as error:
            log.error("the best model cannot be kept: %s", error)

    async def close(self) -> None:
        """Waits for the measurement under way."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        if self._thread is not None:
            self._thread.shutdown()
