"""Every server rule on one weight, with numbers a reader can check; and the traps others fell into."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from aflock import Update, strategies
from aflock.strategies.base import Strategy
from aflock.types import Receipt


def begin(name: str, clients: int, w0: float = 0.0, first: list[float] | None = None, **params: Any) -> Strategy:
    s = strategies.create(name, clients=clients, **params)
    s.start(_v(w0), first={c: _v(g) for c, g in enumerate(first)} if first else None)
    return s


def _v(number: float) -> Any:
    return np.array([number], np.float32)


def send(s: Strategy, client: int, number: float, version: int | None = None, **options: Any) -> Receipt:
    vectors = {name: _v(number) for name in s.needs} | {k: _v(x) for k, x in options.pop("vectors", {}).items()}
    return s.receive(Update(client, s.version if version is None else version, vectors, **options))


def w(s: Strategy) -> float:
    return float(s.model[0])


def test_the_contract_of_the_design_page() -> None:
    """The code block of the design page, word for word, with vectors of three numbers."""
    gradients = {i: np.array([i, 1, -i], np.float32) for i in range(5)}
    w0, g = np.zeros(3, np.float32), np.array([1, 2, 3], np.float32)
    s = strategies.create("ace", clients=5, lr=0.1)
    s.start(w0, first=gradients)
    job = s.job(client=3)
    receipt = s.receive(Update(client=3, version=job.version, vectors={"gradient": g}, steps=1, examples=50))
    assert (receipt.applied, receipt.reason, receipt.staleness) == (True, "", 0)
    assert s.version == 2
    assert s.model.dtype == np.float32
    blob = s.state_dict()
    s.load_state_dict(blob)
    assert (s.needs, s.first) == (("gradient",), True)
    first_step = -0.1 * np.array([2, 1, -2])
    second_step = -0.1 * np.array([(0 + 1 + 2 + 1 + 4) / 5, (1 + 1 + 1 + 2 + 1) / 5, (0 - 1 - 2 + 3 - 4) / 5])
    np.testing.assert_allclose(s.model, first_step + second_step, rtol=1e-6)


def test_asgd() -> None:
    s = begin("asgd", 2, 1.0, lr=0.5)
    assert send(s, 0, 1.0).applied
    assert w(s) == 0.5


def test_delay_adaptive() -> None:
    """lr 0.5, tau_c 1: tau 0 and 1 take 0.5; tau 2 takes 0.5/2, or 1/(4*1*2) with L = 1."""
    s = begin("delay-adaptive", 2, 0.0, lr=0.5, tau_c=1)
    send(s, 0, 1.0, 0)
    assert w(s) == -0.5
    send(s, 0, 1.0, 0)
    assert w(s) == -1.0
    assert send(s, 0, 1.0, 0).staleness == 2
    assert w(s) == -1.25
    s = begin("delay-adaptive", 2, 0.0, lr=0.5, tau_c=1, smoothness=1.0)
    for _ in range(3):
        send(s, 0, 1.0, 0)
    assert w(s) == -1.125


def test_delay_adaptive_drop() -> None:
    s = begin("delay-adaptive", 2, 0.0, lr=0.5, tau_c=0, mode="drop")
    send(s, 0, 1.0, 0)
    late = send(s, 1, 1.0, 0)
    assert (late.rejected, late.reason, late.staleness) == (True, "staleness 1 exceeds tau_c=0", 1)
    assert (w(s), s.version) == (-0.5, 1)


def test_fedbuff_divides_by_m_and_weighs_by_staleness_at_arrival() -> None:
    """m 2, lr 1, a 1: deltas 1 (tau 0) and 4 (tau 0): 2.5. Then 1 (tau 1, weight 1/2) and 1 (tau 0): + 1.5/2."""
    s = begin("fedbuff", 3, buffer=2, lr=1.0, staleness_exponent=1.0)
    assert send(s, 0, 1.0).buffered
    assert s.pending == 1
    assert send(s, 1, 4.0).applied
    assert w(s) == 2.5
    assert send(s, 0, 1.0, 0).staleness == 1
    send(s, 1, 1.0, 1)
    assert w(s) == 3.25


def test_ca2fl() -> None:
    """n 3, m 2. Round 1: 3 and 6, h all 0: w = 4.5; h = (3, 6, 0). Round 2: client 0 twice, 5 and 9, h_0 = 3 both
    times: acc = 2 + 6, |S| = 1: w += mean h (3) + 8; h_0 = 9. Round 3: 0 and 2 bring 9 and 0: w += 5 + 0."""
    s = begin("ca2fl", 3, buffer=2, lr=1.0)
    send(s, 0, 3.0)
    send(s, 1, 6.0)
    assert w(s) == 4.5
    send(s, 0, 5.0)
    send(s, 0, 9.0)
    assert w(s) == 4.5 + 3 + 8
    send(s, 0, 9.0)
    send(s, 2, 0.0)
    assert w(s) == 15.5 + 5


def test_ca2fl_forgets_what_a_client_has_sent_that_leaves_before_the_step() -> None:
    """n 2, m 2. Client 0 brings 4 and leaves, client 1 brings 2: w = 3; h_1 = 2, n is 1. Round 2: client 1 brings 2
    twice: acc = 0: w += h_1."""
    s = begin("ca2fl", 2, buffer=2, lr=1.0)
    send(s, 0, 4.0)
    s.leave(0)
    send(s, 1, 2.0)
    assert w(s) == 3
    send(s, 1, 2.0)
    send(s, 1, 2.0)
    assert w(s) == 3 + 2


@pytest.mark.parametrize("memory", ["server", "client"])
def test_ace(memory: str) -> None:
    """lr 1; first 1 and 3: w1 = -2. Client 0 brings 5: mean 4, w = -6."""
    s = begin("ace", 2, 0.0, [1.0, 3.0], lr=1.0, memory=memory)
    assert (w(s), s.version) == (-2, 1)
    send(s, 0, 5.0 if memory == "server" else 5.0 - 1.0)
    assert w(s) == -6


def test_aced_reads_the_set_before_it_resets_the_clock() -> None:
    """lr 1, tau_algo 1, three clients with first gradient 1, 2, 3; w1 = -2, starts 1, 1, 1.

    t=1: client 0 brings 4; A = all (1-1 <= 1): mean (4+2+3)/3 = 3: w = -5; start_0 = 2.
    t=2: client 0 brings 7; A = all (2-1 <= 1): mean (7+2+3)/3 = 4: w = -9; start_0 = 3.
    t=3: client 1 brings 8; A = {0}: 1 and 2 are too old, client 1 does not count in its own step: w = -16; start_1 = 4.
    t=4: client 0 brings 1; A = {0, 1}: mean (1+8)/2: w = -20.5.
    """
    s = begin("aced", 3, 0.0, [1.0, 2.0, 3.0], lr=1.0, tau_algo=1)
    for client, gradient, expected in ((0, 4, -5), (0, 7, -9), (1, 8, -16), (0, 1, -20.5)):
        assert send(s, client, gradient).applied
        assert w(s) == expected


def test_aced_with_nobody_active_keeps_the_model_and_counts() -> None:
    """tau_algo 0: at t=2 client 1 alone would be fresh enough if it had reported; it has not, and neither has 0."""
    s = begin("aced", 3, 0.0, [1.0, 1.0, 1.0], lr=1.0, tau_algo=0)
    send(s, 0, 1.0)  # t=1: everyone active; start_0 = 2
    before = w(s)
    send(s, 1, 5.0)  # t=2: only client 0 is active: w - 1
    assert w(s) == before - 1
    s.leave(1)
    s.leave(0)
    receipt = send(s, 2, 9.0)  # t=3: nobody is active
    assert (receipt.applied, w(s), s.version) == (True, before - 1, 4)


def test_mr_asyncfl() -> None:
    """n 2, gamma 0.5, w0 = 0: client 0 brings 4: 0.5*(0 + 0.5*4) + 2 = 3, c = (0.75, 0.25). Client 0 brings 8:
    0.5*(3 + 0.75*4) + 4 = 7; c = (0.875, 0.125)."""
    s: Any = begin("mr-asyncfl", 2, gamma=0.5)
    send(s, 0, 4.0)
    assert (w(s), s.coefficients) == (3, {0: 0.75, 1: 0.25})
    send(s, 0, 8.0)
    assert (w(s), s.coefficients) == (7, {0: 0.875, 1: 0.125})


def test_mr_asyncfl_exchanges_before_the_aggregation() -> None:
    s = begin("mr-asyncfl", 2, gamma=0.5, exchange="before")
    send(s, 0, 4.0)
    mine, other = s.job(0), s.job(1)
    assert (mine.version, mine.model[0]) == (0, 0)
    assert (other.version, other.model[0]) == (1, 3)
    after = begin("mr-asyncfl", 2, gamma=0.5, exchange="after")
    send(after, 0, 4.0)
    assert (after.job(0).version, after.job(0).model[0]) == (1, 3)


def test_mr_asyncfl_discards_what_is_too_old_and_restarts_the_client() -> None:
    s = begin("mr-asyncfl", 2, gamma=0.5, max_staleness=1, exchange="before")
    send(s, 0, 4.0)
    send(s, 0, 4.0)
    late = send(s, 0, 100.0, 0)
    assert (late.rejected, late.staleness, s.version) == (True, 2, 2)
    assert (s.job(0).version, s.job(0).model[0]) == (2, w(s))


@pytest.mark.parametrize(
    ("params", "weights"),
    [
        ({"staleness": "constant"}, [0.5, 0.5, 0.5]),
        ({"staleness": "polynomial", "a": 1.0}, [0.5, 0.25, 0.5 / 3]),
        ({"staleness": "hinge", "a": 1.0, "b": 1}, [0.5, 0.5, 0.25]),
    ],
)
def test_fedasync_does_not_compound(params: dict[str, Any], weights: list[float]) -> None:
    """alpha_t = alpha*s(tau) afresh for every arrival; hinge has its + 1."""
    s = begin("fedasync", 2, 0.0, alpha=0.5, **params)
    expected = 0.0
    for weight in weights:
        send(s, 0, 1.0, 0)
        expected = (1 - weight) * expected + weight
        assert w(s) == pytest.approx(expected, rel=1e-6)
    send(s, 0, 1.0)  # fresh again: the full alpha
    assert w(s) == pytest.approx(0.5 * expected + 0.5, rel=1e-6)


def test_twafl() -> None:
    """decay ln 2, equal sizes: client 0 brings 4 at t=1: ages 0 and 1 (client 1 holds 0): 4*1/(1+0.5). Then client 1
    brings 1: (4*0.5 + 1)/1.5 = 2."""
    s = begin("twafl", 2, decay=math.log(2))
    send(s, 0, 4.0)
    assert w(s) == pytest.approx(8 / 3)
    send(s, 1, 1.0)
    assert w(s) == pytest.approx(2)


def test_twafl_weighs_by_examples() -> None:
    """decay 0: 30 examples of 4 and 10 of 0, told at the start, or unknown and taken as 30."""
    s = strategies.create("twafl", clients=2, decay=0.0)
    s.start(_v(0), examples={0: 30, 1: 10})
    send(s, 0, 4.0, examples=30)
    assert w(s) == 3
    s = begin("twafl", 2, decay=0.0)
    send(s, 0, 4.0, examples=30)
    assert w(s) == 2


def test_rolling_fedavg() -> None:
    s = begin("rolling-fedavg", 2)
    send(s, 0, 4.0)
    assert w(s) == 2
    send(s, 1, 10.0)
    assert w(s) == 7
    send(s, 0, 0.0)
    assert w(s) == 5


def test_afa_cd_and_afa_cs() -> None:
    """m 2, lr 1, n 4: gradients 2 and 4. cd: -3. cs: -(2+4)/4; then 6 again from client 0 twice: -(6+4)/4."""
    cd, cs = begin("afa-cd", 4, lr=1.0, buffer=2), begin("afa-cs", 4, lr=1.0, buffer=2)
    for s in (cd, cs):
        send(s, 0, 2.0)
        send(s, 1, 4.0)
    assert (w(cd), w(cs)) == (-3, -1.5)
    for s in (cd, cs):
        send(s, 0, 8.0)
        send(s, 0, 6.0)
    assert (w(cd), w(cs)) == (-10, -1.5 - 2.5)


def test_masfl() -> None:
    """n 2, S 2, beta 0.5, gamma 1; first 1 and 3: c = 2, g = 2. Round: client 0 brings 4, then 5 (the newer counts):
    diff = 5-1 = 4; g = 0.5*(4/2 + 2) + 0.5*2 = 3; w = -3; c = 4. The job carries 0.5*4 + 0.5*3."""
    s = begin("masfl", 2, 0.0, [1.0, 3.0], buffer=2, beta=0.5, gamma=1.0)
    assert (w(s), s.version, s.job(0).extras["momentum"][0]) == (0, 0, 2)
    send(s, 0, 4.0)
    send(s, 0, 5.0)
    assert w(s) == -3
    assert s.job(0).extras["momentum"][0] == 3.5


def test_masfl_random_selection_uses_the_newest_buffered_value() -> None:
    """S = n = 2: everyone is chosen, heard or not. Both arrivals are client 0's; the newest is 5."""
    s = begin("masfl", 2, 0.0, [1.0, 3.0], buffer=2, beta=0.5, gamma=1.0, selection="random")
    send(s, 0, 4.0)
    send(s, 0, 5.0)
    assert w(s) == -3


def test_adamasfl() -> None:
    """S 2, gamma 0.5: directions 1 and 3: w = -1; g and c move as in masfl."""
    s = begin("adamasfl", 2, 0.0, [1.0, 3.0], buffer=2, beta=0.5, gamma=0.5)
    send(s, 0, 4.0, vectors={"direction": 1.0})
    send(s, 0, 5.0, vectors={"direction": 3.0})
    assert w(s) == -1
    assert s.job(0).extras["momentum"][0] == 3.5


def test_fadas() -> None:
    """m 1, b1 0.5, b2 0.75, eps tiny: D = 2: mom 1, v 1, vh 1: w = lr. D = 0: mom 0.5, v 0.75, vh stays 1: + lr/2."""
    s = begin("fadas", 2, buffer=1, lr=0.1, beta1=0.5, beta2=0.75, eps=1e-12)
    send(s, 0, 2.0)
    assert w(s) == pytest.approx(0.1)
    send(s, 0, 0.0)
    assert w(s) == pytest.approx(0.15)


def test_fadas_shortens_its_step_for_late_buffers() -> None:
    """lr 1, tau_c 1: a buffer whose oldest has tau 4 steps by 1/4; the next, fresh one by 1 again."""
    s = begin("fadas", 2, buffer=1, lr=1.0, beta1=0.0, beta2=0.0, eps=1e-12, tau_c=1)
    for _ in range(4):
        send(s, 0, 1.0)
    assert w(s) == pytest.approx(4)
    send(s, 0, 1.0, 0)
    assert w(s) == pytest.approx(4.25)
    send(s, 0, 1.0)
    assert w(s) == pytest.approx(5.25)


def test_fedavg() -> None:
    """Cohort of 2 out of 3; 30 examples of 2 and 10 of 6: 3. A second report in the round is rejected."""
    s = begin("fedavg", 3, buffer=2)
    assert send(s, 0, 2.0, examples=30).buffered
    again = send(s, 0, 100.0)
    assert (again.rejected, again.reason) == (True, "client 0 has reported in this round already")
    assert send(s, 2, 6.0, examples=10).applied
    assert w(s) == 3


def test_afl_draws_its_cohorts() -> None:
    s = begin("afl", 6, buffer=4, buffer_min=2, seed=1)
    sizes = []
    for _ in range(60):
        sizes.append(s.cohort)
        for client in range(6):
            if send(s, client, 1.0).applied:
                break
    assert set(sizes) == {2, 3, 4}
    assert s.version == 60


def test_staleness_counts_versions_not_uploads() -> None:
    s = begin("fedbuff", 2, buffer=5)
    for _ in range(7):
        receipt = send(s, 0, 1.0, 0)
    assert (s.version, receipt.staleness) == (1, 1)


@pytest.mark.parametrize("name", ["fedbuff", "afa-cd", "afa-cs", "ca2fl", "fadas", "masfl", "adamasfl"])
def test_a_last_partial_buffer_is_not_dropped(name: str) -> None:
    """flush steps with what is there, as a buffer of that size would; and says so."""
    whole = begin(name, 4, 0.0, [1.0] * 4 if strategies.get(name).cls.first else None, buffer=2)
    s = begin(name, 4, 0.0, [1.0] * 4 if strategies.get(name).cls.first else None, buffer=3)
    for client in (0, 1):
        send(whole, client, 0.5)
        send(s, client, 0.5)
    assert (s.pending, s.version) == (2, 0)
    assert s.flush()
    assert (s.pending, s.version) == (0, 1)
    if name not in ("masfl", "adamasfl"):  # their defaults depend on the buffer
        assert w(s) == w(whole)
    assert not s.flush()


def test_the_demo_table_is_not_hard_coded() -> None:
    """Every registered rule is in it because it was run, with fewer arrivals it says something else."""
    from aflock.showcase import optimum

    short = optimum.run("ace", arrivals=200)
    long = optimum.run("ace", arrivals=2000)
    assert short.final > long.final
    assert "ace" in optimum.table([short])
    assert math.isclose(short.fast_share, 8 / 9, abs_tol=0.05)
