"""Weather at given points, and what a turbine would make of it, from NetCDF files (CMIP6, CORDEX, ERA5 and the like).

Of each quantity the first of these that the files have is taken; two names are the components of a vector:

    wind       u100 v100 | ua100m va100m | sfcWind | u10 v10 | uas vas
    pressure   sp | ps

The wind is brought from its height h to that of the hub by the power law v_hub = v * (hub/h)^(1/7), and becomes power
by the turbine type's curve in windpowerlib.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...errors import InputError, ParameterError
from ..checks import imported
from .netcdf import Times, grid_of, quantity
from .series import Numbers, Series, resampled

WIND = {("u100", "v100"): 100, ("ua100m", "va100m"): 100, ("sfcWind",): 10, ("u10", "v10"): 10, ("uas", "vas"): 10}
PRESSURE = (("sp",), ("ps",))
MOST_POINTS = 10_000

Region = tuple[float, float, float, float]
"""South, north, west, east, in degrees."""


def read(
    files: Sequence[Path], points: Numbers | None, region: Region | None, step: int, turbine: str, hub: float
) -> Series:
    """The series at the points (all nodes of the grid if none are given) inside the region, in steps of minutes."""
    chosen = _inside(_nodes(files) if points is None else points, region)
    names, wind = _first(files, tuple(WIND), chosen, "wind")
    _, pressure = _first(files, PRESSURE, chosen, "surface pressure")
    start = -(-max(wind[0][0], pressure[0][0]) // step) * step
    count = int(min(wind[0][-1], pressure[0][-1]) - start) // step + 1
    if count < 1:
        raise InputError("wind and pressure have no time in common; expected files of the same period")
    speed = resampled(*wind, start, count, step) * (hub / WIND[names]) ** (1 / 7)
    return Series(
        names=tuple(f"{round(latitude, 4):g},{round(longitude, 4):g}" for latitude, longitude in chosen),
        latitude=chosen[:, 0],
        longitude=chosen[:, 1],
        start=int(start),
        step=step,
        wind=speed,
        pressure=resampled(*pressure, start, count, step),
        power=power_of(speed, turbine),
    )


def power_of(speed: Numbers, turbine: str) -> Numbers:
    """What a turbine of that type gives at that wind speed at its hub, as a share of its rated power."""
    library = imported("windpowerlib", "power curves come with windpowerlib", "'aflock[wind]'")
    known = sorted(set(library.get_turbine_types(print_out=False)["turbine_type"]))
    if turbine not in known:
        raise ParameterError(f"wind: there is no power curve for the turbine {turbine!r}; known are {', '.join(known)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pandas warns of calls that only windpowerlib can change
        machine = library.WindTurbine(turbine_type=turbine, hub_height=100)
    curve = machine.power_curve
    output = library.power_output.power_curve(speed.ravel(), curve["wind_speed"], curve["value"])
    share = np.asarray(output).reshape(speed.shape) / machine.nominal_power
    return np.where(np.isfinite(speed), share, np.nan)


def _nodes(files: Sequence[Path]) -> Numbers:
    return grid_of(files[0], [name for names in (*WIND, *PRESSURE) for name in names]).nodes()


def _inside(points: Numbers, region: Region | None) -> Numbers:
    if region is not None:
        south, north, west, east = region
        across = (points[:, 1] - west) % 360 <= ((east - west) % 360 or 360)
        points = points[(points[:, 0] >= south) & (points[:, 0] <= north) & across]
    if not 0 < len(points) <= MOST_POINTS:
        raise ParameterError(f"wind: {len(points)} points are left; expected 1 to {MOST_POINTS}, see points and region")
    return points


def _first(
    files: Sequence[Path], choices: tuple[tuple[str, ...], ...], points: Numbers, what: str
) -> tuple[tuple[str, ...], Times]:
    for names in choices:
        if found := quantity(files, names, points):
            return names, found
    expected = " or ".join(" and ".join(names) for names in choices)
    raise InputError(f"the files have no {what}; expected {expected} in one of {', '.join(map(str, files))}")
