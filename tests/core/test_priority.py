import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sextet.core.errors import UsageError
from sextet.core.priority import rank_probabilities


def test_goldens():
    returns = [100, 50, 0, 50]
    np.testing.assert_allclose(rank_probabilities(returns, 3), np.array([1, 8, 27, 8]) / 44)
    np.testing.assert_allclose(rank_probabilities(returns, 1), np.array([1, 2, 3, 2]) / 8)
    np.testing.assert_allclose(rank_probabilities(returns, 0), np.full(4, 0.25))


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=30), st.floats(0, 8))
def test_harder_is_never_less_likely_and_the_sum_is_one(scores, beta):
    p = rank_probabilities(scores, beta)
    assert abs(p.sum() - 1) < 1e-9
    order = np.argsort(scores, kind="stable")
    assert (np.diff(p[order]) <= 1e-12).all()


@pytest.mark.parametrize("scores, beta", [([1.0], -0.1), ([], 1.0), ([float("nan")], 1.0), ([-1.0, 2.0], 1.0)])
def test_wrong_input_is_refused(scores, beta):
    with pytest.raises(UsageError):
        rank_probabilities(scores, beta)
