"""Draws the figures of README and docs from runs of the demonstration: `make figures`."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from aflock import demo, strategies

HERE = Path(__file__).parent
REACHES, MISSES = plt.cm.viridis, plt.cm.autumn  # type: ignore[attr-defined]


def optimum_figure(file: Path) -> None:
    """Distance from the optimum of all clients against arrivals, one line per rule."""
    runs = sorted((demo.run(name) for name in strategies.names()), key=lambda run: run.final)
    groups = [[r for r in runs if r.reached], [r for r in runs if not r.reached]]
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    titles = ("reach the optimum of all clients", "stop at a point the fast clients pull them to")
    for panel, group, colours, title in zip(panels, groups, (REACHES, MISSES), titles, strict=True):
        for k, run in enumerate(group):
            arrivals = [run.arrivals * (j + 1) / len(run.distance) for j in range(len(run.distance))]
            panel.semilogy(arrivals, run.distance, label=run.name, color=colours(0.85 * k / len(group)), lw=1.8)
        panel.axhline(demo.REACHED, color="grey", lw=0.8, ls=":")
        panel.set_title(f"{len(group)} rules {title}", fontsize=11)
        panel.set_xlabel("client reports that have arrived")
        panel.legend(fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 0.12))
        panel.grid(alpha=0.25)
        panel.set_ylim(1e-9, 1.5)
    panels[0].set_ylabel("distance from the optimum (start = 1)")
    figure.suptitle(
        f"{demo.CLIENTS} clients, half of them {demo.SLOWDOWN:g}x slower and with other data: "
        "the same clients and job durations for every rule",
        fontsize=12,
    )
    figure.savefig(file, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    optimum_figure(HERE / "optimum.png")
