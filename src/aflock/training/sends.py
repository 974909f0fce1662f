"""sends = "auto" in a file: what the clients of a rule that averages gradients send, chosen from [local].

A local rule that adds something to the gradient (momentum, weight decay, fedprox, scaffold, adam, adamw) reaches the
model only by the direction of its steps; for plain SGD both are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .. import local, strategies

AUTO = "auto"


def is_auto(document: Mapping[str, Any], default: str) -> bool:
    """Whether a file leaves `sends` to be chosen; `default` is the strategy of a file that names none."""
    strategy = document.get("strategy", {})
    return _has_sends(strategy.get("name", default)) and strategy.get("sends", AUTO) == AUTO


def resolved(document: dict[str, Any], check: Callable[[dict[str, Any]], dict[str, Any]], default: str) -> Any:
    """The sections of a file, checked by `check`, with `sends` chosen where the file leaves it out or says "auto"."""
    strategy, is_open = document.setdefault("strategy", {}), is_auto(document, default)
    if is_open:
        strategy.pop("sends", None)  # no rule knows the word
    sections = check(document)
    if is_open:
        rule, client_rule = sections["strategy"], sections["local"]
        rule.params["sends"] = _chosen(rule.name, client_rule.name, client_rule.params)
    return sections


def _has_sends(strategy: object) -> bool:
    base = str(strategy).split("+")[0]
    return base in strategies.names() and "sends" in strategies.get(base).params.__dataclass_fields__


def _chosen(strategy: str, local_name: str, local_params: dict[str, Any]) -> str:
    """The direction of their steps, unless their local rule is plain SGD."""
    half = "scaffold" if "scaffold" in strategy.split("+")[1:] else "sgd"
    return "gradient" if local.made(local_name, local_params, (half, {})).follows else "direction"
