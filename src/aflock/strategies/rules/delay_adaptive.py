"""Delay-adaptive asynchronous SGD.

    eta_t = eta                           if tau_t <= tau_C
            min(eta, 1/(4 L tau_t))       otherwise (mode "scale"), or 0 (mode "drop")
    w^{t+1} = w^t - eta_t * G,   or the mean of the eta_t * G where one step answers several arrivals

L = 1/(4 eta) unless given, which makes the second line eta/tau_t. With mode "drop" the late arrival is rejected and t
does not grow. tau_C is the concurrency; unless given, the number of clients present.

Koloskova, A., Stich, S. U., Jaggi, M.: Sharper Convergence Guarantees for Asynchronous SGD for Distributed and
Federated Learning. NeurIPS 2022. Algorithm a.4 of the ACE paper (see `ace`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...params import choice, positive, threshold
from ..gradient_steps import GradientParams, GradientSteps
from ..registry import register


@dataclass(frozen=True)
class DelayAdaptiveParams(GradientParams):
    """Hyper-parameters of delay-adaptive."""

    lr: float = positive(0.1, "eta, server step size")
    tau_c: float | None = threshold(None, "tau_C, largest staleness that keeps the full step; None: number of clients")
    smoothness: float | None = positive(None, "L; None: 1/(4 lr)", only={"mode": ("scale",)})
    mode: str = choice("scale", ("scale", "drop"), "what happens to later arrivals")


@register(
    "delay-adaptive",
    paper="Koloskova et al., NeurIPS 2022",
    rule="w <- w - step*G, step = lr if tau <= tau_c else min(lr, 1/(4 L tau))",
    optimum="biased",
    params=DelayAdaptiveParams,
)
class DelayAdaptive(GradientSteps):
    """A late arrival takes a smaller step, or none."""

    p: DelayAdaptiveParams

    @property
    def _tau_c(self) -> float:
        return self.n if self.p.tau_c is None else self.p.tau_c

    def _rate(self, staleness: int) -> float:
        lr = self.p.lr
        if staleness <= self._tau_c:
            return lr
        if self.p.mode == "drop":
            return 0.0
        smoothness = 1.0 / (4.0 * lr) if self.p.smoothness is None else self.p.smoothness
        return min(lr, 1.0 / (4.0 * smoothness * staleness))

    def _reason(self, staleness: int) -> str:
        return f"staleness {staleness} exceeds tau_c={self._tau_c:g}"
