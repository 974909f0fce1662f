"""Which of the clients that want a job gets the next free place: `[federation] selection`.

    waiting    the one that has waited longest
    uniform    each is as likely as any other
    fair       the one that was given the fewest jobs since the server started; among equals a random one
    biased     with probabilities proportional to `[federation] probabilities`

None of this is saved: the journal says which client got a job, and a replay goes by the journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...coordination import selection


class NextClient:
    """A policy of selection over the names of clients; `WaitingPulls` asks it."""

    def __init__(self, policy: str, seed: int, probabilities: Mapping[str, float] | None = None) -> None:
        self._ids: dict[str, int] = {}
        """Numbers for the names: the policies, which the simulator uses too, know clients by number."""
        weights = None if probabilities is None else {self._id(name): w for name, w in probabilities.items()}
        self._policy = None if policy == "waiting" else selection.create(policy, seed, weights)

    def pick(self, names: Sequence[str]) -> str:
        """Picks one of these clients, which are in the order of their waits, the longest first.

        A policy draws from the idle clients it was given, so they are added for this draw and removed after it.
        """
        policy = self._policy
        if policy is None:
            return names[0]
        for name in names:
            policy.add(self._id(name))
        picked = policy.next() if len(policy) else self._id(names[0])  # "biased", and no client here has a weight
        for name in names:
            policy.remove(self._id(name))
        return next(name for name in names if self._id(name) == picked)

    def served(self, name: str) -> None:
        """The client was given a job: "fair" counts it."""
        if self._policy is not None:
            self._policy.add(self._id(name))
            self._policy.take(self._id(name))

    def forget(self, name: str) -> None:
        """The client has left: the policy no longer compares others with it."""
        if self._policy is not None:
            self._policy.forget(self._id(name))

    def _id(self, name: str) -> int:
        return self._ids.setdefault(name, len(self._ids))
