"""Grids of climate data: regular in latitude and longitude, or in those of a rotated pole.

A point is turned into the coordinates of the grid, and values are interpolated there, linearly. From the grid's north
pole (phi_N, lambda_N), a point (phi, lambda) is

    sin(phi')    = sin(phi) sin(phi_N) + cos(phi) cos(phi_N) cos(lambda - lambda_N)
    tan(lambda') = -cos(phi) sin(lambda - lambda_N) / (sin(phi) cos(phi_N) - cos(phi) sin(phi_N) cos(lambda - lambda_N))

Both axes are kept ascending and longitudes from -180 to 180, whatever the file has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...errors import ParameterError
from ..base import Integers
from ..checks import imported
from .series import Numbers

Pole = tuple[float, float]
"""Latitude and longitude of a grid's north pole."""

_CLOSE = 1e-3  # degrees a point may lie outside: axes are float32 in most files


@dataclass(frozen=True)
class Grid:
    """The axes; `rows` and `columns` say where their values are in the file."""

    y: Numbers
    x: Numbers
    rows: Integers
    columns: Integers
    pole: Pole | None = None

    @classmethod
    def of(cls, y: Numbers, x: Numbers, pole: Pole | None) -> Grid:
        """The grid with those axes, in any order."""
        x = around(x)
        rows, columns = np.argsort(y), np.argsort(x)
        return cls(y[rows], x[columns], rows, columns, pole)

    def nodes(self) -> Numbers:
        """Latitude and longitude of every node."""
        y, x = (axis.ravel() for axis in np.meshgrid(self.y, self.x, indexing="ij"))
        return np.column_stack((y, x) if self.pole is None else unrotated(y, x, self.pole))

    def locate(self, points: Numbers) -> Numbers:
        """Points (latitude, longitude) in the grid's own coordinates; one that lies outside is an error."""
        y, x = points.T
        if self.pole is not None:
            y, x = rotated(y, x, self.pole)
        found = np.column_stack([y, around(x)])
        low, high = np.array([self.y[0], self.x[0]]), np.array([self.y[-1], self.x[-1]])
        outside = ((found < low - _CLOSE) | (found > high + _CLOSE)).any(1)
        if outside.any():
            latitude, longitude = points[outside][0]
            raise ParameterError(f"wind: the point {latitude:g}, {longitude:g} lies outside the grid of the files")
        clipped: Numbers = np.clip(found, low, high)
        return clipped

    def near(self, points: Numbers) -> Grid:
        """The part of the grid that the points need: a file of the whole world is not read for one country."""
        y, x = self.locate(points).T
        rows, columns = _span(self.y, y), _span(self.x, x)
        return replace(
            self, y=self.y[rows], x=self.x[columns], rows=self.rows[rows], columns=self.columns[columns]
        )  # fmt: skip

    def at(self, points: Numbers, values: Numbers) -> Numbers:
        """Values (y, x, ...) at the points."""
        module = imported("scipy.interpolate", "grids are interpolated by scipy", "scipy")
        found: Numbers = module.RegularGridInterpolator((self.y, self.x), values)(self.locate(points))
        return found


def rotated(latitude: Numbers, longitude: Numbers, pole: Pole) -> tuple[Numbers, Numbers]:
    """Geographic coordinates in those of a rotated pole, in degrees."""
    phi, away, top = np.radians(latitude), np.radians(longitude - pole[1]), np.radians(pole[0])
    up = np.sin(phi) * np.sin(top) + np.cos(phi) * np.cos(top) * np.cos(away)
    across = -np.cos(phi) * np.sin(away)
    along = np.sin(phi) * np.cos(top) - np.cos(phi) * np.sin(top) * np.cos(away)
    return np.degrees(np.arcsin(np.clip(up, -1, 1))), np.degrees(np.arctan2(across, along))


def unrotated(latitude: Numbers, longitude: Numbers, pole: Pole) -> tuple[Numbers, Numbers]:
    """The way back: the rotated grid sees the geographic pole at (phi_N, 0), whose meridian 0 is that of its own."""
    back, turned = rotated(latitude, longitude, (pole[0], 0.0))
    return back, around(turned + pole[1])


def around(longitude: Numbers) -> Numbers:
    """The same longitude from -180 to 180."""
    return (longitude + 180) % 360 - 180


def _span(axis: Numbers, wanted: Numbers) -> slice:
    """The nodes around what is wanted, at least two."""
    first = max(int(np.searchsorted(axis, wanted.min(), "right")) - 1, 0)
    last = min(int(np.searchsorted(axis, wanted.max(), "left")), len(axis) - 1)
    return slice(min(first, max(last - 1, 0)), max(last, first + 1) + 1)
