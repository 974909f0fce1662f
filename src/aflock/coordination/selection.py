"""Who gets the next job: policies over the pool of idle clients.

    uniform    every idle client is as likely as any other
    biased     with probabilities proportional to given weights
    fair       without replacement over rounds: uniform among the idle clients that were picked least often
    all        every idle client, in client order

A pick costs O(1), or O(log n) for "biased" and "all". Policies know no rule and no time.
"""

from __future__ import annotations

import heapq
import numbers
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from .. import rng
from ..errors import ParameterError
from ..types import State

POLICIES = ("uniform", "biased", "fair", "all")


def create(policy: str, seed: int, probabilities: Mapping[int, float] | None = None) -> Selection:
    """The policy of that name."""
    if policy not in POLICIES:
        raise ParameterError(f"selection={policy!r} does not exist; expected one of {', '.join(POLICIES)}")
    if (probabilities is not None) != (policy == "biased"):
        raise ParameterError("probabilities go with selection='biased', and it needs them")
    draws = rng.Ahead(rng.stream(seed, "selection"))
    if policy == "biased":
        return Biased(draws, probabilities or {})
    kinds: dict[str, type[Uniform | Fair | All]] = {"uniform": Uniform, "fair": Fair, "all": All}
    return kinds[policy](draws)


class Selection(ABC):
    """The idle clients, and which of them is next."""

    def __init__(self, draws: rng.Ahead) -> None:
        self._draws = draws

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, client: int) -> bool: ...

    @abstractmethod
    def add(self, client: int) -> None:
        """The client is idle."""

    @abstractmethod
    def take(self, client: int) -> None:
        """The client gets a job: it is idle no more."""

    @abstractmethod
    def next(self) -> int:
        """The idle client to get the next job; it stays idle until taken."""

    def draw(self) -> int | None:
        """Takes the next one, if there is any."""
        if not len(self):
            return None
        client = self.next()
        self.take(client)
        return client

    def remove(self, client: int) -> None:
        """The client is not idle any more, though nobody has picked it."""
        self.take(client)

    def forget(self, client: int) -> None:
        """The client has left the federation."""
        if client in self:
            self.remove(client)

    def state_dict(self) -> State:
        """Everything, random stream included."""
        return {"draws": self._draws.state_dict()} | self._state()

    def load_state_dict(self, state: State) -> None:
        """Takes over a saved state."""
        self._draws.load_state_dict(state["draws"])
        self._load(state)

    @abstractmethod
    def _state(self) -> State: ...

    @abstractmethod
    def _load(self, state: State) -> None: ...


class Pool:
    """A set one can index: adding, removing and picking the j-th element cost O(1)."""

    def __init__(self, items: Iterable[int] = ()) -> None:
        self.items = list(items)
        self.position = {item: k for k, item in enumerate(self.items)}

    def __len__(self) -> int:
        return len(self.items)

    def __contains__(self, item: int) -> bool:
        return item in self.position

    def add(self, item: int) -> None:
        """Adds an item that is not there."""
        self.position[item] = len(self.items)
        self.items.append(item)

    def remove(self, item: int) -> None:
        """Removes an item; the last one moves to its index."""
        hole, last = self.position.pop(item), self.items.pop()
        if last != item:
            self.items[hole] = last
            self.position[last] = hole

    def pick(self, draws: rng.Ahead) -> int:
        """A uniformly random item (to 53 bits: several times as fast as an exact bounded integer)."""
        return self.items[int(draws.random() * len(self.items))]


class Uniform(Pool, Selection):
    """Every idle client is as likely as any other."""

    def __init__(self, draws: rng.Ahead) -> None:
        Selection.__init__(self, draws)
        Pool.__init__(self)

    def take(self, client: int) -> None:
        self.remove(client)

    def next(self) -> int:
        return self.pick(self._draws)

    def draw(self) -> int | None:
        items, position = self.items, self.position
        if not items:
            return None
        hole = int(self._draws.random() * len(items))
        client, last = items[hole], items.pop()
        del position[client]
        if last != client:
            items[hole] = last
            position[last] = hole
        return client

    def _state(self) -> State:
        return {"idle": np.array(self.items, np.int64)}

    def _load(self, state: State) -> None:
        Pool.__init__(self, state["idle"].tolist())


class Fair(Selection):
    """Uniform among the idle clients picked least often: nobody comes twice before everybody came once.

    Idle clients stand in one pool per number of picks. A newcomer starts at the lowest number anyone has, so that it is
    neither favoured for its absence nor passed over.
    """

    def __init__(self, draws: rng.Ahead) -> None:
        super().__init__(draws)
        self._picks: dict[int, int] = {}
        self._levels: Counter[int] = Counter()  # how many clients, idle or not, have been picked how often
        self._pools: dict[int, Pool] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, client: int) -> bool:
        return client in self._picks and client in self._pools.get(self._picks[client], ())

    def add(self, client: int) -> None:
        if client not in self._picks:
            self._picks[client] = min(self._levels, default=0)
            self._levels[self._picks[client]] += 1
        self._pools.setdefault(self._picks[client], Pool()).add(client)
        self._size += 1

    def take(self, client: int) -> None:
        self.remove(client)
        picks = self._picks[client]
        self._picks[client] = picks + 1
        self._levels[picks + 1] += 1
        self._lower(picks)

    def remove(self, client: int) -> None:
        picks = self._picks[client]
        self._pools[picks].remove(client)
        if not self._pools[picks]:
            del self._pools[picks]
        self._size -= 1

    def _lower(self, picks: int) -> None:
        self._levels[picks] -= 1
        if not self._levels[picks]:
            del self._levels[picks]

    def next(self) -> int:
        return self._pools[min(self._pools)].pick(self._draws)

    def forget(self, client: int) -> None:
        super().forget(client)
        if client in self._picks:
            self._lower(self._picks.pop(client))

    def _state(self) -> State:
        pools = {str(picks): np.array(pool.items, np.int64) for picks, pool in self._pools.items()}
        clients, picks = list(self._picks), list(self._picks.values())
        return {"clients": np.array(clients, np.int64), "picks": np.array(picks, np.int64), "pools": pools}

    def _load(self, state: State) -> None:
        self._picks = dict(zip(state["clients"].tolist(), state["picks"].tolist(), strict=True))
        self._levels = Counter(self._picks.values())
        self._pools = {int(picks): Pool(items.tolist()) for picks, items in state["pools"].items()}
        self._size = sum(map(len, self._pools.values()))


class Biased(Selection):
    """With probability proportional to a weight per client, among the idle ones.

    The weights stand in a Fenwick tree as integers (53 bits in all), so that taking one out leaves no rounding behind.
    A client without a weight is never picked; it can still pull on its own.
    """

    def __init__(self, draws: rng.Ahead, weights: Mapping[int, float]) -> None:
        super().__init__(draws)
        for client, weight in weights.items():
            if not _is_weight(weight):
                raise ParameterError(f"the probability of client {client} is {weight!r}; expected at least 0")
        total = sum(weights.values())
        if not total > 0:
            raise ParameterError("all probabilities are zero; expected at least one above")
        self._set({int(c): max(1, round(w / total * 2**53)) for c, w in weights.items() if w > 0})

    def _set(self, weights: dict[int, int]) -> None:
        self._weights = weights
        self._ids = sorted(weights)
        self._leaf = {client: k + 1 for k, client in enumerate(self._ids)}
        self._tree = [0] * (len(self._ids) + 1)
        self._idle: set[int] = set()
        self._live = 0
        self._total = 0

    def __len__(self) -> int:
        return self._live

    def __contains__(self, client: int) -> bool:
        return client in self._idle

    def add(self, client: int) -> None:
        self._idle.add(client)
        self._change(client, 1)

    def take(self, client: int) -> None:
        self._idle.remove(client)
        self._change(client, -1)

    def _change(self, client: int, sign: int) -> None:
        weight = sign * self._weights.get(client, 0)
        if not weight:
            return
        self._live += sign
        self._total += weight
        k = self._leaf[client]
        while k < len(self._tree):
            self._tree[k] += weight
            k += k & -k

    def next(self) -> int:
        """The client whose stretch of the cumulative weights a uniform number falls into."""
        target, node = self._draws.integer(self._total), 0
        stride = 1 << len(self._ids).bit_length()
        while stride:
            after = node + stride
            if after < len(self._tree) and self._tree[after] <= target:
                node, target = after, target - self._tree[after]
            stride >>= 1
        return self._ids[node]

    def _state(self) -> State:
        weights = np.array([self._weights[client] for client in self._ids], np.int64)
        idle = np.array(sorted(self._idle), np.int64)
        return {"idle": idle, "ids": np.array(self._ids, np.int64), "weights": weights}

    def _load(self, state: State) -> None:
        self._set(dict(zip(state["ids"].tolist(), state["weights"].tolist(), strict=True)))
        for client in state["idle"].tolist():
            self.add(client)


class All(Selection):
    """Every idle client, lowest number first."""

    def __init__(self, draws: rng.Ahead) -> None:
        super().__init__(draws)
        self._idle: set[int] = set()
        self._queued: set[int] = set()  # who has an entry in the heap: taken clients keep theirs until it surfaces
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, client: int) -> bool:
        return client in self._idle

    def add(self, client: int) -> None:
        self._idle.add(client)
        if client not in self._queued:
            self._queued.add(client)
            heapq.heappush(self._heap, client)

    def take(self, client: int) -> None:
        self._idle.remove(client)

    def next(self) -> int:
        while self._heap[0] not in self._idle:
            self._queued.remove(heapq.heappop(self._heap))
        return self._heap[0]

    def _state(self) -> State:
        return {"idle": np.array(sorted(self._idle), np.int64)}

    def _load(self, state: State) -> None:
        self._idle = set(state["idle"].tolist())
        self._queued = set(self._idle)
        self._heap = sorted(self._idle)


def _is_weight(value: object) -> bool:
    return isinstance(value, numbers.Real) and 0 <= float(value) < float("inf")
