"""The demonstration: heterogeneity amplification on handwritten digits.

Forty clients hold few classes of the digits each; half of the clients is eight times slower. In one setting the slow
ones hold the later digits (speed is correlated with the data), in the other any clients are slow (it is not). Every
rule gets the same clients, data, batches, job durations and number of uploads: only the rule differs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..reports import figures, tables
from ..runs import running
from ..sim.experiment import Experiment
from ..sim.simulation import Simulation

UPLOADS, SEEDS = 5000, 3

EXPERIMENT: dict[str, dict[str, Any]] = {
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 40, "alpha": 0.1, "min_size": 10},
    "model": {"name": "logistic", "weight_decay": 0.02},
    "local": {"name": "auto", "eta_l": 0.1},
    "training": {"batch": 32},
    "fleet": {"slow_share": 0.5, "slowdown": 8.0},
    "budget": {"uploads": UPLOADS},
    "evaluation": {"every": 150},
}

RULES = (
    "ace:lr=0.1",
    "aced:lr=0.1,tau_algo=200",
    "afa-cs:lr=0.1,buffer=5",
    "ca2fl:lr=1.0,buffer=5",
    "masfl:gamma=0.1,beta=0.3,buffer=5",
    "asgd:lr=0.02",
    "delay-adaptive:lr=0.02",
    "fedbuff:lr=1.0,buffer=5",
    "afa-cd:lr=0.1,buffer=5",
    "fedasync:alpha=0.2",
    "mr-asyncfl:gamma=0.8",
    "fedavg",
)
"""One step of a buffered rule moves as far as five of an unbuffered one; learning rates are set so that all rules can
settle within the budget."""

SETTINGS = {"class": "slow clients hold other digits", "none": "slow clients hold any digits"}


def run(watch: Callable[[str, int, Simulation], None] | None = None, uploads: int = UPLOADS) -> dict[str, Any]:
    """Both settings; per setting the described runs of every rule."""
    found = {}
    for correlate in SETTINGS:
        document = EXPERIMENT | {
            "fleet": EXPERIMENT["fleet"] | {"correlate": correlate},
            "budget": {"uploads": uploads},
        }
        compared = running.compare(Experiment.build(document), RULES, seeds=SEEDS, watch=watch)
        found[correlate] = {name.split(":")[0]: described for name, described in running.describe(compared).items()}
    return found


def table(found: dict[str, Any]) -> str:
    """Both settings one after the other, and what the correlation costs each rule."""
    parts = []
    for correlate, title in SETTINGS.items():
        parts += [title, "", tables.comparison(found[correlate]), ""]
    lost = {name: _accuracy(found["none"][name]) - _accuracy(found["class"][name]) for name in found["class"]}
    ranked = sorted(lost, key=lambda name: -lost[name])
    parts.append("accuracy lost when speed goes with the data: " + ", ".join(f"{n} {lost[n]:+.3f}" for n in ranked))
    return "\n".join(parts)


def _accuracy(listed: list[dict[str, Any]]) -> float:
    return float(sum(run["accuracy"] for run in listed) / len(listed))


def picture(found: dict[str, Any], file: Path) -> None:
    """Accuracy against uploads, one panel per setting."""
    panels = {
        title: {name: [run["curve"] for run in listed] for name, listed in found[correlate].items()}
        for correlate, title in SETTINGS.items()
    }
    figures.panels_figure(file, panels, "uploads", "40 clients on handwritten digits, half of them 8x slower")
