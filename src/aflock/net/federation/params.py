"""The section [federation] of a federation file: which clients take part, and what the server asks of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...params import Params, choice, non_negative, positive, weights, whole
from ..protocol.wire import ENCODINGS

SELECTIONS = ("waiting", "uniform", "fair", "biased")
_SELECTION = (
    "which waiting client gets a free place, if there are fewer places than clients; waiting: the one that has waited "
    "longest; uniform: any of them; fair: the one with the fewest jobs; biased: by probabilities"
)
_PROBABILITIES = (
    "with selection biased, how likely each member is to get a place, in proportion; a member that is not named gets a "
    "job only while no named one waits"
)


_NORM_FACTOR = (
    "an update is refused if a vector is longer than this many times the longest of that name so far, once 20 were "
    "accepted; a step that leaves the model with numbers that are not finite is undone; 0: neither"
)
_MOST = 10**18 - 1
"""The largest number that a header of the protocol can hold: 18 digits."""


@dataclass(frozen=True)
class FederationParams(Params):
    """Which clients take part, and what the server asks of them."""

    clients: int = whole(1, "clients that must have joined before the first job is given")
    concurrency: int | None = whole(None, "jobs that may be open at a time; None: every client may have one")
    selection: str = choice("waiting", SELECTIONS, _SELECTION)
    probabilities: Mapping[str, float] | None = weights(_PROBABILITIES, by="the name of a member")
    max_staleness: int | None = whole(
        None, "updates with a larger staleness are rejected; None: the rule's own bound", least=0
    )
    steps: int = whole(1, "K, local steps the server advises a client to make")
    batch: int = whole(32, "examples per local step the server advises a client to take")
    encoding: str = choice("float32", ENCODINGS, "how vectors are encoded, both ways")
    max_norm: float | None = positive(None, "largest Euclidean norm of a vector in an update; None: any")
    norm_factor: float = non_negative(100.0, _NORM_FACTOR)
    max_examples: int = whole(10**9, "most examples an update may claim: rules weigh clients by them", most=_MOST)
    max_steps: int = whole(10**6, "most local steps an update may claim", most=_MOST)
    strikes: int = whole(5, "unusable updates in a row after which the server suspends a client")
    seed: int = whole(0, "seed of the initial model, and of rules and selections that draw numbers", least=0)
