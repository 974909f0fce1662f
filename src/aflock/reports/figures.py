"""Figures: accuracy against its cost, one line per rule, with the 95 % interval over seeds."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..system.files import write_whole
from .tables import half_interval

Curve = Sequence[Mapping[str, Any]]
"""The measurements of one run, in order."""

AXES = {
    "uploads": "client reports",
    "time": "virtual time",
    "versions": "server steps",
    "gradients": "gradient evaluations",
    "bytes": "bytes sent, both ways",
}


def accuracy_figure(file: Path, curves: Mapping[str, Sequence[Curve]], title: str, axes: Sequence[str]) -> None:
    """One panel per cost, the same curves in each."""
    _draw(file, [(curves, axis, "") for axis in axes], title)


def panels_figure(
    file: Path, panels: Mapping[str, Mapping[str, Sequence[Curve]]], axis: str, title: str, metric: str = "accuracy"
) -> None:
    """One panel per setting, against the same cost."""
    _draw(file, [(curves, axis, name) for name, curves in panels.items()], title, metric)


def partition_figure(file: Path, counts: npt.NDArray[np.int64], title: str) -> None:
    """Who holds what: one column per client, one row per class, and the clients' sizes above."""
    figure = _figure(min(14.0, 4 + 0.08 * len(counts)), 5)
    sizes, classes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3))
    sizes.bar(np.arange(len(counts)), counts.sum(1), width=1.0, color="0.55")
    sizes.set_ylabel("examples")
    sizes.set_title(title, fontsize=11)
    picture = classes.imshow(counts.T, aspect="auto", cmap="viridis", interpolation="nearest", origin="lower")
    for axis in (classes.xaxis, classes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    classes.set_xlabel("client")
    classes.set_ylabel("class")
    figure.colorbar(picture, ax=classes, label="examples of the class", pad=0.01)
    _save(figure, file)


def weights_figure(file: Path, panels: Mapping[str, npt.NDArray[np.float64]], title: str) -> None:
    """The clients' weights in the model, one panel per setting, one row of numbers per round.

    Above: over the rounds, of the client with the largest mean weight, of the middle one, and of the one with the
    smallest. Below: every client's mean and largest weight.
    """
    figure = _figure(1 + 4.5 * len(panels), 7)
    grid = figure.subplots(2, len(panels), sharey="row", squeeze=False)
    for above, below, (name, weights) in zip(*grid, panels.items(), strict=True):
        mean = weights.mean(axis=0)
        order = np.argsort(-mean, kind="stable")
        for rank in sorted({0, len(order) // 2, len(order) - 1}):
            above.plot(weights[:, order[rank]], lw=0.8, color=f"C{rank % 10}", label=f"client {order[rank]}")
        above.axhline(1.0 / len(order), color="grey", lw=0.8, ls=":")
        above.set_title(name, fontsize=10)
        above.set_xlabel("server steps")
        above.legend(fontsize=8)
        below.bar(np.arange(len(order)), weights.max(axis=0)[order], color="0.8", label="largest")
        below.bar(np.arange(len(order)), mean[order], color="C0", label="mean")
        below.axhline(1.0 / len(order), color="grey", lw=0.8, ls=":")
        below.set_xlabel("clients, by their mean weight")
        below.legend(fontsize=8)
    for row, label in zip(grid, ("weight c in the model", "weight over all steps"), strict=True):
        row[0].set_ylabel(label)
    figure.suptitle(title, fontsize=11)
    _save(figure, file)


def _save(figure: Any, file: Path) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110, metadata={"Software": None})
    write_whole(file, picture.getvalue())


def _figure(width: float, height: float) -> Any:
    """An empty figure; without pyplot, which is slow to import and remembers every figure it made."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _draw(
    file: Path, panels: Sequence[tuple[Mapping[str, Sequence[Curve]], str, str]], title: str, metric: str = "accuracy"
) -> None:
    """Per rule the mean over its runs, and the 95 % interval of that mean where there are several."""
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = _figure(1 + 4.5 * columns, 0.4 + 3.8 * rows)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    axes = list(grid.flat)
    for ax, (curves, axis, name) in zip(axes, panels, strict=False):
        for k, (rule, runs) in enumerate(curves.items()):
            _plot(ax, rule, runs, axis, metric, k)
        ax.set_xlabel(AXES[axis])
        ax.set_title(name, fontsize=10)
        ax.grid(alpha=0.25)
    for row in grid:
        row[0].set_ylabel(f"test {metric}")
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    where = axes[-1] if len(axes) > len(panels) else axes[len(panels) - 1]
    handles, labels = axes[0].get_legend_handles_labels()
    where.legend(handles, labels, fontsize=8, loc="lower right" if where.axison else "center", ncols=2)
    figure.suptitle(title, fontsize=11)
    _save(figure, file)


def _plot(ax: Any, rule: str, runs: Sequence[Curve], axis: str, metric: str, k: int) -> None:
    color, style = f"C{k % 10}", ("-", "--", ":")[k // 10 % 3]
    grid, values = _sampled(runs, axis, metric)
    mean = values.mean(axis=0)
    ax.plot(grid, mean, label=rule, color=color, lw=1.8, ls=style)
    if len(runs) > 1:
        half = np.array([half_interval(column) for column in values.T])
        top = 1.0 if metric == "accuracy" else np.inf
        ax.fill_between(grid, np.maximum(mean - half, 0), np.minimum(mean + half, top), color=color, alpha=0.15, lw=0)


def _sampled(runs: Sequence[Curve], axis: str, metric: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """A common grid as far as every run goes, and the accuracy of each run on it."""
    grid = np.linspace(0.0, min(_cost(run[-1], axis) for run in runs), 200)
    values = [np.interp(grid, [_cost(m, axis) for m in run], [m[metric] for m in run]) for run in runs]
    return grid, np.array(values)


def _cost(measured: Mapping[str, Any], axis: str) -> float:
    return float(measured["bytes_up"] + measured["bytes_down"] if axis == "bytes" else measured[axis])
