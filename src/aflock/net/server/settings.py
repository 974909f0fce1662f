"""The federation file: what is trained, by which rule, and how its server behaves.

    settings = Settings.read("federation.toml")
    settings.section("server").port
    settings.text()                                    the resolved file, every default written out

What sections are is in config.py; here is which there are. `aflock serve --explain` prints them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import config, data, local, models, rng, strategies
from ..config import ConfigError, Named, Registered, Schema
from ..data import Dataset
from ..models.base import Model
from ..params import Params, choice, positive, switch, unit, whole, words
from ..strategies.base import Strategy
from ..types import Vector
from . import weights
from .seats import Terms
from .wire import ENCODINGS

_HOST = "where the server listens; 127.0.0.1: only this machine can reach it; 0.0.0.0: every network it is in can"
_NAMES = (
    "what clients may write for the server in their URL: the certificate is made out to these names and addresses, and "
    "the first stands in the URL that is printed; None: host, or with 0.0.0.0 the machine's own name"
)


@dataclass(frozen=True)
class FederationParams(Params):
    """Who takes part and what is asked of them."""

    clients: int = whole(1, "clients that must have come before the first job is given")
    concurrency: int | None = whole(None, "jobs in flight; None: every client may have one")
    max_staleness: int | None = whole(None, "older updates are discarded; None: the rule's own bound", least=0)
    steps: int = whole(1, "K, local steps a client is advised to make")
    batch: int = whole(32, "examples per local step a client is advised to take")
    encoding: str = choice("float32", ENCODINGS, "how vectors travel, both ways")
    max_norm: float | None = positive(None, "largest Euclidean norm of a vector in an update; None: any")
    strikes: int = whole(5, "unusable updates in a row after which a client is suspended")
    seed: int = whole(0, "initial model, random rules", least=0)


@dataclass(frozen=True)
class ServerParams(Params):
    """The machine's side."""

    host: str = words("127.0.0.1", _HOST, "a name or address of this machine")
    port: int = whole(8443, "port to listen on; 0: any free one", least=0, most=65535)
    names: str | None = words(None, _NAMES, "names or addresses, apart by commas")
    lease: float = positive(600.0, "seconds a client may work without a sign of life")
    rate: float = positive(500.0, "requests per second a client may make; twice as many in a burst", least=0.01)
    connections: int = whole(4096, "open connections at a time")
    idle: float = positive(75.0, "seconds an idle connection is kept, and a request's headers may take")
    snapshot: int = whole(256, "megabytes of journal after which a snapshot is made")
    snapshots: int = whole(2, "snapshots that are kept")
    archive: bool = switch(False, "whether the journal is kept from the beginning, for replays")
    status: str = choice("open", ("open", "token"), "who may see /v1/status and /metrics: anybody, or members")


@dataclass(frozen=True)
class EvaluationParams(Params):
    """The model on the test set of [data]; needs a [model] with a name."""

    every: int | None = whole(None, "server steps between two evaluations; None: never")
    target: float | None = unit(None, "accuracy at which the federation ends; None: none", one=True)


@dataclass(frozen=True)
class BudgetParams(Params):
    """When a federation ends: at the first of these; never, if there is none."""

    uploads: int | None = whole(None, "client reports")
    versions: int | None = whole(None, "server steps")


@dataclass(frozen=True)
class VectorParams(Params):
    """A model the server knows nothing of but its weights."""

    length: int | None = whole(None, "how many weights there are; all of them begin at zero")
    file: str | None = words(None, "safetensors file with one tensor, the weights to begin with", "the path of a file")


@dataclass(frozen=True)
class _Vector:
    """The entry `vector` of the section [model]."""

    name: str = "vector"
    params: type[Params] = VectorParams


SCHEMA = Schema(
    named={
        "strategy": Registered("ace", strategies.entries, "the server's rule"),
        "model": Registered("logistic", lambda: [_Vector(), *models.entries()], "what is trained"),
        "data": Registered("digits", data.entries, "what a named model is made for, and measured on"),
        "local": Registered("auto", lambda: [local.AUTO, *local.entries()], "the client's rule, as advised"),
    },
    fixed={
        "federation": (FederationParams, "who takes part and what is asked of them"),
        "server": (ServerParams, "the machine's side"),
        "evaluation": (EvaluationParams, "when the model is measured, and when that is enough"),
        "budget": (BudgetParams, "when the federation ends: at the first of these; never, if there is none"),
    },
)

LASTING = ("strategy", "model", "data", "federation")
"""Sections that make a federation what it is: it cannot be continued with others."""

EXAMPLE = """\
# A federation: `aflock serve federation.toml --data-dir fed/`. Every key: `aflock serve --explain`.

[strategy]
name = "fedbuff"
buffer = 4

[model]
name = "logistic"          # or name = "vector" and length = 7850: the server need not know more

[data]
name = "digits"            # what the model is made for, and measured on

[local]
eta_l = 0.1

[federation]
clients = 2                # the first job is given when so many have come
steps = 5

[evaluation]
every = 10

[server]
port = 8443
"""


@dataclass(frozen=True)
class Start:
    """What a federation begins with; what its model can be judged by only where the server knows that."""

    w0: Vector
    judge: tuple[Model, Dataset] | None


@dataclass(frozen=True)
class Settings:
    """A whole federation file, checked."""

    sections: config.Sections

    @staticmethod
    def read(file: str | Path, changes: Iterable[str] = ()) -> Settings:
        """From a TOML file, with changes of the form "section.key=value"."""
        return Settings.build(config.read(file, "aflock serve --example"), changes)

    @staticmethod
    def build(document: Mapping[str, Any], changes: Iterable[str] = ()) -> Settings:
        """From nested dictionaries."""
        settings = Settings(SCHEMA.check(SCHEMA.merge(document, changes)))
        settings.strategy()
        if settings.section("model").name == "vector" and settings.section("evaluation").every is not None:
            raise ConfigError("[evaluation] every needs a [model] with a name; the server cannot run a mere vector")
        if settings.section("evaluation").target is not None and settings.section("evaluation").every is None:
            raise ConfigError("[evaluation] target needs every: how often the model is measured")
        return settings

    def section(self, key: str) -> Any:
        """One section: its parameters, or its name and parameters."""
        return self.sections[key]

    def resolved(self) -> config.Document:
        """Every key with its value."""
        return config.resolved(self.sections)

    def text(self) -> str:
        """The resolved file."""
        return config.text(self.resolved())

    def terms(self) -> Terms:
        """When the federation ends."""
        budget = self.section("budget")
        return Terms(budget.uploads, budget.versions, self.section("evaluation").target)

    def lasting(self) -> config.Document:
        """What must not change while a federation lives."""
        return {key: values for key, values in self.resolved().items() if key in LASTING}

    def strategy(self) -> Strategy:
        """The rule, for the clients it begins with."""
        rule: Named = self.section("strategy")
        federation: FederationParams = self.section("federation")
        made = strategies.create(rule.name, federation.clients, seed=federation.seed, **rule.params)
        if made.largest_cohort is not None and made.largest_cohort > federation.clients:
            raise ConfigError(
                f"[strategy] {rule.name} waits for {made.largest_cohort} clients in a round, but [federation] clients "
                f"= {federation.clients}; raise it"
            )
        return made

    def advice(self) -> dict[str, Any]:
        """The client's rule, by name and parameters; one that cannot go with the server's is refused."""
        half, rule = self.section("local"), self.strategy()
        name, params = local.choose(half.name, half.params, rule.client_half)
        local.check_halves(local.create(name, **params), rule.name, rule.needs, rule.client_half)
        return {"name": name, **params}

    def start(self) -> Start:
        """The initial model, the same at every start."""
        model: Named = self.section("model")
        if model.name == "vector":
            return Start(weights.initial(model.params["length"], model.params["file"]), None)
        source, seed = self.section("data"), self.section("federation").seed
        dataset = data.load(source.name, seed=seed, **source.params)
        made = models.create(model.name, dataset, **model.params)
        return Start(made.init(rng.stream(seed, "model")), (made, dataset))
