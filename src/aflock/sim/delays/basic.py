"""Distributions with a formula."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from ...errors import ParameterError
from ...params import Params, non_negative, positive, unit
from .base import Delay, register


@dataclass(frozen=True)
class ConstantParams(Params):
    """Parameters of a constant delay."""

    value: float = positive(1.0, "the duration of every job")


@register("constant", description="every job takes the same time", params=ConstantParams)
class Constant(Delay):
    """F^-1(u) = value."""

    p: ConstantParams

    def quantile(self, u: float) -> float:
        """The value."""
        return self.p.value


@dataclass(frozen=True)
class UniformParams(Params):
    """Parameters of a uniform delay."""

    low: float = non_negative(0.5, "shortest duration")
    high: float = positive(1.5, "longest duration")


@register("uniform", description="uniform between two durations", params=UniformParams)
class UniformDelay(Delay):
    """F^-1(u) = low + u*(high - low)."""

    p: UniformParams

    def __init__(self, params: UniformParams) -> None:
        super().__init__(params)
        if self.p.low > self.p.high:
            raise ParameterError(f"delay uniform: low={self.p.low:g} exceeds high={self.p.high:g}; swap them")

    def quantile(self, u: float) -> float:
        """Linear between low and high."""
        return self.p.low + u * (self.p.high - self.p.low)


@dataclass(frozen=True)
class ExponentialParams(Params):
    """Parameters of an exponential delay."""

    mean: float = positive(1.0, "mean duration")


@register("exponential", description="exponential with a given mean", params=ExponentialParams)
class Exponential(Delay):
    """F^-1(u) = -mean*ln(1-u)."""

    p: ExponentialParams

    def quantile(self, u: float) -> float:
        """The quantile of the exponential distribution."""
        return -self.p.mean * math.log1p(-u)


@dataclass(frozen=True)
class LognormalParams(Params):
    """Parameters of a lognormal delay."""

    mean: float = positive(1.0, "mean duration")
    sigma: float = positive(0.5, "standard deviation of the logarithm")


@register("lognormal", description="lognormal with a given mean", params=LognormalParams)
class Lognormal(Delay):
    """F^-1(u) = mean*exp(sigma*Phi^-1(u) - sigma^2/2)."""

    p: LognormalParams

    def quantile(self, u: float) -> float:
        """The quantile of the lognormal distribution."""
        return self.p.mean * math.exp(self.p.sigma * _NORMAL.inv_cdf(u) - self.p.sigma**2 / 2)


_NORMAL = NormalDist()


@dataclass(frozen=True)
class ParetoParams(Params):
    """Parameters of a Pareto delay."""

    scale: float = positive(1.0, "shortest duration")
    shape: float = positive(2.0, "tail index: the smaller, the heavier; at 1 and below the mean is infinite")


@register("pareto", description="Pareto: a heavy tail of stragglers", params=ParetoParams)
class Pareto(Delay):
    """F^-1(u) = scale*(1-u)^(-1/shape)."""

    p: ParetoParams

    def quantile(self, u: float) -> float:
        """The quantile of the Pareto distribution."""
        return float(self.p.scale * (1.0 - u) ** (-1.0 / self.p.shape))


@dataclass(frozen=True)
class MixtureParams(Params):
    """Parameters of a fast/slow mixture."""

    fast: float = positive(1.0, "mean duration of a fast job")
    slow: float = positive(8.0, "mean duration of a slow job")
    slow_share: float = unit(0.5, "part of the jobs that is slow", zero=True, one=True)


@register("mixture", description="exponential, fast or slow by chance, job by job", params=MixtureParams)
class Mixture(Delay):
    """u < 1 - slow_share: F^-1 of the fast exponential; above: F^-1 of the slow one, u scaled to (0, 1) in both."""

    p: MixtureParams

    def quantile(self, u: float) -> float:
        """A job is slow if u falls into the last slow_share."""
        split = 1.0 - self.p.slow_share
        if u < split:
            return -self.p.fast * math.log1p(-u / split)
        return -self.p.slow * math.log1p(-(u - split) / self.p.slow_share)
