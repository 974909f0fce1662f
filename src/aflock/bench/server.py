"""What one arrival costs, rule by rule.

Rules take turns, round after round, so that other load on the machine slows all of them alike; a figure is the
median over the rounds of a rule's mean time per arrival, with the quartiles beside it. Nothing here is compared with a
number measured elsewhere: ratios are between things timed in the same run.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import kernels, rng, strategies
from ..strategies.base import Strategy
from ..types import Update, Vector
from .turns import Contestant, Progress, aims, judged, machine, quick_note, take_turns

LARGE, SMALL = 1_200_000, 7_850
CLIENTS, MANY = 100, 1_000


class Driver(Contestant):
    """One rule under a stream of ready-made arrivals; only `receive` is inside the clock."""

    def __init__(self, strategy: Strategy, vectors: list[Vector]) -> None:
        super().__init__()
        self.strategy: Any = strategy
        self._vectors = vectors
        self._count = 0

    def _prepare(self) -> Update:
        """An update of the next client with the next vector (both in a cycle), at the current version."""
        self._count += 1
        s, vector = self.strategy, self._vectors[self._count % len(self._vectors)]
        return Update(self._count % s.n, s.version, dict.fromkeys(s.needs, vector), 1, 50)

    def _work(self, prepared: Update) -> None:
        self.strategy.receive(prepared)


def _drive(name: str, clients: int, vectors: list[Vector], **params: Any) -> Driver:
    """A started rule and its arrivals."""
    strategy = strategies.create(name, clients=clients, **params)
    first = dict.fromkeys(range(clients), vectors[0]) if strategy.first else None
    strategy.start(np.zeros_like(vectors[0]), first=first)
    return Driver(strategy, vectors)


class BareAce(Driver):
    """What ace must do at the least: the finiteness check and the fused pass, called directly on bare arrays."""

    def _work(self, prepared: Update) -> None:
        s, vector = self.strategy, prepared.vectors["gradient"]
        kernels.all_finite(vector)
        kernels.exchange_step(s.rows.row(prepared.client), vector, s.total, s.w.high, s.w.low, -0.001)


class Resum(Driver):
    """ACE with this project's own rows and kernels, equally exact, but summed from scratch at every arrival."""

    def _work(self, prepared: Update) -> None:
        s, vector = self.strategy, prepared.vectors["gradient"]
        kernels.all_finite(vector)
        s.rows.store(prepared.client, vector)
        s.total[:] = 0.0
        for client in s.rows:
            s.rows.add_to(s.total, 1.0, client)
        s.w.step(-0.001 / s.n, s.total)


class Naive(Contestant):
    """ACE as its first formula reads: store the row, average all n rows again, step."""

    def __init__(self, clients: int, length: int, vectors: list[Vector], exact: bool) -> None:
        super().__init__()
        self._rows = np.zeros((clients, length), np.float32)
        self._w = np.zeros(length, np.float32)
        self._vectors = vectors
        self._mean = np.float64 if exact else np.float32
        self._count = 0

    def _prepare(self) -> Vector:
        self._count += 1
        return self._vectors[self._count % len(self._vectors)]

    def _work(self, prepared: Vector) -> None:
        self._rows[self._count % len(self._rows)] = prepared
        self._w -= 0.001 * self._rows.mean(axis=0, dtype=self._mean).astype(np.float32)


class Triad(Contestant):
    """The STREAM triad a <- b + s*c on float64 vectors of the same length: the memory bandwidth of one thread."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._a, self._b, self._c = (kernels.zeros(length, np.float64) for _ in range(3))
        self.bytes = 24 * length

    def _work(self, prepared: None) -> None:
        kernels.triad(self._a, self._b, 3.0, self._c)


def measure(*, quick: bool = False, progress: Progress = lambda text: None) -> dict[str, Any]:
    """The whole measurement; `quick` takes a few seconds only, and the report says so."""
    length, many, rounds = (120_000, 200, 3) if quick else (LARGE, MANY, 9)
    draws = rng.stream(0, "bench")
    vectors = [(0.01 * draws.standard_normal(length)).astype(np.float32) for _ in range(4)]
    report: dict[str, Any] = {"quick": quick, "machine": machine(), "length": length, "clients": CLIENTS}
    progress(f"every rule, {length} weights, {CLIENTS} clients")
    report |= _rules(length, vectors, rounds)
    progress(f"ace with {many} clients against {CLIENTS}")
    report["scaling"] = _scaling(length, vectors, many, rounds)
    progress(f"{SMALL} weights")
    report["small"] = _small(rounds)
    return report | {"targets": _targets(report)}


def _rules(length: int, vectors: list[Vector], rounds: int) -> dict[str, Any]:
    """Every registered rule, the variants of ace, the bare kernels, re-averaging and the triad, in turns."""
    contestants: dict[str, Contestant] = {}
    for name in strategies.names():
        contestants[name] = _drive(name, CLIENTS, vectors, **_SETTINGS.get(name, {}))
    contestants["ace client memory"] = _drive("ace", CLIENTS, vectors, memory="client", lr=0.001)
    contestants["ace int8"] = _drive("ace", CLIENTS, vectors, cache="int8", lr=0.001)
    contestants["ace disk"] = _drive("ace", CLIENTS, vectors, cache="disk", lr=0.001)
    ace = contestants["ace"]
    assert isinstance(ace, Driver)
    contestants["bare kernels of ace"] = BareAce(ace.strategy, vectors)
    contestants["re-averaging, NumPy float32"] = Naive(CLIENTS, length, vectors, exact=False)
    contestants["re-averaging, NumPy float64"] = Naive(CLIENTS, length, vectors, exact=True)
    contestants["re-averaging, own kernels"] = Resum(ace.strategy, vectors)
    triad = contestants["STREAM triad"] = Triad(length)
    take_turns(contestants, rounds, {"*": 50} | {name: 2 for name in contestants if name.startswith("re-")})
    base = ace.timing.median
    rows = {name: c.timing.describe() | {"of_ace": c.timing.median / base} for name, c in contestants.items()}
    assert isinstance(triad, Triad)
    rows["ace"]["gb_per_s"] = ACE_BYTES * length / base / 1e9
    rows["STREAM triad"]["gb_per_s"] = triad.bytes / triad.timing.median / 1e9
    return {"rules": rows}


ACE_BYTES = 4 + 4 + (4 + 4) + (8 + 8) + (4 + 4) + (4 + 4)
"""What one weight moves in ace: the check reads the gradient, the pass reads it again and reads and writes row, sum and
both halves of the model."""

_SETTINGS: dict[str, dict[str, Any]] = {"ace": {"lr": 0.001}, "aced": {"lr": 0.001, "tau_algo": 2 * CLIENTS}}


def _scaling(length: int, vectors: list[Vector], many: int, rounds: int) -> dict[str, Any]:
    contestants: dict[str, Contestant] = {
        "few": _drive("ace", CLIENTS, vectors, lr=0.001),
        "many": _drive("ace", many, vectors, lr=0.001),
    }
    take_turns(contestants, rounds, {"*": 100})
    few, large = contestants["few"].timing, contestants["many"].timing
    return {"clients": many, "few": few.describe(), "many": large.describe(), "ratio": large.median / few.median}


def _small(rounds: int) -> dict[str, Any]:
    draws = rng.stream(1, "bench")
    vectors = [(0.01 * draws.standard_normal(SMALL)).astype(np.float32) for _ in range(4)]
    contestants: dict[str, Contestant] = {
        name: _drive(name, CLIENTS, vectors, **_SETTINGS.get(name, {})) for name in strategies.names()
    }
    take_turns(contestants, rounds, {"*": 500})
    return {"length": SMALL, "rules": {name: c.timing.describe() for name, c in contestants.items()}}


def _targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """What the project aims at, and what this run found."""
    rules, ace = report["rules"], report["rules"]["ace"]["us"]
    others = {name: rules[name]["of_ace"] for name in strategies.names() if name != "ace"}
    worst = max(others, key=lambda name: others[name])
    rows = [
        *((f"{name} / ace", row["of_ace"], ">=", 40.0) for name, row in rules.items() if name.startswith("re-")),
        (f"ace, n={report['scaling']['clients']} / n={CLIENTS}", report["scaling"]["ratio"], "<=", 1.3),
        (f"slowest other rule ({worst}) / ace", others[worst], "<=", 3.0),
        ("ace receive / its bare kernels", ace / rules["bare kernels of ace"]["us"], "<=", 1.3),
        ("ace int8 / ace", rules["ace int8"]["of_ace"], "<=", 3.0),
        (f"ace at {SMALL} weights, us", report["small"]["rules"]["ace"]["us"], "<=", 20.0),
    ]
    return judged(rows)


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    machine = report["machine"]
    lines = [
        f"{report['length']} weights, {report['clients']} clients, one thread; load {machine['load']:.2f} on "
        f"{machine['cores']} cores{quick_note(report)}",
        "",
        f"{'one arrival':<30}{'us':>10}{'  (quartiles)':<20}{'of ace':>8}{'GB/s':>8}",
    ]
    for name, row in sorted(report["rules"].items(), key=lambda item: item[1]["us"]):
        spread = f"  ({row['us_q25']:.0f} - {row['us_q75']:.0f})"
        rate = f"{row['gb_per_s']:>8.1f}" if "gb_per_s" in row else ""
        lines.append(f"{name:<30}{row['us']:>10.0f}{spread:<20}{row['of_ace']:>8.2f}{rate}")
    lines += ["", f"{'at ' + str(report['small']['length']) + ' weights':<30}{'us':>10}"]
    for name, row in sorted(report["small"]["rules"].items(), key=lambda item: item[1]["us"]):
        lines.append(f"{name:<30}{row['us']:>10.1f}")
    lines += ["", *aims(report["targets"])]
    return "\n".join(lines)
