"""Intervals and tests for small samples, a thin layer over scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from sextet.core.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = Sequence[float] | NDArray[Any]

RESAMPLES = 4000


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate over `n` values with its bounds, which are None for n = 1: no spread is known."""

    mean: float
    low: float | None
    high: float | None
    n: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{format_number(self.mean)} (n={self.n})"
        if math.isclose(self.low, self.high):
            return "{0} [{0}, {0}]".format(format_number(self.mean))
        width = self.high - self.low  # two digits of it are as much as the bounds can support
        digits = max(0, 1 - math.floor(math.log10(width)))
        if self.mean:  # and four digits of the mean are enough for people
            digits = min(digits, max(0, 3 - math.floor(math.log10(abs(self.mean)))))
        return "{} [{}, {}]".format(*(format_number(value, digits) for value in (self.mean, self.low, self.high)))

    def as_dict(self) -> dict[str, Any]:
        """JSON form, also the form of an interval cell in a report table."""
        return asdict(self)


def format_number(value: float, decimals: int | None = None) -> str:
    """Short text of a number: about three significant digits unless the decimals are given."""
    if not math.isfinite(value):
        return str(float(value))
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3g}"
    if decimals is None:
        whole = value == 0 or float(value).is_integer()
        decimals = 0 if whole else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def _checked(values: Values, name: str = "values") -> NDArray[np.float64]:
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size:
        raise UsageError(f"{name} has shape {array.shape}; need a flat list of at least one number")
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        raise UsageError(f"{name}[{bad[0]}] is {array[bad[0]]}; statistics need finite numbers")
    return array


def interquartile_mean(values: Values) -> float:
    """Mean of the middle half of flat `values`; a quarter is cut off at each end."""
    from scipy.stats import trim_mean

    return float(trim_mean(_checked(values), 0.25))


def bootstrap_interval(
    values: Values, *, confidence: float = 0.95, seed: int = 0, statistic: Literal["mean", "iqm"] = "mean"
) -> Interval:
    """Bootstrap interval of the mean or interquartile mean of flat `values`; equal seeds give equal bounds.

    Percentile bounds at a level widened for the sample size ("expanded percentile", Hesterberg 2015, The
    American Statistician 69(4)), as plain ones are too narrow for the few seeds runs usually have. Measured
    share of 1,500 normal samples whose nominal 95 % interval holds the true mean, widened (plain): n=3 75 %
    (75 %), n=4 88 % (81 %), n=5 92 % (86 %), n=10 94 % (91 %), n=20 96 % (94 %). One value: bounds of None.
    Raises UsageError for empty or non-finite values, an unknown statistic and a level outside (0, 1).
    """
    import numpy as np
    from scipy.stats import bootstrap, norm, t, trim_mean

    if statistic not in ("mean", "iqm") or not 0 < confidence < 1:
        raise UsageError(f"need statistic mean or iqm and confidence in (0, 1), not {statistic!r}, {confidence}")

    def estimate(sample: NDArray[np.float64], axis: int = -1) -> Any:
        return trim_mean(sample, 0.25 if statistic == "iqm" else 0.0, axis=axis)

    array = _checked(values)
    n, centre = int(array.size), float(estimate(array))
    if n == 1 or np.ptp(array) == 0:
        bound = None if n == 1 else centre
        return Interval(mean=centre, low=bound, high=bound, n=n)
    quantile = math.sqrt(n / (n - 1)) * float(t.ppf((1 + confidence) / 2, n - 1))
    level, rng = 1 - 2 * float(norm.sf(quantile)), np.random.default_rng(seed)
    batch = max(1, 2**24 // n)  # resamples at a time: 128 MB
    options: dict[str, Any] = {"confidence_level": level, "method": "percentile", "rng": rng, "batch": batch}
    low, high = bootstrap((array,), estimate, n_resamples=RESAMPLES, **options).confidence_interval
    return Interval(mean=centre, low=float(low), high=float(high), n=n)


def paired_difference(a: Values, b: Values, *, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Bootstrap interval of the mean of b - a, where a[i] and b[i] share a seed, so equal lengths."""
    first, second = _checked(a, "a"), _checked(b, "b")
    if first.size != second.size:
        raise UsageError(f"paired values need equal lengths, got {first.size} and {second.size}")
    return bootstrap_interval(second - first, confidence=confidence, seed=seed)


def difference_interval(a: Values, b: Values, *, confidence: float = 0.95) -> Interval:
    """Welch's interval of mean(b) - mean(a), unpaired; UsageError for fewer than two values on a side."""
    from scipy.stats import ttest_ind

    first, second = _checked(a, "a"), _checked(b, "b")
    if min(first.size, second.size) < 2:
        raise UsageError(f"a difference needs two values on each side, got {first.size} and {second.size}")
    gain = float(second.mean() - first.mean())
    if first.std() == second.std() == 0:
        return Interval(mean=gain, low=gain, high=gain, n=int(min(first.size, second.size)))
    low, high = ttest_ind(second, first, equal_var=False).confidence_interval(confidence)
    return Interval(mean=gain, low=float(low), high=float(high), n=int(min(first.size, second.size)))


def welch_test(a: Values, b: Values) -> float:
    """Two-sided p of Welch's t-test for equal means of flat `a` and `b` (unequal variances, unpaired).

    Two sides without any spread give 1 if equal, else 0. UsageError for fewer than two values on a side.
    """
    import numpy as np
    from scipy.stats import ttest_ind

    first, second = _checked(a, "a"), _checked(b, "b")
    if min(first.size, second.size) < 2:
        raise UsageError(f"Welch's test needs two values on each side, got {first.size} and {second.size}")
    if np.ptp(first) == 0 and np.ptp(second) == 0:
        return float(first[0] == second[0])
    return float(ttest_ind(first, second, equal_var=False).pvalue)
