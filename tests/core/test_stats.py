import json
import math
import tracemalloc

import numpy as np
import pytest

from sextet.core.errors import UsageError
from sextet.core.stats import (
    Interval,
    bootstrap_interval,
    difference_interval,
    format_number,
    interquartile_mean,
    paired_difference,
    welch_test,
)


def test_interval_text_shows_what_the_width_supports():
    assert str(Interval(mean=12.3456, low=10.08, high=14.62, n=5)) == "12.3 [10.1, 14.6]"
    assert str(Interval(mean=0.12345, low=0.1212, high=0.1257, n=5)) == "0.1235 [0.1212, 0.1257]"
    assert str(Interval(mean=7.0, low=None, high=None, n=1)) == "7 (n=1)"
    assert str(Interval(mean=-3.0, low=-3.0, high=-3.0, n=4)) == "-3 [-3, -3]"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234567, "1,234,567"),
        (3.14159, "3.14"),
        (0.00123, "0.00123"),
        (1e-9, "1e-09"),
        (math.nan, "nan"),
    ],
)
def test_format_number(value, text):
    assert format_number(value) == text


def test_single_value_has_no_bounds_and_equal_values_have_tight_ones():
    assert bootstrap_interval([5.0]).as_dict() == {"mean": 5.0, "low": None, "high": None, "n": 1}
    assert bootstrap_interval([5.0] * 4).as_dict() == {"mean": 5.0, "low": 5.0, "high": 5.0, "n": 4}
    json.dumps(bootstrap_interval([1.0, 2.0]).as_dict(), allow_nan=False)


def test_bootstrap_is_reproducible_and_contains_the_mean():
    values = np.random.default_rng(0).normal(3.0, 1.0, size=12)
    first, second = bootstrap_interval(values), bootstrap_interval(values)
    assert first == second
    assert first != bootstrap_interval(values, seed=1)
    assert first.low < first.mean < first.high
    narrow = bootstrap_interval(values, confidence=0.5)
    assert first.low < narrow.low < narrow.high < first.high


def test_intervals_of_five_seeds_cover_the_true_mean():
    rng, hits = np.random.default_rng(3), 0
    for trial in range(200):
        interval = bootstrap_interval(rng.normal(size=5), seed=trial)
        hits += interval.low <= 0 <= interval.high
    assert 0.87 <= hits / 200 <= 0.98  # plain percentile bounds reach 0.86 over many trials


def test_interquartile_mean_ignores_outliers():
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 1000.0]
    assert interquartile_mean(values) == 4.5  # mean of 3, 4, 5, 6
    interval = bootstrap_interval(values, statistic="iqm")
    assert interval.mean == 4.5
    assert interval.low < 4.5 < interval.high


def test_paired_difference_sees_what_the_unpaired_spread_hides():
    level = np.arange(8) * 100.0
    a, b = level, level + np.array([1.0, 2, 1, 2, 1, 2, 1, 2])
    difference = paired_difference(a, b)
    assert difference.mean == 1.5
    assert difference.low > 0.9
    assert welch_test(a, b) > 0.9
    with pytest.raises(UsageError, match="equal lengths, got 2 and 3"):
        paired_difference([1.0, 2.0], [1.0, 2.0, 3.0])


def test_welch():
    assert welch_test([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == pytest.approx(1.0)
    # Hand-computed: means 2 and 6, both variances 1, n=3: t = 4 / sqrt(2/3), 4 degrees of freedom.
    assert welch_test([1.0, 2.0, 3.0], [5.0, 6.0, 7.0]) == pytest.approx(0.0080499, abs=1e-6)
    assert welch_test([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert welch_test([1.0, 1.0], [2.0, 2.0]) == 0.0
    with pytest.raises(UsageError, match="two values on each side"):
        welch_test([1.0], [1.0, 2.0])


def test_bad_input_is_named():
    with pytest.raises(UsageError, match="at least one"):
        bootstrap_interval([])
    with pytest.raises(UsageError, match=r"values\[1\] is nan"):
        bootstrap_interval([1.0, math.nan])
    with pytest.raises(UsageError, match=r"shape \(2, 2\)"):
        interquartile_mean(np.zeros((2, 2)))
    with pytest.raises(UsageError, match="mean or iqm"):
        bootstrap_interval([1.0, 2.0], statistic="median")
    with pytest.raises(UsageError, match="confidence"):
        bootstrap_interval([1.0, 2.0], confidence=95)


def test_difference_interval_is_welchs():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 1, 6), rng.normal(3, 2, 9)
    found = difference_interval(a, b)
    se = math.sqrt(a.var(ddof=1) / 6 + b.var(ddof=1) / 9)
    freedom = se**4 / ((a.var(ddof=1) / 6) ** 2 / 5 + (b.var(ddof=1) / 9) ** 2 / 8)
    from scipy.stats import t

    half = t.ppf(0.975, freedom) * se
    assert (found.mean, found.low, found.high) == pytest.approx(
        (b.mean() - a.mean(), b.mean() - a.mean() - half, b.mean() - a.mean() + half)
    )
    assert (welch_test(a, b) < 0.05) == (found.low > 0 or found.high < 0)
    assert difference_interval([1, 1], [4, 4]).low == 3.0
    with pytest.raises(UsageError, match="two values on each side"):
        difference_interval([1], [2, 3])


def test_intervals_of_many_values_take_bounded_memory():
    values = np.random.default_rng(0).random(20_000)
    tracemalloc.start()
    interval = bootstrap_interval(values)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert interval.low < interval.mean < interval.high and peak < 2**29, f"{peak:,} bytes"
