"""Every rule with everything the server's door lets through: the largest and the smallest numbers, in any order.

A federation takes updates as the server does (checked at the door, then applied as a record), with clients that come,
go and lose their jobs in between. No rule may raise anything, and its state can be saved, loaded and continued at any
moment. The rules that add weights are compared with exact fractions.
"""

from __future__ import annotations

import math
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aflock import Update, errors, state, strategies
from aflock.net.federation.guard import SETTLED
from aflock.net.protocol import wire
from aflock.net.protocol.refusals import Refused
from aflock.net.protocol.wire import UpdateHead
from aflock.net.server.settings import Settings
from aflock.strategies.base import Strategy
from aflock.types import Vector
from tests.contract.cases import Case, all_cases
from tests.contract.continuation import digest

N, D = 3, 5
LARGEST, SMALLEST = float(np.finfo(np.float32).max), 1e-45
COUNTS = (1, 2, 60, 10**9, 10**18 - 1)
SIZES = (0.0, -0.0, SMALLEST, -SMALLEST, 1e-38, 1.0, -3.0, 6e4, 1e19, -1e30, LARGEST, -LARGEST)

CASES = [*all_cases(), Case("rolling-fedavg+scaffold")]


class Life:
    """A federation and a random life for it: the same seed is the same life."""

    def __init__(self, case: Case, encoding: str, norm_factor: float, clients: int = N) -> None:
        document: dict[str, Any] = {
            "strategy": {"name": case.name, **case.params},
            "model": {"name": "vector", "length": D},
            "federation": {
                "clients": clients,
                "encoding": encoding,
                "norm_factor": norm_factor,
                "max_examples": 10**18 - 1,
                "max_steps": 10**18 - 1,
            },
        }
        if case.params.get("buffer", 0) > N and case.name in ("afl", "fedavg", "masfl", "adamasfl"):
            document["strategy"]["buffer"] = N  # what a round waits for
        self.federation = Settings.build(document).federation(np.linspace(-1, 1, D, dtype=np.float32))
        self.time = 0.0

    def let(self, kind: str, body: bytes = b"", **head: Any) -> Any:
        self.time += 1.0
        return self.federation.apply({"k": kind, "t": self.time, **head}, body)

    def live(self, seed: int, begin: int, end: int) -> None:
        if begin == 0:
            for name in "abc":
                self.let("hello", name=name, gen=1)
        for position in range(begin, end):
            self._happen(np.random.default_rng([seed, position]))

    def _happen(self, draws: np.random.Generator) -> None:
        federation = self.federation
        name = str(draws.choice(list("abcdef")))
        client, what = federation.clients.get(name), draws.random()
        if client is None:
            self.let("hello", name=name, gen=1)
        elif what < 0.04:
            self.let("leave", name=name)
        elif what < 0.08 and (ticket := federation.coordinator.open.get(client.number)):
            self.let("drop", name=name, j=ticket.job, why="lost")
        elif federation.coordinator.open.get(client.number) is None:
            self.let("pull", name=name)
        else:
            with suppress(Refused):  # what the door does not let through
                self._update(name, draws)

    def _update(self, name: str, draws: np.random.Generator) -> None:
        federation = self.federation
        client, encoding = federation.clients[name], federation.p.encoding
        ticket = federation.coordinator.ticket(client.number)
        names, _ = federation.expected[ticket.first]
        steps, examples = (int(count) for count in draws.choice(COUNTS, 2))
        body = b"".join(bytes(wire.encode(_vector(draws, encoding), encoding)) for _ in names)
        head = UpdateHead(ticket.version, steps, examples, names, encoding)
        federation.check_head(name, ticket.job, head.headers(), len(body))
        norms = federation.check_vectors(client, head, body)
        self.let(
            "update", body, name=name, j=ticket.job, v=ticket.version, s=steps, e=examples, n=list(names), enc=encoding,
            next=int(draws.integers(2)), norm=norms,
        )  # fmt: skip


def _vector(draws: np.random.Generator, encoding: str) -> Vector:
    """Mostly extreme, sometimes ordinary, always finite."""
    usual = draws.random() < 0.4
    found = draws.standard_normal(D) if usual else draws.choice(SIZES, D if draws.random() < 0.5 else 1)
    most = 65504.0 if encoding == "float16" else LARGEST
    vector: Vector = np.clip(np.broadcast_to(found, D), -most, most).astype(np.float32)
    return vector


@pytest.mark.parametrize("norm_factor", [100.0, 0.0])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_rule_fails_at_what_the_door_lets_through(case: Case, norm_factor: float, tmp_path: Path) -> None:
    for seed, encoding in enumerate((*wire.ENCODINGS, "float32", "float32")):
        life = Life(case, encoding, norm_factor)
        life.live(seed, 0, 150)
        state.save(tmp_path / "state", {"state": life.federation.state_dict()})
        other = Life(case, encoding, norm_factor)
        other.time = life.time
        other.federation.load_state_dict(state.load(tmp_path / "state")["state"])
        for each in (life, other):
            each.live(seed, 150, 250)
        assert life.federation.counts.updates > 20
        assert digest(life.federation.state_dict()) == digest(other.federation.state_dict())
        if norm_factor:
            assert np.isfinite(life.federation.model).all()


def test_first_gradients_say_how_long_the_next_gradient_may_be() -> None:
    life = Life(Case("ace"), "float32", 100.0, clients=SETTLED)
    federation, one = life.federation, UpdateHead(0, 1, 1, ("gradient",), "float32")
    names = [f"client{k}" for k in range(SETTLED)]
    for name in names:
        life.let("hello", name=name, gen=1)
    for name in names:
        job = life.let("pull", name=name)
        ones = np.ones(D, np.float32).tobytes()
        norms = federation.check_vectors(federation.clients[name], one, ones)
        life.let("update", ones, name=name, j=job.id, v=0, s=1, e=1, n=["gradient"], enc="float32", next=0, norm=norms)
    assert federation.version == 1
    client = federation.clients[names[0]]
    assert federation.check_vectors(client, one, np.full(D, 99, np.float32).tobytes()) == [pytest.approx(99 * D**0.5)]
    with pytest.raises(Refused, match=r"the limit is 100 times the largest so far, 2\.236 "):
        federation.check_vectors(client, one, np.full(D, 101, np.float32).tobytes())


@pytest.mark.parametrize("norm_factor", [100.0, 0.0])
def test_a_last_step_that_leaves_the_model_not_finite_is_undone(norm_factor: float) -> None:
    life = Life(Case("fedbuff", {"lr": 10.0}), "float32", norm_factor)
    for name in "abc":
        life.let("hello", name=name, gen=1)
    before, job = life.federation.model.tobytes(), life.let("pull", name="b")
    huge = np.full(D, LARGEST, np.float32).tobytes()
    life.let("update", huge, name="b", j=job.id, v=0, s=1, e=1, n=["delta"], enc="float32", next=0)
    life.let("end", why="enough")
    assert life.federation.version == 1
    assert (life.federation.model.tobytes() == before) == (norm_factor > 0)
    assert life.federation.counts.undone == (norm_factor > 0)
    assert ("from the updates of b; the longest" in life.federation.guard.undone) == (norm_factor > 0)


# --- weights that do not cancel --------------------------------------------------------------------------------------


def started(case: Case) -> Strategy:
    s, ones = case.create(), np.ones(D, np.float32)
    s.start(ones, first=dict.fromkeys(s.clients, ones) if s.first else None)
    return s


def exact(models: dict[int, float], weights: dict[int, Fraction]) -> float:
    """The weighted mean of one-number models, without rounding."""
    return float(sum(weights[c] * Fraction(models[c]) for c in weights) / sum(weights.values()))


@pytest.mark.parametrize("cache", ["dense", "disk"])
@pytest.mark.parametrize(("rule", "decay"), [("rolling-fedavg", 0.0), ("twafl", 1.0 - math.log(2.0))])
@pytest.mark.parametrize("shrinking", [[10**18 - 1, 1], [10**18 - 1] * 20 + [1], [10**k for k in range(18, -1, -1)]])
def test_a_weight_that_goes_leaves_no_rounding_behind(
    rule: str, decay: float, shrinking: list[int], cache: str
) -> None:
    """An honest client with few examples, and another whose enormous number of examples shrinks to one."""
    s = strategies.create(rule, clients=2, cache=cache)
    s.start(np.zeros(1, np.float32), examples={0: 600, 1: 1})
    models, stamps, counts = {0: 1.0, 1: 0.0}, {0: 1, 1: 0}, {0: 600, 1: 1}
    s.receive(Update(0, 0, {"model": np.ones(1, np.float32)}, 1, 600))
    for count in shrinking:
        models[1], stamps[1], counts[1] = -3.0, s.version + 1, count
        s.receive(Update(1, s.version, {"model": np.full(1, -3.0, np.float32)}, 1, count))
        weights = {c: counts[c] * Fraction(math.exp(decay * (stamps[c] - stamps[1]))) for c in models}
        assert s.model[0] == pytest.approx(exact(models, weights), rel=1e-6)
    blob = s.state_dict()
    again = strategies.create(rule, clients=2, cache=cache)
    again.load_state_dict(blob)
    for each in (s, again):
        each.receive(Update(0, each.version, {"model": np.full(1, 2.0, np.float32)}, 1, 7))
    assert digest(s.state_dict()) == digest(again.state_dict())


def is_sum(case: Case) -> bool:
    """Whether a rule keeps the plain sum of its rows."""
    s = started(case)
    return hasattr(s, "total") and hasattr(s, "rows") and not hasattr(s, "stamps") and len(s.rows) > 0


@pytest.mark.parametrize("case", [case for case in all_cases() if is_sum(case)], ids=str)
def test_a_huge_row_that_goes_leaves_nothing_behind(case: Case) -> None:
    s: Any = started(case)
    for client, size in ((0, 1.0), (1, 3.4e38), (2, -7.0), (3, 0.5)) * 10:
        s.receive(Update(client, s.version, {name: np.full(D, size, np.float32) for name in s.needs}, 1, 3))
    s.leave(1)
    exactly = sum(s.rows.read(client).astype(np.float64) for client in getattr(s, "starts", s.rows))
    np.testing.assert_allclose(s.total, exactly, rtol=1e-6)


@pytest.mark.parametrize("rule", ["rolling-fedavg", "twafl"])
def test_a_state_saved_before_weights_were_watched_is_continued(rule: str) -> None:
    s = strategies.create(rule, clients=2)
    s.start(np.zeros(1, np.float32))
    for position in range(6):
        s.receive(Update(position % 2, s.version, {"model": np.full(1, position, np.float32)}, 1, 3 + position))
    blob = s.state_dict()
    del blob["keeps"]["peak"]
    again = strategies.create(rule, clients=2)
    again.load_state_dict(blob)
    for each in (s, again):
        each.receive(Update(0, each.version, {"model": np.ones(1, np.float32)}, 1, 4))
    assert s.model.tobytes() == again.model.tobytes()


@pytest.mark.parametrize("case", all_cases(), ids=str)
@pytest.mark.parametrize("count", [2**63, 10**400])
def test_a_count_that_no_state_can_keep_is_refused(case: Case, count: int) -> None:
    s = started(case)
    before = digest(s.state_dict())
    vectors = {name: np.ones(D, np.float32) for name in s.needs}
    for steps, examples in ((count, 1), (1, count)):
        with pytest.raises(errors.CountError, match="larger than 9223372036854775807"):
            s.receive(Update(0, s.version, vectors, steps, examples))
    assert digest(s.state_dict()) == before
