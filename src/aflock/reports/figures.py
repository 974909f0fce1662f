"""Pictures: accuracy against what it cost, one line per rule, with the interval over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Curve = Sequence[Mapping[str, Any]]
"""The measurements of one run, in order."""

AXES = {
    "uploads": "client reports",
    "time": "virtual time",
    "versions": "server steps",
    "gradients": "gradient evaluations",
    "bytes_up": "bytes sent by clients",
}


def accuracy_figure(file: Path, curves: Mapping[str, Sequence[Curve]], title: str, axes: Sequence[str]) -> None:
    """One panel per cost, the same curves in each."""
    _draw(file, [(curves, axis, "") for axis in axes], title)


def panels_figure(file: Path, panels: Mapping[str, Mapping[str, Sequence[Curve]]], axis: str, title: str) -> None:
    """One panel per setting, against the same cost."""
    _draw(file, [(curves, axis, name) for name, curves in panels.items()], title)


def _draw(file: Path, panels: Sequence[tuple[Mapping[str, Sequence[Curve]], str, str]], title: str) -> None:
    """Per rule the mean over its runs and the band between the least and the most."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (1 + 4.5 * len(panels), 4.2)
    figure, places = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for place, (curves, axis, name) in zip(places[0], panels, strict=True):
        for k, (rule, runs) in enumerate(curves.items()):
            grid, low, mean, high = _band(runs, axis)
            place.plot(grid, mean, label=rule, color=f"C{k % 10}", lw=1.8, ls=("-", "--", ":")[k // 10 % 3])
            if len(runs) > 1:
                place.fill_between(grid, low, high, color=f"C{k % 10}", alpha=0.15, lw=0)
        place.set_xlabel(AXES[axis])
        place.set_title(name, fontsize=10)
        place.grid(alpha=0.25)
    places[0][0].set_ylabel("test accuracy")
    places[0][-1].legend(fontsize=8, loc="lower right", ncols=2)
    figure.suptitle(title, fontsize=11)
    figure.savefig(file, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _band(runs: Sequence[Curve], axis: str) -> tuple[npt.NDArray[np.float64], ...]:
    """A common grid as far as every run goes, and the least, mean and most accuracy on it."""
    end = min(float(run[-1][axis]) for run in runs)
    grid = np.linspace(0.0, end, 200)
    values = np.array([np.interp(grid, [m[axis] for m in run], [m["accuracy"] for m in run]) for run in runs])
    return grid, values.min(axis=0), values.mean(axis=0), values.max(axis=0)
