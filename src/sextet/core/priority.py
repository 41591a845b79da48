"""Rank-prioritised sampling: the harder an entry, the higher its rank and its probability."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sextet.core.errors import UsageError


def rank_probabilities(scores: Sequence[float] | np.ndarray, beta: float, *, eps: float = 1e-6) -> np.ndarray:
    """Returns sampling probabilities from mean returns: ``p_k`` proportional to ``rank(1 / (score_k + eps)) ** beta``.

    The highest score gets rank 1 and ties share a dense rank, so returns [100, 50, 0, 50] have ranks [1, 2, 3, 2].
    ``beta = 0`` is uniform; a large beta samples only the hardest entry (MEP, prioritised sampling).

    Args:
        scores: (N,) mean returns, at least 0.
        beta: Sharpness, at least 0.
        eps: Added to each score before it is inverted.

    Returns:
        (N,) probabilities that sum to 1.

    Raises:
        UsageError: ``beta`` is negative, or scores are empty, not finite or negative.
    """
    from scipy.stats import rankdata

    values = np.asarray(scores, dtype=np.float64)
    if beta < 0:
        raise UsageError(f"beta = {beta} is not allowed; it must be 0 or more")
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all() or (values < 0).any():
        raise UsageError("scores must be a non-empty list of finite numbers, 0 or more")
    ranks = rankdata(1.0 / (values + eps), method="dense").astype(np.float64)
    weights = (ranks / ranks.sum()) ** beta
    return np.asarray(weights / weights.sum())
