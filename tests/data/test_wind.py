"""Wind: turbines and their measurements, grids and their poles, windows and what they must not know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import pytest

from aflock import data
from aflock.data import partition
from aflock.data.datasets import climate, haute_borne
from aflock.data.datasets.grids import Grid, rotated, unrotated
from aflock.data.datasets.series import Series, resampled, windows
from aflock.errors import InputError, ParameterError
from tests.data.archives import zipped

HOUR, DAY = 60, 24 * 60


@pytest.fixture(autouse=True)
def kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFLOCK_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("AFLOCK_FILES", str(tmp_path))


# -- steps ------------------------------------------------------------------------------------------------------------


def test_several_times_in_a_step_are_averaged() -> None:
    times = np.arange(0, 60, 10)
    values = np.array([[1.0, 2, 3, 4, 5, 6], [1, np.nan, 3, np.nan, np.nan, 6]])
    made = resampled(times, values, 0, 2, 30)
    assert made[0].tolist() == [2, 5]
    assert made[1][0] == 2  # two of three are enough
    assert np.isnan(made[1][1])  # one of three is not


def test_times_before_and_after_the_steps_are_left_out() -> None:
    assert resampled(np.arange(-20, 80, 10), np.arange(10.0), 0, 2, 30).tolist() == [3, 6]


def test_wide_times_are_joined_by_straight_lines() -> None:
    made = resampled(np.array([0, 60, 120]), np.array([[0.0, 6, 0]]), -10, 6, 20)
    assert made[0][1:].tolist() == [1, 3, 5, 5, 3]
    assert np.isnan(made[0][0])


# -- windows ----------------------------------------------------------------------------------------------------------


def series(count: int = 20, places: int = 2) -> Series:
    """Numbers that tell where they come from: power 100*place + step, wind ten times that."""
    power = (100 * np.arange(places)[:, None] + np.arange(count)).astype(np.float64)
    names = tuple(f"p{place}" for place in range(places))
    where = np.arange(places, dtype=float)
    return Series(names, 50 + where, 8 + where, 0, DAY, 10 * power, 1e5 + power, power)


def test_windows_by_hand() -> None:
    made = windows("wind", series(), steps=3, ahead=2, past_power=True, test_fraction=0.4)
    assert made.train_x.shape == (2 * 8, 3, 6)  # 12 steps for training: 3 for the window, 2 up to the label
    assert made.train_y[:8].tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert made.test_x.shape == (2 * 4, 3, 6)
    assert made.test_y[:4].tolist() == [16, 17, 18, 19]
    assert made.keys is not None
    assert (made.keys.tolist(), made.key_names) == ([0] * 8 + [1] * 8, ("p0", "p1"))
    assert (made.classes, made.regression) == (1, True)
    spread = made.train_x[0, 1] - made.train_x[0, 0]
    assert spread[3] == pytest.approx(spread[5], rel=1e-5)  # wind and power go up together
    assert spread[1:3].tolist() == [0, 0]  # a place does not move


def test_the_same_step_without_the_power_in_it() -> None:
    made = windows("wind", series(), steps=1, ahead=0, past_power=False, test_fraction=0.5)
    assert made.train_x.shape == (20, 1, 5)
    assert made.train_y[:10].tolist() == list(range(10))


def test_inputs_are_standard_over_the_training_steps_alone() -> None:
    wild = series()
    wild.wind[:, 12:] = 1e9
    calm = windows("wind", series(), 1, 1, True, 0.4)
    made = windows("wind", wild, 1, 1, True, 0.4)
    assert np.array_equal(calm.train_x, made.train_x)  # nothing of the test period is in the training
    used = replace(series(), wind=np.random.default_rng(1).normal(5, 3, (2, 20)))
    wind = windows("wind", used, 1, 0, False, 0.5).train_x[:, 0, 3]
    assert wind.mean() == pytest.approx(0, abs=1e-6)
    assert wind.std() == pytest.approx(1, abs=1e-6)


def test_a_window_with_a_gap_is_left_out() -> None:
    gappy = series()
    gappy.power[0, 5] = np.nan
    made = windows("wind", gappy, 2, 1, True, 0.4)
    assert made.keys is not None
    assert np.bincount(made.keys).tolist() == [7, 10]  # as input twice, as label once
    assert np.isfinite(made.train_x).all()


def test_too_few_steps() -> None:
    with pytest.raises(InputError, match="wind: 20 steps leave no window of 30 steps without a gap; use fewer steps"):
        windows("wind", series(), 30, 1, True, 0.5)
    empty = series()
    empty.pressure[:] = np.nan
    with pytest.raises(InputError, match="an input has no value at all in the training period"):
        windows("wind", empty, 1, 1, True, 0.5)


# -- la haute borne ---------------------------------------------------------------------------------------------------

ASSETS = """Wind_turbine_name,Latitude,Longitude,elevation_m,Rated_power
B,48.2,5.2,411,1000
A,48.1,5.1,411,2000"""

ROWS = [
    ("A", "2014-03-30T01:50:00+01:00", "200", "5"),
    ("B", "2014-03-30T01:50:00+01:00", "100", "4"),
    ("A", "2014-03-30T03:00:00+02:00", "400", "6"),
    ("A", "2014-03-30T03:00:00+02:00", "999", "9"),  # again: the clock was put forward
    ("B", "2014-03-30T03:00:00+02:00", "", ""),
    ("B", "2014-03-30T03:20:00+02:00", "500", "7"),
]


def table(rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(["Wind_turbine_name,Date_time,P_avg,Ws_avg", *(",".join(row) for row in rows)])


def archive(rows: Sequence[tuple[str, ...]], hours: int = 3) -> bytes:
    weather = [f"{h},2014-03-30 {h:02d}:00:00,{97_000 + 60 * h}" for h in range(hours)]
    files = (table(rows), ASSETS, "\n".join([",datetime,surf_pres", *weather]))
    inner = zipped({name: text.encode() for name, text in zip(haute_borne.FILES, files, strict=True)})
    return zipped({"examples/data/la_haute_borne.zip": inner, "__MACOSX/._" + haute_borne.FILES[0]: b"junk"})


def test_turbines_on_one_clock(tmp_path: Path) -> None:
    (tmp_path / "openoa.whl").write_bytes(archive(ROWS))
    kept = haute_borne.read([tmp_path / "openoa.whl"])
    assert kept["names"] == ["A", "B"]
    nan = pytest.approx(np.nan, nan_ok=True)
    assert kept["power"][0].tolist() == [200, 400, nan, nan]  # 0:50, 1:00, 1:10, 1:20 UTC
    assert kept["power"][1].tolist() == [100, nan, nan, 500]
    made = haute_borne.series(kept, 10)
    assert made.power[0, :2].tolist() == [0.1, 0.2]
    assert made.power[1, 3] == 0.5
    assert made.wind[0, :2].tolist() == [5, 6]
    assert made.pressure[0] == pytest.approx([97_050, 97_060, 97_070, 97_080])
    assert (made.latitude.tolist(), made.longitude.tolist()) == ([48.1, 48.2], [5.1, 5.2])


def test_turbines_are_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        haute_borne, "LA_HAUTE_BORNE", replace(haute_borne.LA_HAUTE_BORNE, sources=(), digest=None)
    )  # fmt: skip
    times = [f"2014-03-30T{h:02d}:{m:02d}:00+00:00" for h in range(24) for m in range(0, 60, 10)]
    rows = [(name, time, str(place), "5") for place, time in enumerate(times) for name in "AB"]
    (tmp_path / "wind").mkdir()
    (tmp_path / "wind" / "openoa.whl").write_bytes(archive(rows, hours=24))
    made = data.load("wind", minutes=60, steps=2)
    assert made.shape == (2, 6)
    assert made.key_names == ("A", "B")
    assert made.train_y[0] == pytest.approx((12 + 17) / 2 / 2000)  # the third hour
    assert len(partition.create("key", made, None).indices) == 2
    assert data.load("wind", minutes=60, steps=2, ahead=0, past_power=False).shape == (2, 5)


def test_what_is_no_haute_borne(tmp_path: Path) -> None:
    files = dict.fromkeys(haute_borne.FILES, b"a,b\n1,2\n")
    (tmp_path / "x.zip").write_bytes(zipped(files))
    with pytest.raises(InputError, match="the tables are not those of La Haute Borne"):
        haute_borne.read([tmp_path / "x.zip"])


# -- grids ------------------------------------------------------------------------------------------------------------

CORDEX = (39.25, -162.0)
"""The pole of the European domain, whose middle is 50.75 N, 18 E."""


def test_a_rotated_pole_puts_the_middle_of_europe_on_the_equator() -> None:
    assert np.concatenate(rotated(np.array([50.75]), np.array([18.0]), CORDEX)) == pytest.approx([0, 0], abs=1e-12)
    latitude, longitude = rotated(np.array([50.75, 51.75]), np.array([19.0, 18.0]), CORDEX)
    assert longitude[0] > 0.5  # east stays east
    assert latitude[1] == pytest.approx(1)  # north stays north


def test_there_and_back() -> None:
    draws = np.random.default_rng(3)
    latitude, longitude = draws.uniform(-89, 89, 200), draws.uniform(-179, 179, 200)
    back = unrotated(*rotated(latitude, longitude, CORDEX), CORDEX)
    assert back[0] == pytest.approx(latitude)
    assert back[1] == pytest.approx(longitude)


def test_a_pole_that_is_not_rotated() -> None:
    latitude, longitude = rotated(np.array([10.0, -20.0]), np.array([30.0, -40.0]), (90.0, 180.0))
    assert latitude == pytest.approx([10, -20])
    assert longitude == pytest.approx([30, -40])


def test_a_plane_is_interpolated_exactly_whatever_the_order_of_the_axes() -> None:
    y, x = np.array([54.0, 52, 50, 48]), np.array([0.0, 10, 350])
    grid = Grid.of(y, x, None)
    assert grid.x.tolist() == [-10, 0, 10]
    plane = 2 * grid.y[:, None] + 3 * grid.x[None]
    points = np.array([[48.0, -10], [51.3, 7.7], [54, 10], [50, 359.5]])
    expected = 2 * points[:, 0] + 3 * np.array([-10, 7.7, 10, -0.5])
    assert grid.at(points, plane) == pytest.approx(expected)
    near = grid.near(points[1:2])
    assert (near.y.tolist(), near.x.tolist()) == ([50, 52], [0, 10])
    assert near.at(points[1:2], plane[np.ix_([1, 2], [1, 2])]) == pytest.approx(expected[1:2])
    for corner in points[[0, 2]]:
        part = grid.near(corner[None])
        assert len(part.y) == len(part.x) == 2


def test_a_point_outside_is_named() -> None:
    grid = Grid.of(np.array([50.0, 51]), np.array([8.0, 9]), None)
    with pytest.raises(ParameterError, match=r"wind: the point 52, 8\.5 lies outside the grid of the files"):
        grid.locate(np.array([[50.5, 8.5], [52, 8.5]]))
    assert grid.locate(np.array([[51.0004, 8.5]])).tolist() == [[51, 8.5]]  # axes are float32 in most files


# -- netcdf -----------------------------------------------------------------------------------------------------------


def era5(path: Path, *, variables: tuple[str, ...] = ("u100", "v100", "sp"), hours: int = 48, start: int = 0) -> Path:
    """Hourly, packed into integers, north first, longitudes from 0 to 360: a 3-4-5 wind of 5 times the longitude."""
    with netCDF4.Dataset(str(path), "w", format="NETCDF3_64BIT_OFFSET") as file:
        file.createDimension("time", None)
        file.createDimension("latitude", 3), file.createDimension("longitude", 4)
        axes: dict[str, Any] = {
            "time": start + np.arange(hours),
            "latitude": [52.0, 51, 50],
            "longitude": [359.0, 0, 1, 2],
        }
        for name, kind in (("time", "i4"), ("latitude", "f4"), ("longitude", "f4")):
            file.createVariable(name, kind, (name,))[:] = axes[name]
        file["time"].units = "hours since 2017-01-01 00:00:00"
        east = np.broadcast_to(np.array([-1.0, 0, 1, 2]) + 2, (hours, 3, 4))
        fields = {"u100": 3 * east, "v100": -4 * east, "sp": np.broadcast_to(np.arange(hours)[:, None, None] + 1e5,
                                                                              (hours, 3, 4))}  # fmt: skip
        for name in variables:
            packed = file.createVariable(name, "i2", ("time", "latitude", "longitude"), fill_value=-32767)
            packed.scale_factor, packed.add_offset = (0.01, 0.0) if name != "sp" else (1.0, 1e5)
            packed[:] = fields[name]
    return path


def cordex(path: Path, name: str, days: range, calendar: str = "360_day") -> Path:
    """Three-hourly, one variable, a rotated grid, a height, a calendar of its own: linear in the rotated latitude."""
    with netCDF4.Dataset(str(path), "w") as file:
        for dimension, length in (("time", None), ("height", 1), ("rlat", 5), ("rlon", 6)):
            file.createDimension(dimension, length)
        file.createVariable("time", "f8", ("time",))[:] = np.arange(days.start, days.stop, 0.125)
        file["time"].units, file["time"].calendar = "days since 2015-01-01", calendar
        file.createVariable("rlat", "f8", ("rlat",))[:] = np.arange(-2, 3)
        file.createVariable("rlon", "f8", ("rlon",))[:] = np.arange(-3, 3)
        pole = file.createVariable("rotated_pole", "i4", ())
        pole.grid_mapping_name = "rotated_latitude_longitude"
        pole.grid_north_pole_latitude, pole.grid_north_pole_longitude = CORDEX
        field = file.createVariable(name, "f4", ("time", "height", "rlat", "rlon"))
        field.grid_mapping = "rotated_pole"
        field[:] = np.broadcast_to(8 + np.arange(-2.0, 3)[:, None], (len(days) * 8, 1, 5, 6))
    return path


def test_a_reanalysis_on_a_regular_grid(tmp_path: Path) -> None:
    file = era5(tmp_path / "era5.nc")
    made = climate.read([file], np.array([[51.0, -0.5], [50.5, 1.25]]), None, 180, "V90/2000", 100.0)
    assert made.names == ("51,-0.5", "50.5,1.25")
    assert made.power.shape == (2, 16)
    assert made.wind[:, 0] == pytest.approx([5 * 1.5, 5 * 3.25], abs=0.01)  # the length of (3, -4) is 5
    assert made.pressure[0, :2] == pytest.approx([100_001, 100_004])  # the mean of three hours
    assert made.power[1, 0] == pytest.approx(1, abs=0.02)  # rated at 16 m/s
    assert 0.3 < made.power[0, 0] < 0.4  # at 7.5 m/s


def test_wind_grows_with_height(tmp_path: Path) -> None:
    made = climate.read([era5(tmp_path / "a.nc")], np.array([[51.0, 0.0]]), None, 180, "V90/2000", 200.0)
    assert made.wind[0, 0] == pytest.approx(10 * 2 ** (1 / 7), abs=0.01)


def test_a_climate_model_on_a_rotated_grid_over_several_files(tmp_path: Path) -> None:
    cordex(tmp_path / "sfcWind_1.nc", "sfcWind", range(4))
    cordex(tmp_path / "sfcWind_2.nc", "sfcWind", range(4, 7))
    cordex(tmp_path / "ps.nc", "ps", range(1, 7))
    point = np.array([unrotated(np.array([0.5]), np.array([-1.2]), CORDEX)])[..., 0]
    made = climate.read(sorted(tmp_path.glob("*.nc")), point, None, 180, "V90/2000", 10.0)
    assert made.wind.shape == (1, 6 * 8)  # what both have in common
    assert made.wind == pytest.approx(np.full((1, 48), 8.5))
    assert made.pressure == pytest.approx(np.full((1, 48), 8.5))


def test_every_node_in_a_region_is_a_point(tmp_path: Path) -> None:
    everywhere = climate.read([era5(tmp_path / "a.nc")], None, None, 180, "V90/2000", 100.0)
    assert len(everywhere.names) == 12
    some = climate.read([tmp_path / "a.nc"], None, (50.5, 52.5, -1.5, 0.5), 180, "V90/2000", 100.0)
    assert set(some.names) == {"51,-1", "51,0", "52,-1", "52,0"}
    with pytest.raises(ParameterError, match="wind: 0 points are left; expected 1 to 10000, see points and region"):
        climate.read([tmp_path / "a.nc"], None, (10, 20, 0, 1), 180, "V90/2000", 100.0)


def test_files_of_ones_own_by_name(tmp_path: Path) -> None:
    era5(tmp_path / "one.nc", hours=240), era5(tmp_path / "two.nc", hours=240, start=240)
    params: dict[str, Any] = {"files": str(tmp_path / "*.nc"), "points": [[51, 0.5], [50.2, 1.5]], "steps": 4}
    made = data.load("wind", **params)
    assert made.shape == (4, 6)
    assert made.key_names == ("51,0.5", "50.2,1.5")
    assert len(made.train_y) + len(made.test_y) == 2 * (160 - 2 * 4)
    (tmp_path / "one.nc").touch()
    again = data.load("wind", **params)  # another time stamp: read again
    assert np.array_equal(made.train_x, again.train_x)


@pytest.mark.parametrize(
    ("params", "error", "said"),
    [
        ({"ahead": 0}, ParameterError, "wind: past_power=True with ahead=0 gives the answer away"),
        ({"files": "no/such/*.nc"}, InputError, "wind: there is no file no/such/*.nc; expected NetCDF files"),
        (
            {"files": 3},
            ParameterError,
            "files=3 is not valid; expected a path (* is allowed) or a list of them",
        ),
        (
            {"points": [[1, 2, 3]]},
            ParameterError,
            "points=[[1, 2, 3]] is not valid; expected [[latitude, longitude], ..",
        ),
        ({"region": [1, 2]}, ParameterError, "region=[1, 2] is not valid; expected [south, north, west, east]"),
        ({"turbine": ""}, ParameterError, "turbine='' is not valid; expected a string"),
        ({"minutes": 0}, ParameterError, "minutes=0 is not valid"),
    ],
)
def test_what_wind_refuses(params: dict[str, Any], error: type[InputError], said: str) -> None:
    with pytest.raises(error) as caught:
        data.load("wind", **params)
    assert said in str(caught.value)


def test_files_that_lack_something(tmp_path: Path) -> None:
    here = np.array([[51.0, 0.0]])

    def refused(said: str, *files: Path, turbine: str = "V90/2000") -> None:
        with pytest.raises(InputError, match=said):
            climate.read(files, here, None, 180, turbine, 100.0)

    whole, calm = era5(tmp_path / "a.nc"), era5(tmp_path / "calm.nc", variables=("sp",))
    refused("the files have no wind; expected u100 and v100 or", calm)
    refused("the files have no wind", era5(tmp_path / "half.nc", variables=("u100", "sp")))
    refused(
        "the files have no surface pressure; expected sp or ps", era5(tmp_path / "u.nc", variables=("u100", "v100"))
    )
    late = era5(tmp_path / "late.nc", variables=("sp",), start=1000)
    refused("wind and pressure have no time in common", tmp_path / "u.nc", late)
    uneven = era5(tmp_path / "v.nc", variables=("v100",), hours=10)
    refused("u100 and v100 have different times", tmp_path / "half.nc", uneven)
    refused("there is no power curve for the turbine 'X'; known are .*V90/2000", whole, turbine="X")
    (tmp_path / "text.nc").write_text("no")
    refused(r"text\.nc cannot be read as NetCDF", tmp_path / "text.nc")
    netCDF4.Dataset(str(tmp_path / "empty.nc"), "w").close()
    with pytest.raises(InputError, match="has none of the variables u100"):
        climate.read([tmp_path / "empty.nc"], None, None, 180, "V90/2000", 100.0)
