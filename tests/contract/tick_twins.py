"""Naive float64 twins of one server step that answers several arrivals: a second reading of the specification page.

Each function computes w after a tick from the twin of the rule and the tick's arrivals, and leaves the twin as the rule
is then. Nothing in them is clever; they use the attributes of the twins in gradient_twins.py and model_twins.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.contract.twin import Array, mean_of, sum_of, weighted_mean


@dataclass(frozen=True)
class Arrival:
    """One update of a tick."""

    client: int
    version: int
    vectors: dict[str, Array]
    examples: int


Tick = list[Arrival]


def asgd(twin: Any, tick: Tick) -> None:
    """w <- w - lr * mean of the G."""
    twin.w = twin.w - mean_of([twin.lr * a.vectors["gradient"] for a in tick])
    twin.t += 1


def delay_adaptive(twin: Any, tick: Tick) -> None:
    """w <- w - mean of step_i*G_i; what drop mode rejects is left out."""
    moves = []
    for a in tick:
        tau = twin.t - a.version
        step = twin.lr if tau <= twin.tau_c else min(twin.lr, 1.0 / (4.0 * twin.smoothness * tau))
        if tau <= twin.tau_c or twin.mode == "scale":
            moves.append(step * a.vectors["gradient"])
    if moves:
        twin.w = twin.w - mean_of(moves)
        twin.t += 1


def fedasync(twin: Any, tick: Tick) -> None:
    """Mix with the mean of the x_K, with the mean alpha_t."""
    alpha = sum(twin.alpha * twin.s(twin.t - a.version) for a in tick) / len(tick)
    twin.w = (1.0 - alpha) * twin.w + alpha * mean_of([a.vectors["model"] for a in tick])
    twin.t += 1


def ace(twin: Any, tick: Tick) -> None:
    """All rows replaced, then one step."""
    for a in tick:
        old = twin.rows[a.client] if twin.memory == "client" else 0.0
        twin.rows[a.client] = old + a.vectors["gradient"]
    twin.step()


def aced(twin: Any, tick: Tick) -> None:
    """All rows replaced; A is formed before any start is reset."""
    for a in tick:
        twin.rows[a.client] = a.vectors["gradient"]
    active = [j for j in range(twin.n) if twin.t - twin.start[j] <= twin.tau_algo]
    if active:
        twin.w = twin.w - twin.lr * mean_of([twin.rows[j] for j in active])
    for a in tick:
        twin.start[a.client] = twin.t + 1
    twin.t += 1


def twafl(twin: Any, tick: Tick) -> None:
    """All models and stamps replaced, then one step."""
    for a in tick:
        twin.models[a.client], twin.stamp[a.client] = a.vectors["model"], twin.t + 1
        twin.examples[a.client] = a.examples
    mean = sum(twin.examples.values()) / len(twin.examples)
    ages = [twin.t + 1 - twin.stamp[j] for j in range(twin.n)]
    share = [twin.examples.get(j, mean) * math.exp(-twin.decay * ages[j]) for j in range(twin.n)]
    twin.w = weighted_mean([twin.models[j] for j in range(twin.n)], share)
    twin.t += 1


def rolling_fedavg(twin: Any, tick: Tick) -> None:
    """All models replaced, then their mean by examples."""
    for a in tick:
        twin.models[a.client], twin.examples[a.client] = a.vectors["model"], a.examples
    mean = sum(twin.examples.values()) / len(twin.examples)
    share = [twin.examples.get(j, mean) for j in range(twin.n)]
    twin.w = weighted_mean([twin.models[j] for j in range(twin.n)], share)
    twin.t += 1


def fedbuff(twin: Any, tick: Tick) -> None:
    """If at least m are held: one step with all of them, divided by their number."""
    twin.arrivals += [(twin.t - a.version, a.vectors["delta"]) for a in tick]
    if len(twin.arrivals) >= twin.m:
        moved = [(1.0 + tau) ** (-twin.a) * delta for tau, delta in twin.arrivals]
        twin.w, twin.arrivals = twin.w + twin.lr * mean_of(moved), []
        twin.t += 1


def afa_cd(twin: Any, tick: Tick) -> None:
    """The mean of all that are held."""
    twin.arrivals += [a.vectors["gradient"] for a in tick]
    if len(twin.arrivals) >= twin.m:
        twin.w, twin.arrivals = twin.w - twin.lr * mean_of(twin.arrivals), []
        twin.t += 1


def afa_cs(twin: Any, tick: Tick) -> None:
    """The mean over all clients."""
    for a in tick:
        twin.rows[a.client] = a.vectors["gradient"]
        twin.arrivals.append(a.client)
    if len(twin.arrivals) >= twin.m:
        twin.w, twin.arrivals = twin.w - twin.lr * mean_of([twin.rows[j] for j in range(twin.n)]), []
        twin.t += 1


def masfl(twin: Any, tick: Tick) -> None:
    """diff/S with S the number of all that are held; of a client that came twice the newest counts."""
    for a in tick:
        twin.arrivals.append((a.client, a.vectors))
        twin.newest[a.client] = a.vectors["gradient"]
    size = len(twin.arrivals)
    if size >= twin.size:
        heard = sorted({client for client, _ in twin.arrivals})
        diff = sum_of([twin.newest[i] - twin.c_rows[i] for i in heard])
        twin.g = twin.beta * (diff / size + twin.c()) + (1.0 - twin.beta) * twin.g
        for i in heard:
            twin.c_rows[i] = twin.newest[i].copy()
        directions = [vectors.get("direction") for _, vectors in twin.arrivals]
        twin.w = twin.w - twin.gamma * (twin.g if directions[0] is None else mean_of(directions))
        twin.arrivals = []
        twin.t += 1


TICKS: dict[str, Callable[[Any, Tick], None]] = {
    "asgd": asgd,
    "delay-adaptive": delay_adaptive,
    "fedasync": fedasync,
    "ace": ace,
    "aced": aced,
    "twafl": twafl,
    "rolling-fedavg": rolling_fedavg,
    "fedbuff": fedbuff,
    "afa-cd": afa_cd,
    "afa-cs": afa_cs,
    "masfl": masfl,
    "adamasfl": masfl,
}
