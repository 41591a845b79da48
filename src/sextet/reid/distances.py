"""Distances of features in blocks, and what is done to features before: pooling of several queries, query expansion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from sextet.core.errors import DataError, UsageError, unknown
from sextet.reid.ranking import Labels

Metric = Literal["cosine", "euclidean"]
Blocks = Iterable[tuple[int, NDArray[Any]]]
"""Pairs of a query number and the (n, G) distances of that query and the n - 1 after it, all queries in order."""
BLOCK = 1 << 26  # numbers in a block of distances, 256 MB
ROWS = 8192  # features that are read at once


def feature_blocks(
    query: NDArray[Any], gallery: NDArray[Any], *, metric: Metric = "cosine", chunk: int | None = None
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yields distances of features (Q, D) and (G, D), `chunk` queries at a time: 1 - cosine, or squared Euclidean.

    Features may be memory-mapped and of any floating type. If all point the same way ("cosine") or are equal
    ("euclidean"), all distances are exactly 0, so that rounding breaks no ties.

    Raises DataError for a feature that is not finite, naming the first row, and UsageError for other shapes.
    """
    if metric not in get_args(Metric):
        raise UsageError(unknown("metric", metric, get_args(Metric)))
    lengths = squared_lengths(query, "query"), squared_lengths(gallery, "gallery")
    if query.shape[1] != gallery.shape[1]:
        raise UsageError(f"query features have {query.shape[1]} numbers, gallery features {gallery.shape[1]}")
    # a feature of length 0 has no direction: distance 1 from everything
    scales = [1 / np.sqrt(np.where(s > 0, s, np.inf)) if metric == "cosine" else np.ones_like(s) for s in lengths]
    same = len(query) > 0 and all(
        _all_equal(features, scale, query[0] * scales[0][0])
        for features, scale in zip((query, gallery), scales, strict=True)
    )
    step = chunk or max(1, BLOCK // max(1, len(gallery)))
    for start in range(0, len(query), step):
        rows = slice(start, start + step)
        left = np.asarray(query[rows], dtype=np.float32) * scales[0][rows, None]
        left *= -1 if metric == "cosine" else -2
        block = np.zeros((len(left), len(gallery)), np.float32)
        for place in range(0, 0 if same else len(gallery), ROWS):
            columns = slice(place, place + ROWS)
            part = np.matmul(left, np.asarray(gallery[columns], dtype=np.float32).T, out=block[:, columns])
            if metric == "cosine":
                part *= scales[1][columns]
                part += 1
            else:
                part += lengths[1][columns]
                part += lengths[0][rows, None]
        yield start, block


def squared_lengths(features: NDArray[Any], name: str) -> NDArray[np.float32]:
    """Returns the (N,) squared lengths of (N, D) features; DataError names the first row that is not finite."""
    if features.ndim != 2 or not features.shape[1]:
        raise UsageError(f"{name} features have shape {features.shape}; need (images, numbers)")
    found = np.empty(len(features), np.float32)
    for place in range(0, len(features), ROWS):
        part = np.asarray(features[place : place + ROWS], dtype=np.float32)
        np.einsum("ij,ij->i", part, part, out=found[place : place + ROWS])
    bad = np.flatnonzero(~np.isfinite(found))
    if bad.size:
        raise DataError(
            f"{name} features are not finite, or too large for float32, in {bad.size} of {len(found)} rows; "
            f"the first is row {bad[0]}. A network that diverged in training makes such features"
        )
    return found


def _all_equal(features: NDArray[Any], scale: NDArray[Any], wanted: NDArray[Any]) -> bool:
    """Whether each scaled row is the wanted one, up to rounding; stops at the first block of rows that is not."""
    tolerance = 1e-6 * np.abs(wanted).max()
    return all(
        np.abs(features[place : place + ROWS] * scale[place : place + ROWS, None] - wanted).max() <= tolerance
        for place in range(0, len(features), ROWS)
    )


def pool_queries(
    query: NDArray[Any],
    query_labels: Labels,
    extra: NDArray[Any],
    extra_labels: Labels,
    *,
    how: Literal["mean", "max"] = "mean",
) -> NDArray[np.float32]:
    """Returns (Q, D) features for the multi-query protocol (Zheng et al. 2015).

    Each is pooled over the `extra` features (M, D) of the query's person and camera; a query without any keeps its
    own.
    """
    if how not in ("mean", "max"):
        raise UsageError(unknown("pooling", how, ("mean", "max")))
    pooled = np.array(query, dtype=np.float32)
    members: dict[tuple[int, int], list[int]] = {}
    for place, key in enumerate(zip(extra_labels.ids.tolist(), extra_labels.cameras.tolist(), strict=True)):
        members.setdefault(key, []).append(place)
    for place, key in enumerate(zip(query_labels.ids.tolist(), query_labels.cameras.tolist(), strict=True)):
        if key in members:
            pooled[place] = getattr(np.asarray(extra[members[key]], dtype=np.float32), how)(axis=0)
    return pooled


def expand_queries(
    query: NDArray[Any], gallery: NDArray[Any], *, k: int = 10, alpha: float = 3.0, times: int = 1
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns query and gallery features after query expansion (Chum et al. 2007; weights of Radenovic et al. 2018).

    Each of the (Q, D) and (G, D) features becomes the mean of its k nearest among all, itself included, weighted with
    cosine similarity to the power of alpha, negative ones with 0. Results are L2-normalised.
    """
    if k < 1 or alpha < 0 or times < 0:
        raise UsageError(f"query expansion needs k >= 1, alpha >= 0 and times >= 0, not {k}, {alpha}, {times}")
    squared_lengths(query, "query"), squared_lengths(gallery, "gallery")
    features = _normalised(np.concatenate((query, gallery)).astype(np.float32))
    for _ in range(times):
        expanded = np.empty_like(features)
        for start, block in feature_blocks(features, features):
            near = np.argpartition(block, min(k, len(features)) - 1, axis=1)[:, :k]
            weights = np.maximum(1 - np.take_along_axis(block, near, axis=1), 0) ** alpha
            for row, (members, weight) in enumerate(zip(near, weights, strict=True), start):
                expanded[row] = weight @ features[members]
        features = _normalised(expanded)
    return features[: len(query)], features[len(query) :]


def _normalised(features: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return np.asarray(features / np.where(lengths > 0, lengths, 1), dtype=np.float32)
