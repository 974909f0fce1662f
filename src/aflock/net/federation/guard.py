"""Guards the model against updates that are far too large, and honest clients against strikes for what others sent.

    norms      after SETTLED vectors of a name, one longer than `norm_factor` times the longest so far is refused
    undo       a step that leaves the model with numbers that are not finite is undone, and its contributors are named
    strikes    a client gets no strike for an update that no rule could use where its job's model may be the cause:
               that model has diverged, or the vector is too long, or another client's was not finite, too

The term `norm_factor` switches the first two on; journals of earlier versions do not have it. All decisions depend on
the state and the record alone, so that a replay makes the same ones; for that, a record holds the norms of its vectors.
"""

from __future__ import annotations

import math
from typing import Any

from ... import kernels
from ...coordination.coordinator import Coordinator
from ...strategies.base import Strategy
from ...types import Job, Vector
from ..protocol.refusals import Refused, diverged, unusable
from .client_record import ClientRecord

SETTLED = 20
"""Vectors of a name that are accepted before their norms limit the next one."""

_DIVERGED = 1e6
"""A model has diverged when a weight exceeds this many times the largest weight of w^0 (at least 1)."""

_MOST_NAMED = 10

_NONE = (0, 0.0, "")

Before = tuple[int, "Vector | None"]
"""The version and the model before a step; the model is None if the step is not guarded."""


class Guard:
    """What a federation remembers in order to decide about updates and steps."""

    def __init__(self, w0_largest: float) -> None:
        """`w0_largest` is the largest absolute weight of w^0."""
        self.limit = _DIVERGED * max(1.0, w0_largest)
        """A model with a larger absolute weight has diverged."""
        self._norms: dict[str, tuple[int, float, str]] = {}
        """Name of a vector -> how many were accepted, the largest norm of them, and the client that sent it."""
        self._contributors: dict[str, None] = {}
        """The names of the clients whose updates were accepted since the last step, in order."""
        self._misled: set[int] = set()
        """The numbers of the clients whose last job had a model that has diverged."""
        self._judged, self._has_diverged = -1, False
        """The version of the last job's model, and whether that model has diverged; not part of the state."""
        self.not_finite: dict[str, None] = {}
        """The names of the clients that have sent numbers that are not finite since an update of theirs was accepted.

        Of theirs: a client that spoils the model must not be able to take the others' innocence away by an update that
        is accepted. It is not part of the state: no record is written for a refused update.
        """
        self.undone = ""
        """A sentence about the last step that was undone, for the log; not part of the state."""

    # -- updates ----------------------------------------------------------------------------------------------------

    def objection(self, name: str, norm: float, *, most: float | None, factor: float | None) -> str:
        """Why a vector is refused: it is not finite, or longer than `most` or `factor` allow; "" if it is accepted."""
        if not math.isfinite(norm):
            return f"the vector {name} holds numbers that are not finite"
        if most is not None and norm > most:
            return f"the vector {name} has the norm {norm:.4g}; the limit is {most:g} ([federation] max_norm)"
        count, largest, _ = self._norms.get(name, _NONE)
        if factor is not None and count >= SETTLED and norm > factor * largest > 0.0:
            return (
                f"the vector {name} has the norm {norm:.4g}; the limit is {factor:g} times the largest so far, "
                f"{largest:.4g} ([federation] norm_factor)"
            )
        return ""

    def refusal(self, client: ClientRecord, why: str, *, finite: bool) -> Refused:
        """The refusal of a vector: `unusable`, or `diverged` where the model is the cause.

        It is `diverged` if the model of the client's job has diverged, or if another client has sent numbers that are
        not finite, too. Only `unusable` numbers that are not finite are a strike: an honest update can be too long
        because of what others have made of the model, long before that counts as diverged.
        """
        if not finite:
            self.not_finite[client.name] = None
        misled = client.number in self._misled or (not finite and len(self.not_finite) > 1)
        return diverged(why) if misled else unusable(why, is_strike=not finite)

    @property
    def longest_vectors(self) -> dict[str, dict[str, Any]]:
        """The largest norm of each vector that was accepted so far, and the client that sent it."""
        return {name: {"norm": norm, "client": who} for name, (_, norm, who) in self._norms.items() if who}

    @property
    def longest(self) -> str:
        """Who sent the longest vector of each name, in words; a strategy that keeps rows steps with it every time."""
        found = (f"{name} came from {who} (norm {norm:.4g})" for name, (_, norm, who) in self._norms.items() if who)
        return f"the longest {', '.join(found) or 'vector is not known'}"

    def note_job(self, number: int, job: Job, strategy: Strategy) -> None:
        """Remembers whether the model of a client's job has diverged."""
        if job.version != self._judged:
            # The strategy knows the largest weight of its current model: no pass over the model.
            largest = strategy.largest if job.version == strategy.version else kernels.largest(job.model)
            self._judged, self._has_diverged = job.version, not largest <= self.limit  # `not <=`: also true for NaN
        if self._has_diverged:
            self._misled.add(number)
        else:
            self._misled.discard(number)

    def note_update(self, client: str, names: list[str], norms: list[float]) -> None:
        """Remembers the norms of an accepted update; records of earlier versions have none."""
        for name, norm in zip(names, norms, strict=False):
            count, largest, sender = self._norms.get(name, _NONE)
            self._norms[name] = (count + 1, norm, client) if norm > largest else (count + 1, largest, sender)
        self._contributors[client] = None
        self.not_finite.pop(client, None)

    def remove(self, number: int) -> None:
        """Forgets a client that has left."""
        self._misled.discard(number)

    # -- steps ------------------------------------------------------------------------------------------------------

    def after_step(self, before: Before, coordinator: Coordinator, now: float) -> str:
        """Undoes a step that left the model with numbers that are not finite, and returns a sentence about it; else "".

        The sentence becomes part of the trace, which replays compare: another wording would contradict old traces.
        """
        strategy, (version, model) = coordinator.strategy, before
        if strategy.version == version:
            return ""
        names, self._contributors = list(self._contributors), {}
        # A model that was not finite before the step is not put back: the step may even have mended it.
        if model is None or math.isfinite(strategy.largest) or not math.isfinite(kernels.largest(model)):
            return ""
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        self.undone = (
            f"the step to version {strategy.version} left numbers that are not finite and was undone; it was made from "
            f"the updates of {', '.join(names[:_MOST_NAMED]) or 'nobody'}{more}; {self.longest}"
        )
        coordinator.undo(model, now, self.undone)
        return self.undone

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values."""
        return {
            "norms": {name: list(found) for name, found in self._norms.items()},
            "contributors": list(self._contributors),
            "misled": sorted(self._misled),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Loads a saved state; states of earlier versions have none of these keys."""
        self._norms = {name: (int(n), float(norm), str(who)) for name, (n, norm, who) in saved.get("norms", {}).items()}
        self._contributors = dict.fromkeys(saved.get("contributors", ()))
        self._misled = set(saved.get("misled", ()))
