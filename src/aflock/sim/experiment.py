"""The experiment file: TOML <-> checked sections. Every key has a meaning, a range and a default.

    experiment = Experiment.read("experiment.toml", ["strategy.name=ace", "delays.mean=30"])
    experiment.section("clock").concurrency
    experiment.text()                                  the resolved file, every default written out

A section is either a fixed set of keys or a `name` and the parameters of what is registered under that name. An unknown
section or key is an error that names the nearest one.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import data, local, models, strategies
from ..data import partition
from ..errors import InputError, ParameterError, UnknownParameter
from ..params import Params, choice, positive, unit, weights, whole
from . import delays
from .fleet import FleetParams


class ConfigError(InputError):
    """An experiment file that cannot be used; the message says where and what to change."""


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
class AutoParams(Params):
    """The client's half of whatever the server's rule is."""

    eta_l: float | None = positive(None, "local step size; None: the local rule's own default")


@dataclass(frozen=True)
class _Auto:
    """The entry `auto` of the section [local]: sgd, or what the rule asks for."""

    name: str = "auto"
    params: type[Params] = AutoParams

    def describe(self) -> dict[str, Any]:
        """JSON values."""
        return {"name": "auto", "rule": "the client's half of the server's rule", "parameters": AutoParams.describe()}


@dataclass(frozen=True)
class ClockParams(Params):
    """How asynchrony is simulated."""

    protocol: str = choice(
        "events", ("events", "ticks", "sampled"), "durations, whole server ticks, or an arrival process with old models"
    )
    window: int | None = whole(None, "sampled: clients start from one of the last so many models; None: delays decide")
    history: int = whole(200, "sampled: models kept when delays decide")
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


@dataclass(frozen=True)
class EvaluationParams(Params):
    """When the model is measured on the test set."""

    every: int = whole(100, "client reports between two evaluations")


@dataclass(frozen=True)
class CheckpointParams(Params):
    """When a run can be resumed from."""

    every: int = whole(1000, "server steps between two checkpoints")


@dataclass(frozen=True)
class Named:
    """A section that names something registered; `params` are the checked parameters."""

    name: str
    params: dict[str, Any]


@dataclass(frozen=True)
class _Registered:
    """How a named section is looked up."""

    default: str
    names: Callable[[], list[str]]
    describe: Callable[[str], dict[str, Any]]
    params: Callable[[str], type[Params]]
    meaning: str


def _by_name(entries: Callable[[], Iterable[Any]]) -> tuple[Callable[[], list[str]], Any, Any]:
    def find(name: str) -> Any:
        return next(entry for entry in entries() if entry.name == name)

    return lambda: [e.name for e in entries()], lambda name: find(name).describe(), lambda name: find(name).params


NAMED: dict[str, _Registered] = {
    "data": _Registered("digits", *_by_name(data.entries), "the dataset"),
    "partition": _Registered("dirichlet", *_by_name(partition.entries), "how its examples are split over the clients"),
    "model": _Registered("logistic", *_by_name(models.entries), "what is trained"),
    "local": _Registered("auto", *_by_name(lambda: [_Auto(), *local.entries()]), "the client's rule"),
    "strategy": _Registered("ace", *_by_name(strategies.entries), "the server's rule"),
    "delays": _Registered("exponential", *_by_name(delays.entries), "how long a job takes"),
}

FIXED: dict[str, tuple[type[Params], str]] = {
    "seeds": (SeedsParams, "everything random"),
    "training": (TrainingParams, "what a client does with a job"),
    "fleet": (FleetParams, "the clients as machines"),
    "clock": (ClockParams, "how asynchrony is simulated"),
    "budget": (BudgetParams, "when a run ends: at the first of these"),
    "evaluation": (EvaluationParams, "when the model is measured"),
    "checkpoint": (CheckpointParams, "when a run can be resumed from"),
}

CLIENTS = 40
"""Clients of an experiment that does not say how many."""

_DEFAULTS: dict[str, dict[str, Any]] = {"budget": {"uploads": 2000}}
"""What the file may leave out although the section itself has no default for it."""


@dataclass(frozen=True)
class Experiment:
    """A whole experiment, checked."""

    clients: int | None
    sections: dict[str, Params | Named]
    changes: tuple[str, ...] = field(default=(), compare=False)
    """What was changed by --set; it is in the sections already."""

    @staticmethod
    def read(path: str | Path, changes: Iterable[str] = ()) -> Experiment:
        """From a TOML file, with changes of the form "section.key=value"."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist; `aflock config --example` prints one to start from") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
        return Experiment.build(document, changes)

    @staticmethod
    def build(document: Mapping[str, Any], changes: Iterable[str] = ()) -> Experiment:
        """From nested dictionaries."""
        merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in document.items()}
        changes = tuple(changes)
        set_by_hand: set[tuple[str, str]] = set()
        for change in changes:
            _apply(merged, change, set_by_hand)
        known = [*NAMED, *FIXED]
        for key, value in merged.items():
            if key not in known:
                raise ConfigError(_nearest(f"there is no section [{key}]", key, known))
            if not isinstance(value, dict):
                raise ConfigError(f"{key} is a value; expected a section [{key}] with keys")
        split = merged.get("partition", {})
        clients = split.pop("clients", None if split.get("name") == "key" else CLIENTS)
        sections: dict[str, Params | Named] = {key: _named(key, merged.get(key, {})) for key in NAMED}
        sections |= {key: _fixed(key, merged.get(key, _DEFAULTS.get(key, {}))) for key in FIXED}
        return Experiment(clients, sections, tuple(changes))

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
        full: dict[str, dict[str, Any]] = {}
        for key, section in self.sections.items():
            values = {"name": section.name, **section.params} if isinstance(section, Named) else asdict(section)
            full[key] = {name: value for name, value in values.items() if value is not None}
        if self.clients is not None:
            full["partition"] = {"name": full["partition"].pop("name"), "clients": self.clients, **full["partition"]}
        return full

    def text(self) -> str:
        """The resolved file."""
        parts = []
        for key, values in self.resolved().items():
            parts.append(f"[{key}]\n" + "".join(f"{name} = {_toml(value)}\n" for name, value in values.items()))
        return "\n".join(parts)


def explain() -> str:
    """Every section and key with its default, range and meaning."""
    lines = []
    for key, registered in NAMED.items():
        lines += [f"[{key}]", f"    {registered.meaning}", f"    name = {_toml(registered.default)}"]
        lines.append(f"        one of {', '.join(registered.names())}")
        if key == "partition":
            lines.append(f'    clients = {CLIENTS}    how many clients there are (with name = "key": one per key)')
        for name in registered.names():
            keys = _explained(registered.params(name))
            lines += [f"  with name = {_toml(name)}:", *keys] if keys else []
        lines.append("")
    for key, (params, meaning) in FIXED.items():
        lines += [f"[{key}]", f"    {meaning}", *_explained(params), ""]
    return "\n".join(lines)


def _explained(params: type[Params]) -> list[str]:
    return [
        f"    {item['name']} = {_toml(item['default'])}    {item['help']} ({item['expected']})"
        for item in params.describe()
    ]


def _named(key: str, given: Mapping[str, Any]) -> Named:
    registered = NAMED[key]
    rest = dict(given)
    name = rest.pop("name", registered.default)
    base = str(name).split("+")[0]
    if base not in registered.names():
        raise ConfigError(_nearest(f"[{key}] name = {name!r} is not known", base, registered.names()))
    known = _parameters(key, base)
    for unknown in rest:
        if unknown not in known:
            shared = ["name", "clients"] if key == "partition" else ["name"]
            raise ConfigError(_nearest(f"[{key}] {name} has no parameter {unknown!r}", unknown, [*known, *shared]))
    params = _checked(registered.params(base), f"[{key}] {name}", rest)
    return Named(str(name), asdict(params))


def _fixed(key: str, given: Mapping[str, Any]) -> Params:
    return _checked(FIXED[key][0], f"[{key}]", given)


def _checked(params: type[Params], owner: str, given: Mapping[str, Any]) -> Params:
    try:
        return params.build(owner, given)
    except (ParameterError, UnknownParameter) as error:
        raise ConfigError(str(error)) from None


def _apply(document: dict[str, Any], change: str, set_by_hand: set[tuple[str, str]]) -> None:
    """Makes one change. A new name drops the parameters of the old one, those set by hand before if it has no such."""
    path, equals, text = change.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and key):
        raise ConfigError(f"--set {change!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    if not isinstance(document.setdefault(section, {}), dict):
        raise ConfigError(f"{section} is a value; expected a section [{section}] with keys")
    if key == "name" and document[section].get("name") != value:
        kept = {"clients"} | {k for k in _parameters(section, value) if (section, k) in set_by_hand}
        document[section] = {k: v for k, v in document[section].items() if k in kept}
    document[section][key] = value
    set_by_hand.add((section, key))


def _parameters(section: str, name: Any) -> list[str]:
    """The parameters of what is registered under that name, if anything is."""
    base = str(name).split("+")[0]
    if section not in NAMED or base not in NAMED[section].names():
        return []
    return [item["name"] for item in NAMED[section].params(base).describe()]


def _nearest(what: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{what}; {hint}known are {', '.join(known)}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return str(value)
