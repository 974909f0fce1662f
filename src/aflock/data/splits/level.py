"""Makes clients equal in size; no client gets a new class or loses one.

A client that has two or more examples of a class can pass some to another that holds the class, which can pass as many
of another class on, and so forth. Sizes are as equal as they can be (the sum of their squares is smallest) when no such
chain leads from a client to one that is smaller by two or more.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..base import Integers

Step = tuple[int, int, int]
"""A giver, a class, a receiver."""


def level(counts: Integers) -> None:
    """Levels the row sums of `counts` (clients x classes) in place; entries stay positive or zero as they are.

    Every pass looks for a chain from the largest open client. If there is one, the sum of squares falls. If not, no
    client that this one can reach is smaller by two or more. No example would leave that group from then on, and
    giving to it would not help the clients outside, which are no larger: the whole group is closed.
    """
    sizes, open_ = counts.sum(1), np.ones(len(counts), bool)
    while open_.any():
        largest = int(np.where(open_, sizes, -1).argmax())
        chain, group = _search(counts, sizes, open_, largest)
        if chain:
            _pass_on(counts, sizes, chain)
        else:
            open_[group] = False


def _search(
    counts: Integers, sizes: Integers, open_: npt.NDArray[np.bool_], start: int
) -> tuple[list[Step], list[int]]:
    """The shortest chain to a client smaller by two or more, or else none and everybody within reach."""
    gives: dict[int, int] = {}  # class -> the first client reached that has some of it to spare
    takes: dict[int, int] = {start: -1}  # client -> the class it is reached by
    reached = [start]
    for client in reached:
        for label in np.flatnonzero(counts[client] > 1).tolist():
            if label in gives:
                continue
            gives[label] = client
            holders = np.flatnonzero(open_ & (counts[:, label] > 0))
            smallest = int(holders[sizes[holders].argmin()])
            if sizes[smallest] <= sizes[start] - 2:
                takes[smallest] = label
                return _chain(gives, takes, smallest), reached
            fresh = [holder for holder in holders.tolist() if holder not in takes]
            takes.update(dict.fromkeys(fresh, label))
            reached += fresh
    return [], reached


def _chain(gives: dict[int, int], takes: dict[int, int], end: int) -> list[Step]:
    chain, client = [], end
    while (label := takes[client]) >= 0:
        chain.append((gives[label], label, client))
        client = gives[label]
    return chain[::-1]


def _pass_on(counts: Integers, sizes: Integers, chain: list[Step]) -> None:
    """Passes along as much as evens out the two ends, as far as everybody on the way has it to spare."""
    first, last = chain[0][0], chain[-1][2]
    spare = min(int(counts[giver, label]) - 1 for giver, label, _ in chain)
    amount = min(spare, int(sizes[first] - sizes[last]) // 2)
    for giver, label, receiver in chain:
        counts[giver, label] -= amount
        counts[receiver, label] += amount
    sizes[first] -= amount
    sizes[last] += amount
