"""Intervals and tests for small samples, a thin layer over scipy.

Runs are compared over a few seeds, so every number shown to a user carries the interval it was estimated with.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sextet.core.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = Sequence[float] | NDArray[Any]

RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate over `n` values with its bounds; both bounds are None for n = 1, where no spread is known."""

    mean: float
    low: float | None
    high: float | None
    n: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{format_number(self.mean)} (n={self.n})"
        digits = max(_decimals(self.low), _decimals(self.high)) if self.low != self.high else None
        mean, low, high = (format_number(value, digits) for value in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]"

    def as_dict(self) -> dict[str, Any]:
        """JSON form, also the form of an interval cell in a report table."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "n": self.n}


def _decimals(value: float) -> int:
    """Decimals that show about three significant digits of `value`."""
    return max(0, 2 - math.floor(math.log10(abs(value)))) if value and math.isfinite(value) else 0


def format_number(value: float, decimals: int | None = None) -> str:
    """Short text of a number: three significant digits, thousands kept whole, exponents only where unavoidable."""
    if not math.isfinite(value):
        return str(float(value))
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3g}"
    if float(value).is_integer() and decimals is None:
        return f"{value:,.0f}"
    return f"{value:,.{min(_decimals(value) if decimals is None else decimals, 6)}f}"


def _checked(values: Values, name: str = "values") -> NDArray[np.float64]:
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size:
        raise UsageError(f"{name} has shape {array.shape}; statistics need a flat list with at least one number")
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        raise UsageError(f"{name}[{bad[0]}] is {array[bad[0]]}; statistics need finite numbers")
    return array


def interquartile_mean(values: Values) -> float:
    """Mean of the middle half of flat `values` (a quarter is cut off at each end)."""
    from scipy.stats import trim_mean

    return float(trim_mean(_checked(values), 0.25))


def bootstrap_interval(
    values: Values,
    *,
    confidence: float = 0.95,
    seed: int = 0,
    statistic: Literal["mean", "iqm"] = "mean",
) -> Interval:
    """Bootstrap interval of the mean or interquartile mean of flat `values`; the same seed gives the same bounds.

    BCa bounds (Efron 1987), percentile bounds where BCa is undefined. One value gives bounds of None and values
    without spread give bounds equal to the mean. With few values the interval is too narrow, as every bootstrap is:
    nominal 95 % covered the true mean of normal samples in COVERAGE.
    Raises UsageError for an empty or non-finite input and an unknown statistic.
    """
    import numpy as np
    from scipy.stats import DegenerateDataWarning, bootstrap, trim_mean

    functions: dict[str, Callable[..., Any]] = {
        "mean": np.mean,
        "iqm": lambda sample, axis=-1: trim_mean(sample, 0.25, axis=axis),
    }
    if statistic not in functions or not 0 < confidence < 1:
        raise UsageError(f"bootstrap_interval takes statistic mean or iqm and 0 < confidence < 1, not {statistic!r}, {confidence}")
    array, function = _checked(values), functions[statistic]
    centre = float(function(array))
    if array.size == 1:
        return Interval(mean=centre, low=None, high=None, n=1)
    if np.ptp(array) == 0:
        return Interval(mean=centre, low=centre, high=centre, n=array.size)
    low = high = math.nan
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", DegenerateDataWarning)
            found = bootstrap(
                (array,),
                function,
                n_resamples=RESAMPLES,
                confidence_level=confidence,
                method=method,
                vectorized=True,
                rng=np.random.default_rng(seed),
            ).confidence_interval
        low, high = float(found.low), float(found.high)
        if math.isfinite(low) and math.isfinite(high):
            break
    return Interval(mean=centre, low=low, high=high, n=array.size)


def paired_difference(a: Values, b: Values, *, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Bootstrap interval of the mean of b - a, where a[i] and b[i] share a seed (or a partner, or a layout).

    Raises UsageError when the lengths differ.
    """
    first, second = _checked(a, "a"), _checked(b, "b")
    if first.size != second.size:
        raise UsageError(f"paired values need equal lengths, got {first.size} and {second.size}")
    return bootstrap_interval(second - first, confidence=confidence, seed=seed)


def welch_test(a: Values, b: Values) -> float:
    """Two-sided p of Welch's t-test for equal means of flat `a` and `b` (unequal variances, unpaired).

    Raises UsageError for fewer than two values on a side. Two sides without any spread give 1 if equal, else 0.
    """
    import numpy as np
    from scipy.stats import ttest_ind

    first, second = _checked(a, "a"), _checked(b, "b")
    if min(first.size, second.size) < 2:
        raise UsageError(f"Welch's test needs two values on each side, got {first.size} and {second.size}")
    if np.ptp(first) == 0 and np.ptp(second) == 0:
        return float(first[0] == second[0])
    return float(ttest_ind(first, second, equal_var=False).pvalue)
