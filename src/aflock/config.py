"""A TOML file of sections: every key has a meaning, a range and a default; an unknown one is an error with the nearest.

A section is either a fixed set of keys or a `name` and the parameters of what is registered under that name. Which
sections a file has is its `Schema`: the experiment file's is in sim/experiment.py, the federation file's in
net/server/settings.py.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import InputError, ParameterError, UnknownParameter, did_you_mean
from .params import Params

Sections = dict[str, "Params | Named"]
Document = dict[str, dict[str, Any]]


class ConfigError(InputError):
    """A file that cannot be used; the message says where and what to change."""


@dataclass(frozen=True)
class Named:
    """A section that names something registered; `params` are the checked parameters."""

    name: str
    params: dict[str, Any]


@dataclass(frozen=True)
class Registered:
    """How a named section is looked up."""

    default: str
    entries: Callable[[], Iterable[Any]]
    meaning: str
    beside: tuple[tuple[str, str], ...] = ()
    """Keys that stand in the section and belong to no name, with their explanation."""

    def names(self) -> list[str]:
        """Everything that can be named."""
        return [entry.name for entry in self.entries()]

    def params(self, name: str) -> type[Params]:
        """The parameters of what has that name."""
        found: type[Params] = next(entry for entry in self.entries() if entry.name == name).params
        return found


@dataclass(frozen=True)
class Schema:
    """The sections of a file."""

    named: Mapping[str, Registered]
    fixed: Mapping[str, tuple[type[Params], str]]
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the file may leave out although the section itself has no default for it."""

    def merge(self, document: Mapping[str, Any], changes: Iterable[str] = ()) -> Document:
        """The file's sections with changes of the form "section.key=value"; sections nobody knows are refused."""
        merged: Document = {key: dict(v) if isinstance(v, Mapping) else v for key, v in document.items()}
        by_hand: set[tuple[str, str]] = set()
        for change in changes:
            self._apply(merged, change, by_hand)
        known = [*self.named, *self.fixed]
        for key, value in merged.items():
            if key not in known:
                raise ConfigError(_nearest(f"there is no section [{key}]", key, known))
            if not isinstance(value, dict):
                raise ConfigError(f"{key} is a value; expected a section [{key}] with keys")
        return merged

    def check(self, merged: Document) -> Sections:
        """Every section, checked."""
        sections: Sections = {key: self._named(key, merged.get(key, {})) for key in self.named}
        for key, (params, _) in self.fixed.items():
            sections[key] = checked(params, f"[{key}]", merged.get(key, self.defaults.get(key, {})))
        return sections

    def _named(self, key: str, given: Mapping[str, Any]) -> Named:
        registered, rest = self.named[key], dict(given)
        name = rest.pop("name", registered.default)
        base = str(name).split("+")[0]
        if base not in registered.names():
            raise ConfigError(_nearest(f"[{key}] name = {name!r} is not known", base, registered.names()))
        known = self._parameters(key, base)
        for unknown in rest:
            if unknown not in known:
                others = ["name", *(beside for beside, _ in registered.beside)]
                raise ConfigError(_nearest(f"[{key}] {name} has no parameter {unknown!r}", unknown, [*known, *others]))
        return Named(str(name), checked(registered.params(base), f"[{key}] {name}", rest).used())

    def _apply(self, document: Document, change: str, by_hand: set[tuple[str, str]]) -> None:
        """Makes one change. A new name drops the parameters of the old one, those set by hand if it has no such."""
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
            beside = {name for name, _ in self.named[section].beside} if section in self.named else set()
            kept = beside | {k for k in self._parameters(section, value) if (section, k) in by_hand}
            document[section] = {k: v for k, v in document[section].items() if k in kept}
        document[section][key] = value
        by_hand.add((section, key))

    def _parameters(self, section: str, name: Any) -> list[str]:
        """The parameters of what is registered under that name, if anything is."""
        base = str(name).split("+")[0]
        if section not in self.named or base not in self.named[section].names():
            return []
        return [item["name"] for item in self.named[section].params(base).describe()]

    def explain(self) -> str:
        """Every section and key with its default, range and meaning."""
        lines = []
        for key, registered in self.named.items():
            lines += [f"[{key}]", f"    {registered.meaning}", f"    name = {toml(registered.default)}"]
            lines.append(f"        one of {', '.join(registered.names())}")
            lines += [f"    {explanation}" for _, explanation in registered.beside]
            for name in registered.names():
                keys = _explained(registered.params(name))
                lines += [f"  with name = {toml(name)}:", *keys] if keys else []
            lines.append("")
        for key, (params, meaning) in self.fixed.items():
            lines += [f"[{key}]", f"    {meaning}", *_explained(params), ""]
        return "\n".join(lines)


def read(path: str | Path, example: str) -> dict[str, Any]:
    """The document in a TOML file; `example` is the command that prints one to start from."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; `{example}` prints one to start from") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def resolved(sections: Sections) -> Document:
    """Every key that has an effect, with its value; None is left out, as TOML has no word for it."""
    full: Document = {}
    for key, section in sections.items():
        values = {"name": section.name, **section.params} if isinstance(section, Named) else section.used()
        full[key] = {name: value for name, value in values.items() if value is not None}
    return full


def text(document: Document) -> str:
    """A document as TOML."""
    parts = []
    for key, values in document.items():
        parts.append(f"[{key}]\n" + "".join(f"{name} = {toml(value)}\n" for name, value in values.items()))
    return "\n".join(parts)


def toml(value: Any) -> str:
    """One value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(str(key))} = {toml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, float):
        return repr(value)
    return str(value)


def checked(params: type[Params], owner: str, given: Mapping[str, Any]) -> Params:
    """The parameters of a section, or an error that names it."""
    try:
        return params.build(owner, given)
    except (ParameterError, UnknownParameter) as error:
        raise ConfigError(str(error)) from None


def _explained(params: type[Params]) -> list[str]:
    return [
        f"    {item['name']} = {toml(item['default'])}    {item['help']} ({item['expected']})"
        for item in params.describe()
    ]


def _nearest(what: str, name: str, known: list[str]) -> str:
    return f"{what}; {did_you_mean(name, known)}known are {', '.join(known)}"
