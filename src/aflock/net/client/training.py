"""Training for `Client.run`: a torch module or an aflock model, with a local rule, on the user's own batches.

The server advises the local rule, its parameters and the number of steps; the user may choose each of them. So a
`Training` holds what the user gave, and `prepare` makes the training function once the server's hello is known.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from ... import local as rules
from ...errors import MissingVector, ParameterError, StateError
from ...local import LocalRule, Memory, Steps, Trained
from ...models.base import Model
from ...training import Batch, Trainer, check_rate
from ...types import Job, Vector
from .answers import Hello
from .batches import Batches, EndlessBatches
from .run_types import Cancelled, Train

Buffers = Literal["refuse", "local", "average"]


class Training:
    """What the user gave to `Client.run`; the arguments are the same."""

    def __init__(
        self,
        model: Any,
        batches: Batches,
        *,
        local: str | Mapping[str, Any] | LocalRule | None,
        steps: int | Callable[[], int] | Steps | None,
        loss: Callable[[Any, Any], Any] | None,
        buffers: Buffers,
    ) -> None:
        self.batches = EndlessBatches(batches)
        self._given, self._local, self._steps, self._loss, self._buffers = model, local, steps, loss, buffers
        self._model: Model | None = None

    def prepare(self, hello: Hello, cancelled: threading.Event) -> Train:
        """The training function for that federation; it stops at the next batch once `cancelled` is set."""
        rule = _rule(self._local, hello)
        model = self._model = _model(self._given, rule, self._loss, self._buffers)
        _check_fit(model, rule, hello)
        if hello.order == "own" and _is_module(self._given):
            raise ParameterError(
                f"the server's {hello.model} has its weights in another order than a torch module, so its evaluation "
                f"would be wrong; train aflock.models.create({hello.model!r}, ...), or serve the model as a vector"
            )
        trainer = Trainer(model, rule, needs=hello.needs, changes=hello.changes, trusted=False)
        return _JobTrainer(trainer, self.batches, _steps(self._steps, hello, self.batches.count), cancelled)

    @contextmanager
    def mode_restored(self) -> Iterator[None]:
        """Puts a module back into the mode (training or evaluation) that it was in before the block."""
        mode = self._given.training if _is_module(self._given) else None
        try:
            yield
        finally:
            if mode is not None:
                self._given.train(mode)

    def load_weights(self, weights: Vector) -> None:
        """Copies the weights into the user's module; an aflock model holds no weights of its own."""
        if self._model is not None and self._model.weights is not None:
            np.copyto(self._model.weights, weights)


class _JobTrainer:
    """The training function of a run: K steps of the local rule on the user's batches."""

    def __init__(
        self, trainer: Trainer, batches: EndlessBatches, steps: Callable[[], int], cancelled: threading.Event
    ) -> None:
        self._trainer, self._batches, self._steps, self._cancelled = trainer, batches.endless(), steps, cancelled
        self._task = trainer.task(self._batch, batches.count)
        self._begun: float | None = None
        """When the last job began: the time until the next one is the delay of a rule that counts time."""

    def __call__(self, job: Job, number: int, memory: Memory, delay: float) -> Trained:
        if self._trainer.rule.delay_unit == "time":
            now = time.monotonic()
            delay, self._begun = (0.0 if self._begun is None else now - self._begun), now
        try:
            return self._trainer.train(job, self._task, self._steps(), memory, delay)
        except MissingVector as error:
            # With a memory, or if the job lacks one of the rule's extras, the error is what it says. Otherwise the
            # vector can only have been in the memory, and that is empty.
            if memory or any(name not in job.extras for name in self._trainer.rule.extras):
                raise
            raise StateError(
                f"this client's memory of the federation is gone ({error}); put its state_dir back, or call leave() "
                "and take part as a new client"
            ) from None

    def _batch(self, k: int) -> Batch:
        if self._cancelled.is_set():
            raise Cancelled
        return next(self._batches)


# --- what the user chose, or else what the hello advises -------------------------------------------------------------


def _rule(local: str | Mapping[str, Any] | LocalRule | None, hello: Hello) -> LocalRule:
    """The local rule; parameters the user did not give are as the server advises, if it advises the same rule."""
    if isinstance(local, LocalRule):
        return local
    chosen = {"name": local} if isinstance(local, str) else dict(hello.local if local is None else local)
    if not isinstance(chosen.get("name"), str):
        raise ParameterError(f"local is {local!r}; expected a rule's name, or a dictionary with its name")
    full = dict(hello.local) | chosen if chosen["name"] == hello.local["name"] else chosen
    return rules.create(full.pop("name"), **full)


def _steps(steps: int | Callable[[], int] | Steps | None, hello: Hello, batches: int) -> Callable[[], int]:
    if steps is None:
        return lambda: hello.steps
    if isinstance(steps, int):
        fixed = rules.Fixed(steps)
        return lambda: fixed.steps
    if callable(steps):
        return steps
    if not hasattr(steps, "draw"):
        raise ParameterError(f"steps is {steps!r}; expected a number, or a function that returns one")
    drawn = steps
    return lambda: drawn.draw(random.random(), batches)


def _model(model: Any, rule: LocalRule, loss: Any, buffers: Buffers) -> Model:
    if isinstance(model, Model):
        if loss is not None:
            raise ParameterError("loss is for torch modules; this model has its own")
        return model
    if not _is_module(model):
        raise ParameterError(f"model is a {type(model).__name__}; expected a torch nn.Module or an aflock model")
    from ...models.torch_module import TorchModule

    rate = rule.eta_l if buffers == "average" else None
    return TorchModule(model, buffers=buffers, rate=rate, **({} if loss is None else {"loss": loss}))


def _check_fit(model: Model, rule: LocalRule, hello: Hello) -> None:
    """Refuses a model with another number of weights, and a rule that does not send what the strategy needs."""
    if model.length != hello.length:
        raise ParameterError(
            f"the model has {model.length} weights, the federation's {hello.length}; build the same model"
        )
    missing = rules.unsent(rule, hello.needs)
    if missing:
        raise ParameterError(f"{rule.name} sends no {missing!r}, which {hello.strategy} needs; leave `local` out")
    rate = check_rate(model, rule)
    if rate is not None:
        raise ParameterError(f"buffers 'average' need plain sgd with eta_l = {rate}; {rule.name} is another rule")


def _is_module(model: Any) -> bool:
    # A user who has a module has imported torch; a client that trains without torch must not import it.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)
