"""Whether a client's rule goes with the server's: each must send what the other needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ParameterError
from .base import LocalRule
from .registry import get


def unsent(rule: LocalRule, needs: Iterable[str]) -> str | None:
    """The first vector the server's rule needs and the client's does not send."""
    return next((name for name in needs if name not in rule.gives), None)


def check_halves(rule: LocalRule, server: str, needs: Iterable[str], half: tuple[str, Mapping[str, Any]]) -> None:
    """Refuses a [local] rule beside a server's of that name; jobs carry what its own `half` asks for."""
    missing, carried = unsent(rule, needs), get(half[0]).cls.extras
    wanting = next((name for name in rule.extras if name not in carried), None)
    if missing or wanting:
        what = f"sends no {missing!r}" if missing else f"needs the job to carry {wanting!r}"
        raise ParameterError(f"[local] {rule.name} does not go with {server}: it {what}; leave [local] name out")
