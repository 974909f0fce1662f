"""Tables of results: the interval behind the ±."""

from __future__ import annotations

import math

import pytest

from aflock.reports.tables import comparison, half_interval


@pytest.mark.parametrize(
    ("count", "quantile"),
    [(2, 12.706205), (3, 4.302653), (5, 2.776445), (10, 2.262157), (11, 2.228139), (31, 2.042272), (1001, 1.962339)],
)
def test_half_the_interval_is_student_s(count: int, quantile: float) -> None:
    """The 0.975 quantiles as printed in tables, for count - 1 degrees of freedom."""
    mean = (count - 1) / 2
    deviation = math.sqrt(sum((value - mean) ** 2 for value in range(count)) / (count - 1))
    assert half_interval(range(count)) == pytest.approx(quantile * deviation / math.sqrt(count), rel=1e-6)


def test_the_interval_of_eleven_seeds_in_the_table() -> None:
    """The variance of 0, ..., 10 is 11, so that half the interval of the mean is the quantile itself, 2.228."""
    run = dict.fromkeys(
        ["uploads", "versions", "virtual_time", "gradient_evaluations", "bytes_up", "bytes_down", "staleness_mean",
         "staleness_max", "largest_share"], 0,
    )  # fmt: skip
    table = comparison({"ace": [run | {"accuracy": k / 100} for k in range(11)]})
    assert "0.050±0.022" in table
