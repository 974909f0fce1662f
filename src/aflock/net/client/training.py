"""What `Client.run` trains: a torch module or an aflock model, with a local rule, on the client's own batches.

What the client leaves open (the rule, its parameters, the number of steps) is as the server advises. So a `Training`
is first what the client was given, and becomes something that trains once the server has said hello.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from .. import local as rules
from ..errors import MissingVector, ParameterError, StateError
from ..local import LocalRule, Memory, Steps, Task, Trained
from ..models.base import Model
from ..types import Job, Vector
from .answers import Hello
from .feed import Arrays, Batches, Feed
from .terms import Cancelled, Train

Buffers = Literal["refuse", "local", "average"]


class Training:
    """What a client was given to train; the arguments are those of `Client.run`."""

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
        self.feed = Feed(batches)
        self._given, self._local, self._steps, self._loss, self._buffers = model, local, steps, loss, buffers
        self._model: Model | None = None

    def prepare(self, hello: Hello, cancelled: threading.Event) -> Train:
        """What trains for that federation; it stops at the next batch once `cancelled` is set."""
        rule = _rule(self._local, hello)
        model = self._model = _model(self._given, rule, self._loss, self._buffers)
        _check_fit(model, rule, hello)
        if hello.order == "own" and _is_module(self._given):
            raise ParameterError(
                f"the server's {hello.model} has its weights in another order than a torch module, and would measure "
                f"yours wrongly; train aflock.models.create({hello.model!r}, ...), or serve the model as a vector"
            )
        return _Trainer(model, rule, self.feed, _steps(self._steps, hello, self.feed.count), hello, cancelled)

    @contextmanager
    def mode_put_back(self) -> Iterator[None]:
        """Training mode or not: a module is afterwards as it was before."""
        mode = self._given.training if _is_module(self._given) else None
        try:
            yield
        finally:
            if mode is not None:
                self._given.train(mode)

    def leave_with(self, weights: Vector) -> None:
        """A module holds those from now on; an aflock model holds none."""
        if self._model is not None and self._model.weights is not None:
            np.copyto(self._model.weights, weights)


class _Trainer:
    """What `run` does with a job: K steps of the rule on the client's own batches."""

    def __init__(
        self,
        model: Model,
        rule: LocalRule,
        feed: Feed,
        steps: Callable[[], int],
        hello: Hello,
        cancelled: threading.Event,
    ) -> None:
        self._model, self._rule, self._batches, self._steps = model, rule, feed.endless(), steps
        self._needs, self._changes, self._cancelled = hello.needs, hello.changes, cancelled
        self._scratch: Vector = np.empty(model.length, np.float32)
        room = np.empty_like(self._scratch) if model.weights is None else model.weights
        delta = np.empty_like(self._scratch)
        descend = None if model.weights is None else self._descend  # others trust what they are given
        self._task = Task(self._gradient, feed.count, None, descend, room, delta)
        self._buffers = model.get_buffers()

    def __call__(self, job: Job, number: int, memory: Memory, delay: float) -> Trained:
        model = self._model
        if model.buffers:
            model.set_buffers(memory.get("buffers", self._buffers))
        try:
            done = self._rule.train(
                job, self._task, self._steps(), needs=self._needs, changes=self._changes, memory=memory, delay=delay
            )
        except MissingVector as error:
            if memory or any(name not in job.extras for name in self._rule.extras):
                raise
            raise StateError(
                f"what this client remembered of the federation is gone ({error}); "
                "put its state_dir back, or call leave() and begin anew"
            ) from None
        if model.buffers:
            done.memory["buffers"] = model.get_buffers()
        return done

    def _gradient(self, x: Vector, k: int) -> Vector:
        inputs, targets = self._batch()
        self._model.gradient(x, inputs, targets, self._scratch)
        return self._scratch

    def _descend(self, x: Vector, k: int, rate: float) -> None:
        inputs, targets = self._batch()
        self._model.descend(x, inputs, targets, rate, self._scratch)

    def _batch(self) -> Arrays:
        if self._cancelled.is_set():
            raise Cancelled
        return next(self._batches)


# --- what is open until the server has said hello --------------------------------------------------------------------


def _rule(local: str | Mapping[str, Any] | LocalRule | None, hello: Hello) -> LocalRule:
    """The client's rule; parameters that are not given are those the server advises for the same rule."""
    if isinstance(local, LocalRule):
        return local
    wanted = {"name": local} if isinstance(local, str) else dict(hello.local if local is None else local)
    if not isinstance(wanted.get("name"), str):
        raise ParameterError(f"local is {local!r}; expected a rule's name, or a dictionary with its name")
    full = dict(hello.local) | wanted if wanted["name"] == hello.local["name"] else wanted
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
        raise ParameterError(f"steps is {steps!r}; expected a number, or a function that gives one")
    drawn = steps
    return lambda: drawn.draw(random.random(), batches)


def _model(model: Any, rule: LocalRule, loss: Any, buffers: Buffers) -> Model:
    if isinstance(model, Model):
        if loss is not None:
            raise ParameterError("loss is for torch modules; this model has its own")
        return model
    if not _is_module(model):
        raise ParameterError(f"model is a {type(model).__name__}; expected a torch nn.Module or an aflock model")
    from ..models.torch_module import TorchModule

    rate = rule.eta_l if buffers == "average" else None
    return TorchModule(model, buffers=buffers, rate=rate, **({} if loss is None else {"loss": loss}))


def _check_fit(model: Model, rule: LocalRule, hello: Hello) -> None:
    """The model must be the federation's, and the rule one that gives what the server needs."""
    if model.length != hello.length:
        raise ParameterError(f"the model has {model.length} weights, the federation's {hello.length}; build the same")
    missing = rules.unsent(rule, hello.needs)
    if missing:
        raise ParameterError(f"{rule.name} sends no {missing!r}, which {hello.strategy} needs; leave local out")
    rate = getattr(model, "rate", None)
    if rate is not None and not (rule.follows and rule.eta_l == rate):
        raise ParameterError(f"buffers 'average' need plain sgd with eta_l = {rate}; {rule.name} is another rule")


def _is_module(model: Any) -> bool:
    torch = sys.modules.get("torch")  # whoever has a module has imported it
    return torch is not None and isinstance(model, torch.nn.Module)
