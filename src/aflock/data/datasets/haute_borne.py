"""La Haute Borne: four turbines in France, 2014 and 2015, measured every ten minutes, and ERA5's pressure there.

Measured are wind speed and power; both years have 105,120 steps. The clock of the file skips and repeats when summer
time begins and ends: of several rows for the same time the first one counts, and 12 times have none.

ENGIE, "La Haute Borne wind farm", Open Licence 2.0, as carried by OpenOA (J. Perr-Sauer et al., Journal of Open Source
Software 6(58), 2021).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from ...errors import InputError
from ...types import State
from ..fetching.archives import all_of, by_name
from ..fetching.fetch import Supply
from ..fetching.sources import Pip, Web
from .series import Numbers, Series, resampled

FILES = ("la-haute-borne-data-2014-2015.csv", "la-haute-borne_asset_table.csv", "era5_wind_la_haute_borne.csv")
STEP = 10
"""Minutes."""


def read(paths: Sequence[Path]) -> State:
    """The measurements of every turbine on one clock, and the pressure by the hour; numbers as the files have them."""
    measured, assets, weather = (_rows(raw) for raw in all_of(by_name(paths, FILES), FILES))
    try:
        turbines = sorted(assets, key=lambda row: row["Wind_turbine_name"])
        return {
            "names": [row["Wind_turbine_name"] for row in turbines],
            "latitude": _column(turbines, "Latitude"),
            "longitude": _column(turbines, "Longitude"),
            "rated": _column(turbines, "Rated_power"),
            "hours": np.array([_minutes(row["datetime"]) for row in weather]),
            "pressure": _column(weather, "surf_pres"),
            **_on_one_clock(measured, [row["Wind_turbine_name"] for row in turbines]),
        }
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"the tables are not those of La Haute Borne ({error!r})") from error


def _rows(raw: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(raw.decode("utf-8-sig"))))


def _column(rows: list[dict[str, str]], name: str) -> Numbers:
    return np.array([float(row[name] or "nan") for row in rows])


def _on_one_clock(rows: list[dict[str, str]], names: list[str]) -> State:
    minutes = np.array([_minutes(row["Date_time"]) for row in rows])
    start = int(minutes.min())
    turbine = np.array([names.index(row["Wind_turbine_name"]) for row in rows])
    shape = (len(names), int(np.ptp(minutes)) // STEP + 1)
    cells, first = np.unique(turbine * shape[1] + (minutes - start) // STEP, return_index=True)

    def table(name: str) -> Numbers:
        filled = np.full(shape, np.nan)
        filled.flat[cells] = _column(rows, name)[first]
        return filled

    return {"start": start, "wind": table("Ws_avg"), "power": table("P_avg")}


def series(kept: State, minutes: int) -> Series:
    """The measurements in steps of so many minutes."""
    start, count = kept["start"], kept["power"].shape[1] * STEP // minutes
    times = start + STEP * np.arange(kept["power"].shape[1])
    pressure = resampled(kept["hours"], kept["pressure"], start, count, minutes)
    return Series(
        names=tuple(kept["names"]),
        latitude=kept["latitude"],
        longitude=kept["longitude"],
        start=start,
        step=minutes,
        wind=resampled(times, kept["wind"], start, count, minutes),
        pressure=np.repeat(pressure[None], len(kept["names"]), axis=0),
        power=resampled(times, kept["power"], start, count, minutes) / kept["rated"][:, None],
    )


def _minutes(text: str) -> int:
    """Minutes since 1970; a time without a zone is UTC."""
    time = datetime.fromisoformat(text)
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() / 60)


LA_HAUTE_BORNE = Supply(
    "wind",
    sources=(
        Web.file(
            "https://raw.githubusercontent.com/NatLabRockies/OpenOA/9bfc7a3dc542b17bbfc06b692dbfb8b23c754975/"
            "examples/data/la_haute_borne.zip",
            "be5ea66a3355286e491f5618250dc83e85252a8cb337748d7ba19edc50df6138",
        ),
        Pip("openoa==3.2", "654c1a81c3c27d8caa84e861a7659090d0135f08350e2577e96e42025899f70f"),
    ),
    read=read,
    digest="4e3886e6c3a3d8bf5a078ff86bd77d72e599822206dd9bc5114e2448de7594c7",
    licence="Open Licence 2.0 (ENGIE)",
)
