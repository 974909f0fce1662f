"""The client rules, by name.

rule = create("sgd", eta_l=0.1)
done = rule.train(job, Task(gradient), steps=5, needs=strategy.needs)
"""

from __future__ import annotations

from . import adam, adamasfl, fedprox, masfl, scaffold, sgd  # noqa: F401  (importing a rule registers it)
from .auto import AUTO, choose, made
from .base import LocalRule, Memory, Task, Trained
from .halves import check_halves, unsent
from .registry import Entry, create, entries, names, register
from .steps import Dynamic, Epochs, Fixed, Steps

__all__ = [
    "AUTO", "Dynamic", "Entry", "Epochs", "Fixed", "LocalRule", "Memory", "Steps", "Task", "Trained", "check_halves",
    "choose", "create", "entries", "made", "names", "register", "unsent",
]  # fmt: skip
