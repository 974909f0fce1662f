"""The federation file: which model is trained, by which rule, and how its server behaves.

    settings = Settings.read("federation.toml")
    settings.section("server").port
    settings.text()                                    the resolved file, every default written out

config.py reads and checks sections; this module says which sections and keys there are. `aflock serve --explain` prints
them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import config, data, local, models, rng, strategies
from ...config import ConfigError, Named, Registered, Schema
from ...coordination.budget import Budget
from ...errors import InputError, StateError
from ...events import Event
from ...params import Params, choice, positive, switch, unit, whole, words
from ...strategies.base import Strategy
from ...training import sends
from ...types import Vector
from ..federation.federation import Federation
from ..federation.params import FederationParams
from ..federation.terms import Terms
from ..identity.members import checked_name
from ..storage import model_file
from ..storage.configuration import Start

_HOST = "where the server listens; 127.0.0.1: only this machine can reach it; 0.0.0.0: every network it is in can"
_NAMES = (
    "names and addresses that clients use for the server in their URL: its certificate is made for them, and the URL "
    "that is printed has the first; None: host, or with 0.0.0.0 the machine's own name"
)


@dataclass(frozen=True)
class ServerParams(Params):
    """How the server listens, and what it keeps."""

    host: str = words("127.0.0.1", _HOST, "a name or address of this machine")
    port: int = whole(8443, "port to listen on; 0: any free one", least=0, most=65535)
    names: str | None = words(None, _NAMES, "names or addresses, separated by commas")
    lease: float = positive(600.0, "seconds a client may keep a job without a heartbeat, or progress of its upload")
    rate: float = positive(500.0, "requests per second a client may make; twice as many in a burst", least=0.01)
    connections: int = whole(4096, "open connections at a time")
    idle: float = positive(75.0, "seconds an idle connection stays open, and the headers of a request may take")
    snapshot: int = whole(256, "megabytes of journal after which the server writes a snapshot")
    snapshots: int = whole(2, "snapshots that the server keeps")
    archive: bool = switch(False, "whether the server keeps the journal from the beginning, for replays")
    status: str = choice(
        "open", ("open", "token"), "whether /v1/status and /metrics are open, or need a member's token"
    )


@dataclass(frozen=True)
class ServerEvaluationParams(Params):
    """Evaluation of the model on the test set of [data]; needs a [model] with a name."""

    every: int | None = whole(None, "server steps between two evaluations; None: never")
    target: float | None = unit(
        None, "accuracy at which the federation ends; None: it does not end by accuracy", one=True
    )


@dataclass(frozen=True)
class FederationBudgetParams(Params):
    """A federation ends at the first of these limits; without a limit, never."""

    uploads: int | None = whole(None, "updates of clients")
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
        "data": Registered("digits", data.entries, "the data set that a named model is made for, and evaluated on"),
        "local": Registered(
            "auto", lambda: [local.AUTO, *local.entries()], "the local rule that the server advises clients to use"
        ),
    },
    fixed={
        "federation": (FederationParams, "which clients take part, and what the server asks of them"),
        "server": (ServerParams, "how the server listens, and what it keeps"),
        "evaluation": (
            ServerEvaluationParams,
            "when the server evaluates the model, and which accuracy ends the federation",
        ),
        "budget": (FederationBudgetParams, "the federation ends at the first of these limits; without a limit, never"),
    },
)

LASTING = ("strategy", "model", "data", "federation")
"""Sections that must not change after a federation has begun."""

CHANGEABLE = {"federation": ("selection", "probabilities", "norm_factor", "max_examples", "max_steps")}
"""Keys of these sections that may change all the same: records hold who got which job, and what was accepted."""

EXAMPLE = """\
# A federation: `aflock serve federation.toml --data-dir fed/`. Every key: `aflock serve --explain`.

[strategy]
name = "fedbuff"
buffer = 4

[model]
name = "logistic"          # or name = "vector" and length = 7850: the server need not know more

[data]
name = "digits"            # what the model is made for, and evaluated on

[local]
eta_l = 0.1

[federation]
clients = 2                # the first job is given when this many have joined
steps = 5

[evaluation]
every = 10

[server]
port = 8443
"""


@dataclass(frozen=True)
class Settings:
    """A whole federation file, checked."""

    sections: config.Sections

    @staticmethod
    def read(file: str | Path, changes: Iterable[str] = ()) -> Settings:
        """Reads a TOML file, and makes changes of the form "section.key=value"."""
        return Settings.build(config.read(file, "aflock serve --example"), changes)

    @staticmethod
    def build(document: Mapping[str, Any], changes: Iterable[str] = ()) -> Settings:
        """Checks nested dictionaries, as TOML has them."""
        merged = SCHEMA.merge(document, changes)
        settings = Settings(sends.resolved(merged, SCHEMA.check, SCHEMA.named["strategy"].default))
        settings.strategy()
        _check_selection(settings.section("federation"))
        if settings.section("model").name == "vector" and settings.section("evaluation").every is not None:
            raise ConfigError(
                "[evaluation] every needs a [model] with a name; the server cannot evaluate a plain vector"
            )
        if settings.section("evaluation").target is not None and settings.section("evaluation").every is None:
            raise ConfigError("[evaluation] target needs every: how often the server evaluates the model")
        return settings

    def section(self, key: str) -> Any:
        """One section: its parameters; of a named section, its name and parameters."""
        return self.sections[key]

    def resolved(self) -> config.Document:
        """Every key with its value."""
        return config.resolved(self.sections)

    def text(self) -> str:
        """The federation file with every default written out."""
        return config.text(self.resolved())

    def terms(self) -> Terms:
        """When the federation ends, and which norms it accepts until then."""
        budget, factor = self.section("budget"), self.section("federation").norm_factor
        limits = {"uploads": budget.uploads, "versions": budget.versions, "target": self.section("evaluation").target}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        return Terms(Budget(**given), factor or None)

    def lasting(self) -> config.Document:
        """The sections and keys that must not change after the federation has begun."""
        found = {key: values for key, values in self.resolved().items() if key in LASTING}
        for section, keys in CHANGEABLE.items():
            found[section] = {key: value for key, value in found[section].items() if key not in keys}
        return found

    def check_continues(self, kept: Mapping[str, Any], file: Path) -> None:
        """Raises `StateError` if `kept`, the content of `file`, has another rule or model than these settings."""
        began = Settings.build({name: kept[name] for name in LASTING if name in kept}).lasting()
        for section, values in self.lasting().items():
            if began[section] != values:
                changed = [key for key in values if began[section].get(key) != values[key]]
                raise StateError(
                    f"[{section}] {', '.join(changed) or 'name'} is not what this federation was begun with (see "
                    f"{file}); put it back, or begin another federation in another folder"
                )

    def federation(self, w0: Vector, on_event: Callable[[Event], None] | None = None) -> Federation:
        """The federation before its first record."""
        return Federation(self.strategy, self.section("federation"), self.terms(), w0, on_event)

    def strategy(self) -> Strategy:
        """The server's rule, for the number of clients the federation begins with."""
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
        """The name and parameters of the advised local rule; raises if it does not go with the server's rule."""
        chosen, rule = self.section("local"), self.strategy()
        name, params = local.choose(chosen.name, chosen.params, rule.client_half)
        local.check_halves(local.create(name, **params), rule.name, rule.needs, rule.client_half)
        return {"name": name, **params}

    def start(self) -> Start:
        """The initial model w^0, the same at every start."""
        model: Named = self.section("model")
        if model.name == "vector":
            return Start(model_file.initial(model.params["length"], model.params["file"]), None)
        source, seed = self.section("data"), self.section("federation").seed
        dataset = data.load(source.name, seed=seed, **source.params)
        made = models.create(model.name, dataset, **model.params)
        return Start(made.init(rng.stream(seed, "model")), (made, dataset))


def _check_selection(p: FederationParams) -> None:
    if (p.probabilities is not None) != (p.selection == "biased"):
        raise ConfigError(
            f'[federation] selection = "{p.selection}" and probabilities do not go together; "biased" needs them, the '
            "others take none"
        )
    for name in p.probabilities or {}:
        try:
            checked_name(name)
        except InputError as error:
            raise ConfigError(f"[federation] probabilities: {error}") from None
