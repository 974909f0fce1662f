"""One variable out of NetCDF files, at given points, over all times the files have.

Every file may hold some of the variables and some of the times: CMIP6 comes as one variable per file and a few years
each. Packed and missing values and all calendars of the CF conventions are supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InputError
from ..base import Integers
from ..checks import imported
from .grids import Grid, Pole
from .series import Numbers

Times = tuple[Integers, Numbers]
"""Minutes since 1970, ascending, and values (points, times)."""


def quantity(files: Sequence[Path], names: tuple[str, ...], points: Numbers) -> Times | None:
    """A variable, or the length of the vector whose two components have those names; None if no file has it."""
    found = [[piece for file in files if (piece := _piece(file, name, points))] for name in names]
    if not all(found):
        return None
    if any([len(times) for times, _, _ in pieces] != [len(times) for times, _, _ in found[0]] for pieces in found):
        raise InputError(f"{' and '.join(names)} have different times; expected files of the same period for both")
    pieces = []
    for parts in zip(*found, strict=True):
        (times, grid, values), rest = parts[0], parts[1:]
        # The length is taken on the grid: no rotation changes it, while interpolated components are too short.
        pieces.append((times, grid.at(points, np.hypot(values, rest[0][2]) if rest else values)))
    times = np.concatenate([piece[0] for piece in pieces])
    order = np.unique(times, return_index=True)[1]  # ascending, and the first of any time that comes twice
    return times[order], np.concatenate([piece[1] for piece in pieces], axis=1)[:, order]


def grid_of(file: Path, names: Sequence[str]) -> Grid:
    """The grid of the first of those variables that the file has."""
    with _opened(file) as data:
        for name in names:
            if name in data.variables:
                return _grid(data, data.variables[name])
    raise InputError(f"{file} has none of the variables {', '.join(names)}; expected wind or pressure")


def _piece(file: Path, name: str, points: Numbers) -> tuple[Integers, Grid, Numbers] | None:
    """Times, the grid around the points, and values (y, x, times), if the file has the variable."""
    with _opened(file) as data:
        if name not in data.variables:
            return None
        variable = data.variables[name]
        grid = _grid(data, variable).near(points)
        rows, columns = np.sort(grid.rows), np.sort(grid.columns)  # netCDF4 wants ascending indices
        between = (0,) * (variable.ndim - 3)  # a height or an ensemble member, of which the first is taken
        values = np.ma.filled(variable[(slice(None), *between, rows, columns)].astype(np.float64), np.nan)
        ordered = values[:, np.searchsorted(rows, grid.rows)][:, :, np.searchsorted(columns, grid.columns)]
        return _minutes(data, variable), grid, ordered.transpose(1, 2, 0)


def _opened(file: Path) -> Any:
    try:
        return _library().Dataset(str(file))
    except OSError as error:
        raise InputError(f"{file} cannot be read as NetCDF ({error})") from error


def _library() -> Any:
    return imported("netCDF4", "NetCDF files are read by netCDF4", "'aflock[wind]'")


def _grid(data: Any, variable: Any) -> Grid:
    axes = []
    for dimension in variable.dimensions[-2:]:
        axis = data.variables.get(dimension)
        if axis is None or axis.ndim != 1 or len(axis) < 2:
            raise InputError(f"{data.filepath()} has no axis {dimension!r}; expected a regular grid or a rotated one")
        axes.append(np.asarray(axis[:], np.float64))
    return Grid.of(axes[0], axes[1], _pole(data, variable))


def _pole(data: Any, variable: Any) -> Pole | None:
    mapping = data.variables.get(getattr(variable, "grid_mapping", ""))
    if getattr(mapping, "grid_mapping_name", "") != "rotated_latitude_longitude":
        return None
    return float(mapping.grid_north_pole_latitude), float(mapping.grid_north_pole_longitude)


def _minutes(data: Any, variable: Any) -> Integers:
    """The times in minutes since 1970, in the calendar of the file."""
    axis = data.variables[variable.dimensions[0]]
    calendar = getattr(axis, "calendar", "standard")
    dates = _library().num2date(axis[:], axis.units, calendar)
    minutes: Integers = np.rint(_library().date2num(dates, "minutes since 1970-01-01", calendar)).astype(np.int64)
    return minutes
