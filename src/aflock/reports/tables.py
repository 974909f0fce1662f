"""Tables of results as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = (
    ("accuracy", "accuracy", "{:.3f}"),
    ("uploads", "uploads", "{:.0f}"),
    ("versions", "versions", "{:.0f}"),
    ("virtual_time", "time", "{:.0f}"),
    ("gradient_evaluations", "gradients", "{:.0f}"),
    ("megabytes", "MB", "{:.1f}"),
    ("staleness_mean", "staleness", "{:.1f}"),
    ("staleness_max", "max", "{:.0f}"),
    ("largest_share", "top share", "{:.1%}"),
)


def comparison(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """One line per rule, best accuracy first: the mean over its runs; for accuracy also half the 95 % interval."""
    ranked = sorted(results.items(), key=lambda item: -_mean(item[1], "accuracy"))
    width = max(len(name) for name in results) + 2
    lines = ["rule".ljust(width) + "".join(title.rjust(11) for _, title, _ in COLUMNS)]
    for name, runs in ranked:
        cells = [form.format(_mean(runs, key)) for key, _, form in COLUMNS]
        if len(runs) > 1:
            cells[0] += f"±{half_interval([run['accuracy'] for run in runs]):.3f}"
        lines.append(name.ljust(width) + "".join(cell.rjust(11) for cell in cells))
    return "\n".join(lines)


def _mean(runs: Sequence[Mapping[str, Any]], key: str) -> float:
    if key == "megabytes":
        return (_mean(runs, "bytes_up") + _mean(runs, "bytes_down")) / 1e6
    return float(sum(run[key] for run in runs) / len(runs))


_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""The 0.975 quantile of Student's t for 1 to 9 degrees of freedom; beyond that 2 is near enough."""


def half_interval(values: Sequence[float]) -> float:
    """Half the 95 % confidence interval of the mean."""
    n = len(values)
    mean = sum(values) / n
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    quantile = _STUDENT[n - 2] if n - 2 < len(_STUDENT) else 2.0
    return quantile * deviation / math.sqrt(n)
