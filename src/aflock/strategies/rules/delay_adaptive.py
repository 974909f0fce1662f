"""Delay-adaptive asynchronous SGD.

    eta_t = eta                           if tau_t <= tau_C
            min(eta, 1/(4 L tau_t))       otherwise (mode "scale"), or 0 (mode "drop")
    w^{t+1} = w^t - eta_t * G

L = 1/(4 eta) unless given, which makes the second line eta/tau_t. With mode "drop" the late arrival is rejected and t
does not grow. tau_C is the concurrency; unless given, the number of clients present.

Koloskova, A., Stich, S. U., Jaggi, M.: Sharper Convergence Guarantees for Asynchronous SGD for Distributed and
Federated Learning. NeurIPS 2022. Algorithm a.4 of the ACE paper (see `ace`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...params import Params, choice, positive, threshold
from ...types import Receipt, Update
from ..base import Strategy
from ..registry import register


@dataclass(frozen=True)
class DelayAdaptiveParams(Params):
    """Hyper-parameters of delay-adaptive."""

    lr: float = positive(0.1, "eta, server step size")
    tau_c: float | None = threshold(None, "tau_C, largest staleness that keeps the full step; None: number of clients")
    smoothness: float | None = positive(None, "L; None: 1/(4 lr)")
    mode: str = choice("scale", ("scale", "drop"), "what happens to later arrivals")


@register(
    "delay-adaptive",
    paper="Koloskova et al., NeurIPS 2022",
    rule="w <- w - step*G, step = lr if tau <= tau_c else min(lr, 1/(4 L tau))",
    optimum="biased",
    params=DelayAdaptiveParams,
)
class DelayAdaptive(Strategy):
    """A late arrival takes a smaller step, or none."""

    needs = ("gradient",)
    p: DelayAdaptiveParams

    def _receive(self, update: Update, staleness: int) -> Receipt:
        lr, tau_c = self.p.lr, self.n if self.p.tau_c is None else self.p.tau_c
        if staleness > tau_c:
            if self.p.mode == "drop":
                return Receipt("rejected", staleness, f"staleness {staleness} exceeds tau_c={tau_c:g}")
            smoothness = 1.0 / (4.0 * lr) if self.p.smoothness is None else self.p.smoothness
            lr = min(lr, 1.0 / (4.0 * smoothness * staleness))
        self.w.step(-lr, update.vectors["gradient"])
        return self._applied(staleness)
