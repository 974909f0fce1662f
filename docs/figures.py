"""Draws the figures of README and docs from fresh runs: `make figures`."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from aflock import strategies
from aflock.showcase import demo, optimum

HERE = Path(__file__).parent


def optimum_figure(file: Path) -> None:
    """Left: distance from the optimum against arrivals of the rules that reach it. Right: where the others end."""
    runs = sorted((optimum.run(name) for name in strategies.names()), key=lambda run: run.final)
    reached, missed = [r for r in runs if r.reached], [r for r in runs if not r.reached]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), width_ratios=(3, 2), layout="constrained")
    for k, run in enumerate(reached):
        arrivals = [run.arrivals * (j + 1) / len(run.distance) for j in range(len(run.distance))]
        left.semilogy(arrivals, run.distance, label=run.name, color=f"C{k}", lw=1.8, ls="-" if k % 2 else "--")
    left.axhline(optimum.REACHED, color="grey", lw=0.8, ls=":")
    left.text(
        optimum.ARRIVALS, optimum.REACHED * 1.1, "counts as reached", fontsize=8, color="grey", ha="right", va="bottom"
    )
    left.set_title(f"{len(reached)} rules reach the optimum of all clients", fontsize=11)
    left.set_xlabel("client reports that have arrived")
    left.set_ylabel("distance from the optimum (start = 1)")
    left.legend(fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 0.2))
    left.grid(alpha=0.25)
    labels = [f"{run.name} ({_deciding(run)})" if _deciding(run) else run.name for run in missed]
    bars = right.barh(labels, [run.final for run in missed], color="C3", height=0.6)
    right.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    right.axvline(optimum.REACHED, color="grey", lw=0.8, ls=":")
    right.set_title(f"{len(missed)} end nearer to what the fast ones want", fontsize=11)
    right.set_xlabel("distance from the optimum at the end")
    right.tick_params(axis="y", labelsize=9)
    right.margins(x=0.12)
    right.invert_yaxis()
    figure.suptitle(
        f"{optimum.CLIENTS} clients, half of them {optimum.SLOWDOWN:g}x slower and with other data; "
        "the same clients and job durations for every rule",
        fontsize=12,
    )
    figure.savefig(file, dpi=110, metadata={"Software": None})


def _deciding(run: optimum.RuleRun) -> str:
    """The parameter that decides how far off a rule ends, where there is one."""
    name = {"aced": "tau_algo", "twafl": "decay", "mr-asyncfl": "gamma"}.get(run.name)
    return f"{name}={run.settings[name]:g}" if name else ""


if __name__ == "__main__":
    optimum_figure(HERE / "optimum.png")
    demo.picture(demo.run(), HERE / "demo.png")
