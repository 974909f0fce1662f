"""Naive float64 twins of every server rule: a second reading of the specification page, to test the real one against.

Nothing here is clever: rows and arrivals are kept whole, and every mean is taken again from scratch.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def f64(vector: Array) -> Array:
    """A float64 copy that shares no memory with the caller's."""
    return np.array(vector, dtype=np.float64)


def mean_of(rows: list[Array]) -> Array:
    """The plain mean of a list of vectors."""
    return np.asarray(np.mean(np.stack(rows), axis=0), dtype=np.float64)


def sum_of(rows: list[Array]) -> Array:
    """The plain sum of a list of vectors."""
    return np.asarray(np.sum(np.stack(rows), axis=0), dtype=np.float64)


def weighted_mean(rows: list[Array], weights: list[float]) -> Array:
    """Sum of weight * row over the sum of the weights."""
    return sum_of([weight * row for row, weight in zip(rows, weights, strict=True)]) / sum(weights)


class Twin(ABC):
    """A server: the model w and its version t."""

    w: Array
    t: int

    def __init__(self, n: int, w0: Array) -> None:
        self.n = n
        self.w = f64(w0)
        self.t = 0

    @abstractmethod
    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        """Take one update; "applied" (t grew), "buffered" or "rejected"."""

    def job(self, client: int) -> tuple[int, Array]:
        return self.t, self.w.copy()

    def extra(self) -> Array | None:
        return None


class Asgd(Twin):
    """w <- w - lr*G."""

    def __init__(self, n: int, w0: Array, *, lr: float) -> None:
        super().__init__(n, w0)
        self.lr = lr

    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        self.w = self.w - self.lr * f64(vectors["gradient"])
        self.t += 1
        return "applied"


class DelayAdaptive(Twin):
    """step = lr if tau <= tau_c, else min(lr, 1/(4 L tau)), or nothing at all in mode "drop"; w <- w - step*G."""

    def __init__(
        self, n: int, w0: Array, *, lr: float, tau_c: float, smoothness: float | None = None, mode: str = "scale"
    ) -> None:
        super().__init__(n, w0)
        if mode not in ("scale", "drop"):
            raise ValueError(mode)
        self.lr = lr
        self.tau_c = tau_c
        self.smoothness = 1.0 / (4.0 * lr) if smoothness is None else smoothness
        self.mode = mode

    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        tau = self.t - version
        step = self.lr
        if tau > self.tau_c:
            if self.mode == "drop":
                return "rejected"
            step = min(self.lr, 1.0 / (4.0 * self.smoothness * tau))
        self.w = self.w - step * f64(vectors["gradient"])
        self.t += 1
        return "applied"


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


class Ace(Twin):
    """U_i <- G (memory="client": U_i += G_new - G_prev); w <- w - lr*mean_j U_j; first U_j = G_j(w^0) and one step."""

    def __init__(self, n: int, w0: Array, first: dict[int, Array], *, lr: float, memory: str = "server") -> None:
        super().__init__(n, w0)
        if memory not in ("server", "client"):
            raise ValueError(memory)
        self.lr = lr
        self.memory = memory
        self.rows = {j: f64(first[j]) for j in range(n)}
        self.step()

    def step(self) -> None:
        self.w = self.w - self.lr * mean_of([self.rows[j] for j in range(self.n)])
        self.t += 1

    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        gradient = f64(vectors["gradient"])
        self.rows[client] = self.rows[client] + gradient if self.memory == "client" else gradient
        self.step()
        return "applied"


class Aced(Twin):
    """U_i <- G; A = {j : t - start_j <= tau_algo}; if A: w <- w - lr*mean_A U_j; start_i <- t+1; t grows always."""

    def __init__(self, n: int, w0: Array, first: dict[int, Array], *, lr: float, tau_algo: float) -> None:
        super().__init__(n, w0)
        self.lr = lr
        self.tau_algo = tau_algo
        self.rows = {j: f64(first[j]) for j in range(n)}
        self.start = dict.fromkeys(range(n), 1)
        self.w = self.w - self.lr * mean_of([self.rows[j] for j in range(n)])
        self.t = 1

    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        self.rows[client] = f64(vectors["gradient"])
        active = [j for j in range(self.n) if self.t - self.start[j] <= self.tau_algo]
        if active:
            self.w = self.w - self.lr * mean_of([self.rows[j] for j in active])
        self.start[client] = self.t + 1
        self.t += 1
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
        self.previous = self.w.copy()
        self.maker: int | None = None  # the client whose update made version t, unless a later one of its was discarded

    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        if self.max_staleness is not None and self.t - version > self.max_staleness:
            if self.maker == client:
                self.maker = None
            return "rejected"
        for j in range(self.n):
            self.c[j] = self.gamma * self.c[j]
        self.c[client] = self.c[client] + (1.0 - self.gamma)
        self.models[client] = f64(vectors["model"])
        self.previous = self.w
        self.w = sum_of([self.c[j] * self.models[j] for j in range(self.n)])
        self.t += 1
        self.maker = client
        return "applied"

    def job(self, client: int) -> tuple[int, Array]:
        if self.exchange == "before" and client == self.maker:
            return self.t - 1, self.previous.copy()
        return self.t, self.w.copy()


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


class AfaCd(Twin):
    """At m: w <- w - lr*mean of the m G."""

    def __init__(self, n: int, w0: Array, *, lr: float, buffer: int) -> None:
        super().__init__(n, w0)
        self.lr = lr
        self.m = buffer
        self.arrivals: list[Array] = []

    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        self.arrivals.append(f64(vectors["gradient"]))
        if len(self.arrivals) < self.m:
            return "buffered"
        self.w = self.w - self.lr * mean_of(self.arrivals)
        self.t += 1
        self.arrivals = []
        return "applied"


class AfaCs(Twin):
    """G_i <- G; at m: w <- w - lr*(1/n)*sum over ALL n of G_j, 0 until a client has reported."""

    def __init__(self, n: int, w0: Array, *, lr: float, buffer: int) -> None:
        super().__init__(n, w0)
        self.lr = lr
        self.m = buffer
        self.rows = {j: np.zeros_like(self.w) for j in range(n)}
        self.arrivals: list[int] = []

    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        self.rows[client] = f64(vectors["gradient"])
        self.arrivals.append(client)
        if len(self.arrivals) < self.m:
            return "buffered"
        self.w = self.w - self.lr * mean_of([self.rows[j] for j in range(self.n)])
        self.t += 1
        self.arrivals = []
        return "applied"


class MasFl(Twin):
    """c'_i <- G; at S: diff = sum(c'_i - c_i), g <- beta*(diff/S + c) + (1-beta)*g, w <- w - gamma*g; c moves last.

    The sum is over the distinct clients heard in the round ("arrivals"), or over the S chosen ones ("random").
    """

    def __init__(
        self,
        n: int,
        w0: Array,
        first: dict[int, Array],
        *,
        buffer: int,
        beta: float,
        gamma: float,
        selection: str = "arrivals",
        choose: Callable[[list[int], int], list[int]] | None = None,
    ) -> None:
        super().__init__(n, w0)
        if selection not in ("arrivals", "random"):
            raise ValueError(selection)
        self.size = buffer
        self.beta = beta
        self.gamma = gamma
        self.selection = selection
        self.choose = choose
        self.c_rows = {j: f64(first[j]) for j in range(n)}
        self.newest = {j: f64(first[j]) for j in range(n)}  # c'
        self.directions: dict[int, Array] = {}  # the newest of each client, for adamasfl
        self.g = self.c()
        self.arrivals: list[tuple[int, dict[str, Array]]] = []

    def c(self) -> Array:
        return mean_of([self.c_rows[j] for j in range(self.n)])

    def extra(self) -> Array | None:
        return self.beta * self.c() + (1.0 - self.beta) * self.g

    def receive(self, client: int, version: int, vectors: dict[str, Array], examples: int) -> str:
        self.arrivals.append((client, {key: f64(vector) for key, vector in vectors.items()}))
        self.newest[client] = f64(vectors["gradient"])
        if "direction" in vectors:
            self.directions[client] = f64(vectors["direction"])
        if len(self.arrivals) < self.size:
            return "buffered"
        if self.selection == "arrivals":
            chosen = sorted({i for i, _ in self.arrivals})
        else:
            if self.choose is None:
                raise ValueError("selection='random' needs choose")
            chosen = self.choose(list(range(self.n)), self.size)
        diff = sum_of([self.newest[i] - self.c_rows[i] for i in chosen])
        self.g = self.beta * (diff / self.size + self.c()) + (1.0 - self.beta) * self.g
        for i in chosen:
            self.c_rows[i] = self.newest[i].copy()
        self.w = self.w - self.gamma * self.towards(chosen)
        self.t += 1
        self.arrivals = []
        return "applied"

    def towards(self, chosen: list[int]) -> Array:
        return self.g


class AdaMasFl(MasFl):
    """As masfl, but w <- w - gamma*(1/S)*sum of the S directions."""

    def towards(self, chosen: list[int]) -> Array:
        if self.selection == "arrivals":
            directions = [vectors["direction"] for _, vectors in self.arrivals]
        else:
            directions = [self.directions.get(i, np.zeros_like(self.w)) for i in chosen]
        return sum_of(directions) / self.size


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


PLAIN: dict[str, Callable[..., Twin]] = {
    "asgd": Asgd,
    "delay-adaptive": DelayAdaptive,
    "fedbuff": FedBuff,
    "ca2fl": Ca2fl,
    "mr-asyncfl": MrAsyncFl,
    "fedasync": FedAsync,
    "twafl": Twafl,
    "rolling-fedavg": RollingFedAvg,
    "afa-cd": AfaCd,
    "afa-cs": AfaCs,
    "fadas": Fadas,
    "afl": Afl,
    "fedavg": FedAvg,
}
NEEDS_FIRST: dict[str, Callable[..., Twin]] = {"ace": Ace, "aced": Aced, "masfl": MasFl, "adamasfl": AdaMasFl}


def make(name: str, n: int, w0: Array, first: dict[int, Array] | None, **params: Any) -> Twin:
    """The twin of a rule for n clients 0..n-1, from w0; `first` holds G_j(w^0) for the rules that need it."""
    if name in NEEDS_FIRST:
        if first is None:
            raise ValueError(f"{name} needs every client's first gradient")
        return NEEDS_FIRST[name](n, w0, first, **params)
    return PLAIN[name](n, w0, **params)
