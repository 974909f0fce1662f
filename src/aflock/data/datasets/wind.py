"""Wind power: what a turbine gives, from the weather at its site. Each turbine, or each point of a grid, is a key.

By default the four turbines of La Haute Borne, with the power that was measured; with `files`, points in the output of
a climate model or a reanalysis, with the power of a turbine type's curve there. See `series` for what an example is.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InputError, ParameterError
from ...params import Params, positive, switch, unit, whole
from ..base import Dataset
from ..checks import optional, text
from ..fetching import cache
from ..registry import register
from . import climate, haute_borne
from .series import Series, windows


def _numbers(value: Any, count: int) -> bool:
    return isinstance(value, Sequence) and len(value) == count and all(isinstance(x, Real) for x in value)


def _paths(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Sequence) and all(isinstance(x, str) for x in value))


def _pairs(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and all(_numbers(point, 2) for point in value)


def _four(value: Any) -> bool:
    return _numbers(value, 4)


@dataclass(frozen=True)
class WindParams(Params):
    """Parameters of the wind data."""

    minutes: int = whole(180, "length of a step")
    steps: int = whole(8, "steps of an example")
    ahead: int = whole(1, "steps from the last input to the power that is asked for; 0 is the same step", least=0)
    past_power: bool = switch(True, "whether the power is an input, too; not with ahead=0")
    test_fraction: float = unit(0.2, "share of the time, its end, that is for testing")
    files: str | tuple[str, ...] | None = optional(
        "NetCDF files to use instead of La Haute Borne", _paths, "a path (* is allowed) or a list of them"
    )
    points: tuple[tuple[float, float], ...] | None = optional(
        "points in the files; every node of the grid if None", _pairs, "[[latitude, longitude], ...]"
    )
    region: tuple[float, float, float, float] | None = optional(
        "points of the files outside it are left out", _four, "[south, north, west, east]"
    )
    turbine: str = text("V90/2000", "type of the turbines at the points, as windpowerlib calls it")
    hub_height: float = positive(105.0, "metres from the ground to the hub, at the points")


@register(
    "wind",
    source="ENGIE, La Haute Borne wind farm, 2014-15; or NetCDF files of one's own",
    description="the power of a wind turbine from weather (and power) before; each turbine is a key; a regression",
    params=WindParams,
    supplies=(haute_borne.LA_HAUTE_BORNE,),
)
def wind(params: WindParams, seed: int) -> Dataset:
    """The windows of every site; the seed makes no difference."""
    if params.past_power and not params.ahead:
        raise ParameterError(
            "wind: past_power=True with ahead=0 gives the answer away; set past_power=False or ahead=1"
        )
    if params.files is None:
        series = haute_borne.series(haute_borne.LA_HAUTE_BORNE.arrays(), params.minutes)
    else:
        series = _at_points(params, _files(params.files))
    return windows("wind", series, params.steps, params.ahead, params.past_power, params.test_fraction)


def _at_points(params: WindParams, files: list[Path]) -> Series:
    settings = {name: asdict(params)[name] for name in ("points", "region", "minutes", "turbine", "hub_height")}
    known = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    points = None if params.points is None else np.array(params.points, np.float64)
    return Series.of(
        cache.kept(
            cache.derived("wind-files", files=known, **settings),
            lambda: climate.read(
                files, points, params.region, params.minutes, params.turbine, params.hub_height
            ).state(),
        )
    )


def _files(given: str | Sequence[str]) -> list[Path]:
    patterns = [given] if isinstance(given, str) else list(given)
    found = sorted({Path(name) for pattern in patterns for name in glob.glob(str(Path(pattern).expanduser()))})
    if not found:
        raise InputError(f"wind: there is no file {', '.join(patterns)}; expected NetCDF files")
    return found
