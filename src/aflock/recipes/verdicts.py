"""Whether a claim holds: paired differences, Student's t, and Holm's correction over the comparisons of one claim.

    holds                 every difference is on the claim's side, beyond chance
    fails                 some difference is on the other side, beyond chance
    too close to tell     neither; `visible` is the smallest difference that would have been seen

"Beyond chance" is a two-sided test of the mean difference at the 5 % level of the whole claim: Holm's procedure orders
the k comparisons by their p-values and compares the smallest with 0.05/k, the next with 0.05/(k-1), and so on. A
difference is visible if such a test finds it in four cases of five.

Holm, S.: A simple sequentially rejective multiple test procedure. Scandinavian Journal of Statistics 6, 1979.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..reports.tables import half_interval
from .claims import Cell, Comparison, Grid, comparisons

LEVEL = 0.05
POWER = 0.8

HOLDS, FAILS, OPEN = "holds", "fails", "too close to tell"


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds, and what decided it."""

    says: str
    outcome: str
    comparisons: tuple[Comparison, ...]
    signs: tuple[int, ...]
    """Of each comparison: 1 with the claim, -1 against it, 0 undecided."""

    @property
    def counts(self) -> str:
        """How many comparisons are on which side, in words."""
        if all(len(each.differences) < 2 for each in self.comparisons):
            return "one seed: not judged" if self.comparisons else "not run"
        found = {"hold": self.signs.count(1), "are contrary": self.signs.count(-1), "undecided": self.signs.count(0)}
        listed = [f"{count} {what}" for what, count in found.items() if count]
        return f"of {len(self.signs)} comparisons {', '.join(listed)}" if len(self.signs) > 1 else ""

    @property
    def weakest(self) -> Comparison | None:
        """The comparison that says most about the outcome: the clearest contrary one, else the least clear one."""
        wanted = [c for c, sign in zip(self.comparisons, self.signs, strict=True) if sign == min(self.signs)]
        return min(wanted, key=lambda each: sum(each.differences) / len(each.differences), default=None)


def judge(claim: Mapping[str, Any], grid: Grid, paper: Callable[[Cell], float | None] = lambda cell: None) -> Verdict:
    """Checks one claim on the numbers of one budget."""
    made = [each for each in comparisons(claim, grid, paper) if each.differences]
    signs = holm([p_value(each.differences) for each in made], [_mean(each.differences) for each in made])
    outcome = FAILS if -1 in signs else HOLDS if made and 0 not in signs else OPEN
    return Verdict(str(claim["says"]), outcome, tuple(made), tuple(signs))


def p_value(differences: Sequence[float]) -> float:
    """Of the mean being zero, two-sided; 1 for a single seed."""
    from scipy import special

    if len(differences) < 2:
        return 1.0
    mean, error = _mean(differences), _standard_error(differences)
    if error == 0.0:
        return 0.0 if mean else 1.0
    return float(2.0 * special.stdtr(len(differences) - 1, -abs(mean) / error))


def holm(p_values: Sequence[float], means: Sequence[float]) -> list[int]:
    """The signs of the means that differ from zero at the level of all of them together; 0 for the others."""
    signs, left = [0] * len(p_values), len(p_values)
    for k in sorted(range(len(p_values)), key=lambda k: p_values[k]):
        if p_values[k] > LEVEL / left:
            break
        signs[k], left = (1 if means[k] > 0 else -1), left - 1
    return signs


def visible(comparison: Comparison, count: int = 1) -> float:
    """The smallest mean difference that would be seen with probability POWER among `count` comparisons."""
    from scipy import special

    degrees = len(comparison.differences) - 1
    quantiles = special.stdtrit(degrees, 1.0 - LEVEL / (2 * count)) + special.stdtrit(degrees, POWER)
    return float(quantiles) * _standard_error(comparison.differences)


def needs_seeds(comparison: Comparison) -> bool:
    """Whether the half interval is not yet below a third of the difference that the paper claims."""
    if len(comparison.differences) < 2:
        return True
    return half_interval(comparison.differences) > abs(comparison.claimed) / 3.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _standard_error(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
