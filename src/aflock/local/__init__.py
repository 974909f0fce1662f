"""The client rules, by name.

rule = create("sgd", eta_l=0.1)
done = rule.train(job, Task(gradient), steps=5, needs=strategy.needs)
"""

from __future__ import annotations

from . import rules  # noqa: F401  (importing the rules registers them)
from .auto import AUTO, choose, made
from .base import LocalRule, Memory, Task, Trained, first_vector
from .halves import check_halves, unsent
from .registry import LocalRuleEntry, create, entries, names, register
from .steps import Dynamic, Epochs, Fixed, Steps

__all__ = [
    "AUTO",
    "Dynamic",
    "Epochs",
    "Fixed",
    "LocalRule",
    "LocalRuleEntry",
    "Memory",
    "Steps",
    "Task",
    "Trained",
    "check_halves",
    "choose",
    "create",
    "entries",
    "first_vector",
    "made",
    "names",
    "register",
    "unsent",
]  # fmt: skip
