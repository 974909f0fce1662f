"""Naive float64 twins of the rules that take gradients."""

from collections.abc import Callable

import numpy as np

from tests.contract.twin import Array, Twin, f64, mean_of, sum_of


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
