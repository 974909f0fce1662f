"""Weather and power at some sites, step by step, and the windows that a model learns from.

An example is `steps` steps of, per step,

    time of the year, latitude, longitude, wind speed, surface pressure [, power]

and its label is the power `ahead` steps after the last of them, as a share of the turbine's rated power. The first five
are the inputs of the paper; its time is read as the time of the year, because a time that only grows would lie outside
of everything seen as soon as testing begins. The last steps of every site are for testing. Inputs are standardised
with mean and standard deviation of the training steps alone, and no window reaches across the border, so that nothing
of the test period is in the training. A window with a gap in it is left out.

A. Forootani and R. Iervolino, "Asynchronous Federated Learning: A Scalable Approach for Decentralized Machine
Learning", 2024 (arXiv:2412.17723), sections 6.1 and 6.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ...types import State
from ..base import Dataset, Integers

Numbers = npt.NDArray[np.float64]
YEAR = 365.2425 * 24 * 60
"""Minutes."""


@dataclass(frozen=True)
class Series:
    """Equal steps of `step` minutes from `start` (minutes since 1970); values are (sites, steps), NaN in a gap."""

    names: tuple[str, ...]
    latitude: Numbers
    longitude: Numbers
    start: int
    step: int
    wind: Numbers
    pressure: Numbers
    power: Numbers

    @classmethod
    def of(cls, kept: State) -> Series:
        """The series that `state` stored."""
        return cls(**{name: kept[name] for name in cls.__annotations__} | {"names": tuple(kept["names"])})

    def state(self) -> State:
        """Arrays and JSON values, for the cache."""
        return {name: getattr(self, name) for name in self.__annotations__} | {"names": list(self.names)}


def resampled(times: Integers, values: Numbers, start: int, count: int, step: int) -> Numbers:
    """Values (..., times) at `count` steps of `step` minutes from `start`.

    A step that holds several times is the mean of them, and a gap if it has fewer than half as many values as steps
    have otherwise. Times further apart than a step are joined by straight lines.
    """
    if len(times) > 1 and np.median(np.diff(times)) > step:
        grid = start + step * np.arange(count)
        flat = [np.interp(grid, times, row, left=np.nan, right=np.nan) for row in values.reshape(-1, len(times))]
        return np.array(flat).reshape(*values.shape[:-1], count)
    index = (times - start) // step
    inside = (index >= 0) & (index < count)
    return _means(values[..., inside], index[inside], count)


def _means(values: Numbers, index: Integers, count: int) -> Numbers:
    present = np.isfinite(values)
    usual = np.median(np.bincount(index, minlength=count))
    rows = [
        (np.bincount(index, np.where(has, row, 0), count), np.bincount(index, has, count))
        for row, has in zip(values.reshape(-1, len(index)), present.reshape(-1, len(index)), strict=True)
    ]
    with np.errstate(invalid="ignore", divide="ignore"):
        means = [np.where(known * 2 >= max(usual, 1), total / known, np.nan) for total, known in rows]
    return np.array(means).reshape(*values.shape[:-1], count)


def windows(name: str, series: Series, steps: int, ahead: int, past_power: bool, test_fraction: float) -> Dataset:
    """The examples of every site; the site is their key."""
    inputs = _inputs(series, past_power)
    count = inputs.shape[1]
    border = int((1 - test_fraction) * count)
    inputs = _standardised(inputs, border)
    parts = []
    for begin, end in ((0, border), (border, count)):
        x, y = _pairs(inputs[:, begin:end], series.power[:, begin:end], steps, ahead)
        whole = np.isfinite(x).all((2, 3)) & np.isfinite(y)
        parts.append((x[whole].astype(np.float32), y[whole].astype(np.float32), np.nonzero(whole)[0]))
    (train_x, train_y, keys), (test_x, test_y, _) = parts
    if not len(train_y) or not len(test_y):
        raise InputError(f"{name}: {count} steps leave no window of {steps} steps without a gap; use fewer steps")
    return Dataset(name, train_x, train_y, test_x, test_y, 1, keys, series.names, regression=True)


def _inputs(series: Series, past_power: bool) -> Numbers:
    """(sites, steps, inputs)."""
    sites, count = series.power.shape
    time = (series.start + series.step * np.arange(count)) % YEAR / YEAR
    columns = [
        np.broadcast_to(time, (sites, count)),
        np.broadcast_to(series.latitude[:, None], (sites, count)),
        np.broadcast_to(series.longitude[:, None], (sites, count)),
        series.wind,
        series.pressure,
        *([series.power] if past_power else []),
    ]
    return np.stack(columns, axis=2)


def _standardised(inputs: Numbers, border: int) -> Numbers:
    seen = inputs[:, :border]
    if not np.isfinite(seen).any((0, 1)).all():
        raise InputError("an input has no value at all in the training period; expected wind, pressure and power")
    deviation = np.nanstd(seen, axis=(0, 1))
    standard: Numbers = (inputs - np.nanmean(seen, axis=(0, 1))) / np.where(deviation > 1e-9, deviation, 1)
    return standard


def _pairs(inputs: Numbers, power: Numbers, steps: int, ahead: int) -> tuple[Numbers, Numbers]:
    """Windows (sites, windows, steps, inputs) and the power after each (sites, windows)."""
    number = max(inputs.shape[1] - steps - ahead + 1, 0)
    if not number:
        return np.empty((len(inputs), 0, steps, inputs.shape[2])), np.empty((len(inputs), 0))
    views = np.lib.stride_tricks.sliding_window_view(inputs, steps, axis=1)[:, :number]
    return views.transpose(0, 1, 3, 2), power[:, steps + ahead - 1 :]
