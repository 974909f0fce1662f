"""The experiment file: TOML <-> checked sections. Every key has a meaning, a range and a default.

    experiment = Experiment.read("experiment.toml", ["strategy.name=ace", "delays.mean=30"])
    experiment.section("clock").concurrency
    experiment.text()                                  the resolved file, every default written out

What sections are is in config.py; here is which there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import config, data, local, models, strategies
from ..config import ConfigError, Named, Registered, Schema
from ..data import partition
from ..params import Params, choice, positive, unit, weights, whole
from ..training import sends
from . import delays
from .fleet import FleetParams

__all__ = ["ConfigError", "Experiment", "Named", "explain"]


@dataclass(frozen=True)
class SeedsParams(Params):
    """One seed for the data and its split, one for training, one for the schedule of the clients."""

    data: int = whole(0, "dataset and partition", least=0)
    training: int = whole(0, "initial model, batches, random rules", least=0)
    schedule: int = whole(0, "speeds, durations, comings and goings, selection", least=0)


@dataclass(frozen=True)
class TrainingParams(Params):
    """What a client does with a job."""

    batch: int = whole(32, "examples per local step")
    steps: int = whole(1, "K, local steps per job (with kind 'dynamic': c, K uniform on 1 to 2c; 'epochs': epochs)")
    kind: str = choice("fixed", ("fixed", "dynamic", "epochs"), "how K is chosen")
    validation: float = unit(0.0, "share of every client's examples kept for early stopping (patience)", zero=True)


@dataclass(frozen=True)
class ClockParams(Params):
    """How asynchrony is simulated."""

    protocol: str = choice(
        "events", ("events", "ticks", "sampled"), "durations, whole server ticks, or an arrival process with old models"
    )
    window: int | None = whole(None, "sampled: clients start from one of the last so many models; None: delays decide")
    history: int = whole(200, "sampled: models kept when delays decide")
    step: str = choice(
        "arrival", ("arrival", "tick"), "ticks: a server step for every arrival, or one for all arrivals of a tick"
    )
    refill: str = choice(
        "arrival", ("arrival", "step"), "when a place is given again: when its job arrives, or at the next server step"
    )
    concurrency: int | None = whole(None, "jobs in flight; None: every client")
    selection: str = choice("auto", ("auto", "uniform", "fair", "all"), "who is picked; auto: the rule's own policy")
    probabilities: tuple[float, ...] | None = weights("how likely each client is picked or arrives; None: equally")
    max_staleness: int | None = whole(None, "older updates are discarded; None: the rule's own bound", least=0)


@dataclass(frozen=True)
class BudgetParams(Params):
    """When a run ends: at the first of these."""

    uploads: int | None = whole(None, "client reports")
    versions: int | None = whole(None, "server steps")
    time: float | None = positive(None, "virtual time")
    ticks: int | None = whole(None, "ticks since the rule has started; first gradients are in by then")


@dataclass(frozen=True)
class EvaluationParams(Params):
    """When the model is measured on the test set."""

    every: int = whole(100, "client reports, or ticks, between two evaluations")
    unit: str = choice("uploads", ("uploads", "ticks"), "what `every` counts")


@dataclass(frozen=True)
class CheckpointParams(Params):
    """When a run can be resumed from."""

    every: int = whole(1000, "server steps between two checkpoints")


CLIENTS = 40
"""Clients of an experiment that does not say how many."""

_CLIENTS = ("clients", f'clients = {CLIENTS}    how many clients there are (with name = "key": one per key)')

SCHEMA = Schema(
    named={
        "data": Registered("digits", data.entries, "the dataset"),
        "partition": Registered(
            "dirichlet", partition.entries, "how its examples are split over the clients", (_CLIENTS,)
        ),
        "model": Registered("logistic", models.entries, "what is trained"),
        "local": Registered("auto", lambda: [local.AUTO, *local.entries()], "the client's rule"),
        "strategy": Registered("ace", strategies.entries, "the server's rule"),
        "delays": Registered("exponential", delays.entries, "how long a job takes"),
    },
    fixed={
        "seeds": (SeedsParams, "everything random"),
        "training": (TrainingParams, "what a client does with a job"),
        "fleet": (FleetParams, "the clients as machines"),
        "clock": (ClockParams, "how asynchrony is simulated"),
        "budget": (BudgetParams, "when a run ends: at the first of these"),
        "evaluation": (EvaluationParams, "when the model is measured"),
        "checkpoint": (CheckpointParams, "when a run can be resumed from"),
    },
    defaults={"budget": {"uploads": 2000}},
)


@dataclass(frozen=True)
class Experiment:
    """A whole experiment, checked."""

    clients: int | None
    sections: dict[str, Params | Named]
    changes: tuple[str, ...] = field(default=(), compare=False)
    """What was changed by --set; it is in the sections already."""
    auto_sends: bool = field(default=False, compare=False)
    """Whether the file has left [strategy] sends to be chosen."""

    @staticmethod
    def read(path: str | Path, changes: Iterable[str] = ()) -> Experiment:
        """From a TOML file, with changes of the form "section.key=value"."""
        document = config.read(path, "aflock config --example")
        return Experiment.build(document, changes)

    @staticmethod
    def build(document: Mapping[str, Any], changes: Iterable[str] = ()) -> Experiment:
        """From nested dictionaries."""
        changes = tuple(changes)
        merged = SCHEMA.merge(document, changes)
        split = merged.get("partition", {})
        clients = split.pop("clients", None if split.get("name") == "key" else CLIENTS)
        default = SCHEMA.named["strategy"].default
        auto_sends = sends.is_auto(merged, default)
        return Experiment(clients, sends.resolved(merged, SCHEMA.check, default), changes, auto_sends)

    def variant(self, strategy: str, seed: int) -> Experiment:
        """The same experiment with another rule and every seed moved on by `seed`.

        A rule given with parameters ("fedbuff:buffer=5,lr=0.5") takes them; the parameters in the file belong to the
        rule in the file.
        """
        name, _, given = strategy.partition(":")
        document = self.resolved()
        if name != document["strategy"]["name"]:
            document["strategy"] = {"name": name}
        document["seeds"] = {key: value + seed for key, value in document["seeds"].items()}
        changes = [f"strategy.{change}" for change in given.split(",") if change]
        return Experiment.build(document, changes)

    def section(self, key: str) -> Any:
        """One section: its parameters, or its name and parameters."""
        return self.sections[key]

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Every key with its value; None is left out, as TOML has no word for it."""
        full = config.resolved(self.sections)
        if self.clients is not None:
            full["partition"] = {"name": full["partition"].pop("name"), "clients": self.clients, **full["partition"]}
        return full

    def text(self) -> str:
        """The resolved file."""
        return config.text(self.resolved())

    def template(self) -> str:
        """The resolved file to start from: what the file left to be chosen stays so, whatever is changed in it."""
        document = self.resolved()
        if self.auto_sends:
            document["strategy"]["sends"] = sends.AUTO
        return config.text(document)


def explain() -> str:
    """Every section and key with its default, range and meaning."""
    return SCHEMA.explain()
