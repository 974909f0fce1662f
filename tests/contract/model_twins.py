"""Naive float64 twins of the rules that take a client's model, or how far it has moved."""

import math
from collections.abc import Callable

import numpy as np

from tests.contract.twin import Array, Twin, f64, mean_of, sum_of, weighted_mean


class FedBuff(Twin):
    """acc += (1+tau)^(-a) * delta; at m: w <- w + lr*acc/m."""

    def __init__(self, n: int, w0: Array, *, lr: float, buffer: int, staleness_exponent: float = 0.0) -> None:
        super().__init__(n, w0)
        self.lr = lr
        self.m = buffer
        self.a = staleness_exponent
        self.arrivals: list[tuple[int, Array]] = []

    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        self.arrivals.append((self.t - version, f64(vectors["delta"])))
        if len(self.arrivals) < self.m:
            return "buffered"
        acc = sum_of([(1.0 + tau) ** (-self.a) * delta for tau, delta in self.arrivals])
        self.w = self.w + self.lr * acc / self.m
        self.t += 1
        self.arrivals = []
        return "applied"


class Ca2fl(Twin):
    """acc += delta - h_i, h'_i <- delta, S <- S + {i}; at m: w <- w + lr*(mean_j h_j + acc/|S|), then h <- h'."""

    def __init__(self, n: int, w0: Array, *, lr: float, buffer: int) -> None:
        super().__init__(n, w0)
        self.lr = lr
        self.m = buffer
        self.h = {j: np.zeros_like(self.w) for j in range(n)}
        self.arrivals: list[tuple[int, Array]] = []

    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        self.arrivals.append((client, f64(vectors["delta"])))
        if len(self.arrivals) < self.m:
            return "buffered"
        acc = sum_of([delta - self.h[i] for i, delta in self.arrivals])
        heard = {i for i, _ in self.arrivals}
        self.w = self.w + self.lr * (mean_of([self.h[j] for j in range(self.n)]) + acc / len(heard))
        for i, delta in self.arrivals:
            self.h[i] = delta
        self.t += 1
        self.arrivals = []
        return "applied"


class MrAsyncFl(Twin):
    """c_j <- gamma*c_j for all, c_i += 1-gamma; M_i <- x_K; w = sum_j c_j M_j (the invariant, used as the rule)."""

    def __init__(
        self, n: int, w0: Array, *, gamma: float, exchange: str = "before", max_staleness: int | None = None
    ) -> None:
        super().__init__(n, w0)
        if exchange not in ("before", "after"):
            raise ValueError(exchange)
        self.gamma = gamma
        self.exchange = exchange
        self.max_staleness = max_staleness
        self.c = dict.fromkeys(range(n), 1.0 / n)
        self.models = {j: f64(w0) for j in range(n)}
        self.unserved: dict[int, tuple[int, Array]] = {}  # the model before a client's own aggregation, until it pulls

    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        if self.max_staleness is not None and self.t - version > self.max_staleness:
            self.unserved.pop(client, None)
            return "rejected"
        for j in range(self.n):
            self.c[j] = self.gamma * self.c[j]
        self.c[client] = self.c[client] + (1.0 - self.gamma)
        self.models[client] = f64(vectors["model"])
        self.unserved[client] = (self.t, self.w)
        self.w = sum_of([self.c[j] * self.models[j] for j in range(self.n)])
        self.t += 1
        return "applied"

    def job(self, client: int) -> tuple[int, Array]:
        version, model = self.unserved.pop(client, (self.t, self.w))
        return (version, model.copy()) if self.exchange == "before" else (self.t, self.w.copy())


class FedAsync(Twin):
    """alpha_t = alpha*s(tau); w <- (1-alpha_t)*w + alpha_t*x_K."""

    def __init__(self, n: int, w0: Array, *, alpha: float, staleness: str, a: float, b: float) -> None:
        super().__init__(n, w0)
        self.alpha = alpha
        self.staleness = staleness
        self.a = a
        self.b = b

    def s(self, tau: int) -> float:
        if self.staleness == "constant":
            return 1.0
        if self.staleness == "polynomial":
            return float((tau + 1.0) ** (-self.a))
        if self.staleness == "hinge":
            return 1.0 if tau <= self.b else 1.0 / (self.a * (tau - self.b) + 1.0)
        raise ValueError(self.staleness)

    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        alpha_t = self.alpha * self.s(self.t - version)
        self.w = (1.0 - alpha_t) * self.w + alpha_t * f64(vectors["model"])
        self.t += 1
        return "applied"


class Twafl(Twin):
    """M_i <- x_K, stamp_i <- t+1; weight_j = r_j*exp(-decay*(t+1-stamp_j)); w <- sum weight_j M_j / sum weight_j."""

    def __init__(self, n: int, w0: Array, *, decay: float) -> None:
        super().__init__(n, w0)
        self.decay = decay
        self.models = {j: f64(w0) for j in range(n)}
        self.stamp = dict.fromkeys(range(n), 0)
        self.examples: dict[int, int] = {}  # of those that have reported

    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        self.models[client] = f64(vectors["model"])
        self.stamp[client] = self.t + 1
        self.examples[client] = examples
        usual = sum(self.examples.values()) / len(self.examples)
        weights: list[float] = []
        for j in range(self.n):
            r = float(self.examples.get(j, usual))
            weights.append(r * math.exp(-self.decay * (self.t + 1 - self.stamp[j])))
        self.w = weighted_mean([self.models[j] for j in range(self.n)], weights)
        self.t += 1
        return "applied"


class RollingFedAvg(Twin):
    """As twafl with decay = 0: w <- sum r_j M_j / sum r_j."""

    def __init__(self, n: int, w0: Array) -> None:
        super().__init__(n, w0)
        self.models = {j: f64(w0) for j in range(n)}
        self.examples: dict[int, int] = {}

    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        self.models[client] = f64(vectors["model"])
        self.examples[client] = examples
        usual = sum(self.examples.values()) / len(self.examples)
        weights = [float(self.examples.get(j, usual)) for j in range(self.n)]
        self.w = weighted_mean([self.models[j] for j in range(self.n)], weights)
        self.t += 1
        return "applied"


class Fadas(Twin):
    """At m: D = acc/m; mom, v and vh = max(vh, v) as in AMSGrad; w <- w + step*mom/(sqrt(vh)+eps)."""

    def __init__(
        self,
        n: int,
        w0: Array,
        *,
        lr: float,
        buffer: int,
        beta1: float,
        beta2: float,
        eps: float,
        tau_c: float | None = None,
    ) -> None:
        super().__init__(n, w0)
        self.lr = lr
        self.m = buffer
        self.beta1 = beta1
        self.beta2 = beta2
        self.eps = eps
        self.tau_c = tau_c
        self.mom = np.zeros_like(self.w)
        self.v = np.zeros_like(self.w)
        self.vh = np.zeros_like(self.w)
        self.arrivals: list[tuple[int, Array]] = []

    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        self.arrivals.append((self.t - version, f64(vectors["delta"])))
        if len(self.arrivals) < self.m:
            return "buffered"
        d = sum_of([delta for _, delta in self.arrivals]) / self.m
        self.mom = self.beta1 * self.mom + (1.0 - self.beta1) * d
        self.v = self.beta2 * self.v + (1.0 - self.beta2) * d**2
        self.vh = np.maximum(self.vh, self.v)
        tau_m = max(tau for tau, _ in self.arrivals)
        step = self.lr
        if self.tau_c is not None and tau_m > self.tau_c:
            step = min(self.lr, 1.0 / tau_m)
        self.w = self.w + step * self.mom / (np.sqrt(self.vh) + self.eps)
        self.t += 1
        self.arrivals = []
        return "applied"


class Afl(Twin):
    """A round takes J' distinct clients, J' from [J_min, J]; when all are in: w <- sum r_i x_K^(i) / sum r_i."""

    def __init__(
        self, n: int, w0: Array, *, buffer: int, buffer_min: int, size: Callable[[int, int], int] | None = None
    ) -> None:
        super().__init__(n, w0)
        self.j = buffer
        self.j_min = buffer_min
        self.size = size
        self.target = self.draw()
        self.round: dict[int, tuple[float, Array]] = {}

    def draw(self) -> int:
        return self.j if self.size is None else self.size(self.j_min, self.j)

    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        if client in self.round:
            return "rejected"
        self.round[client] = (float(examples), f64(vectors["model"]))
        if len(self.round) < self.target:
            return "buffered"
        self.w = weighted_mean([x for _, x in self.round.values()], [r for r, _ in self.round.values()])
        self.t += 1
        self.round = {}
        self.target = self.draw()
        return "applied"


class FedAvg(Twin):
    """Wait for a cohort of distinct clients, w <- sum r_i x_K^(i) / sum r_i."""

    def __init__(self, n: int, w0: Array, *, buffer: int | None = None) -> None:
        super().__init__(n, w0)
        self.cohort = n if buffer is None else buffer
        self.round: dict[int, tuple[float, Array]] = {}

    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        if client in self.round:
            return "rejected"
        self.round[client] = (float(examples), f64(vectors["model"]))
        if len(self.round) < self.cohort:
            return "buffered"
        self.w = weighted_mean([x for _, x in self.round.values()], [r for r, _ in self.round.values()])
        self.t += 1
        self.round = {}
        return "applied"
