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


def half_interval(values: Sequence[float]) -> float:
    """Half the 95 % confidence interval of the mean, from the 0.975 quantile of Student's t."""
    from scipy import special  # here, since it takes a fifth of a second; scipy.stats takes longer for the same number

    n = len(values)
    mean = sum(values) / n
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    return float(special.stdtrit(n - 1, 0.975)) * deviation / math.sqrt(n)
