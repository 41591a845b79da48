"""k-reciprocal re-ranking (Zhong et al. 2017), exact, without any matrix of all images by all images.

Images are near if they are among each other's nearest and have such neighbours in common. Distances are computed in
blocks of rows, of which only the nearest neighbours stay; sets of neighbours and their weights are sparse matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from sextet.core.errors import DataError, UsageError
from sextet.reid.distances import squared_lengths

Array = NDArray[Any]
Floats = NDArray[np.float32]
MAX_BYTES = 1 << 29
PAIRS = 1 << 15  # pairs of features that are compared at once


class _Squares(NamedTuple):
    """Squared distances of `size` images: of those from start to stop to all, and of single pairs."""

    size: int
    rows: Callable[[int, int], Floats]
    pairs: Callable[[Array, Array], Floats]


def rerank(
    query: Array, gallery: Array, *, k1: int = 20, k2: int = 6, weight: float = 0.3, max_bytes: int = MAX_BYTES
) -> Floats:
    """Returns re-ranked distances (Q, G) of features (Q, D) and (G, D), which are compared by Euclidean distance.

    Args:
        query: Features to search with.
        gallery: Features to search in.
        k1: Neighbours of which those that are mutual count.
        k2: Neighbours whose sets are averaged.
        weight: Share of the first distance, squared and divided by the query's largest, in the result.
        max_bytes: About the most memory for a block; features, sets (about 2 kB an image) and the result come on top.

    Raises DataError for features that are not finite, naming the first row, and UsageError for numbers out of range.
    """
    result = np.empty((len(query), len(gallery)), np.float32)
    for start, block in rerank_blocks(query, gallery, k1=k1, k2=k2, weight=weight, max_bytes=max_bytes):
        result[start : start + len(block)] = block
    return result


def rerank_blocks(
    query: Array, gallery: Array, *, k1: int = 20, k2: int = 6, weight: float = 0.3, max_bytes: int = MAX_BYTES
) -> Iterator[tuple[int, Floats]]:
    """Yields what `rerank` returns in blocks of queries, which `evaluate_distances` takes."""
    lengths = np.concatenate((squared_lengths(query, "query"), squared_lengths(gallery, "gallery")))
    features = np.concatenate((query, gallery)).astype(np.float32, copy=False)

    def rows(start: int, stop: int) -> Floats:
        block = (features[start:stop] * np.float32(-2)) @ features.T
        block += lengths
        block += lengths[start:stop, None]
        block[np.arange(stop - start), np.arange(start, stop)] = 0
        return np.maximum(block, 0, out=block)

    def pairs(left: Array, right: Array) -> Floats:
        found = np.empty(len(left), np.float32)
        for place in range(0, len(left), PAIRS):
            some = slice(place, place + PAIRS)
            difference = features[left[some]] - features[right[some]]
            np.einsum("ij,ij->i", difference, difference, out=found[some])
        return found

    return _rerank(_Squares(len(features), rows, pairs), len(query), k1, k2, weight, max_bytes)


def rerank_distances(
    query_gallery: Array, query_query: Array, gallery_gallery: Array, *, k1: int = 20, k2: int = 6, weight: float = 0.3
) -> Floats:
    """Returns re-ranked distances (Q, G) from Euclidean ones of shapes (Q, G), (Q, Q) and (G, G), which are copied.

    Raises what `rerank` raises.
    """
    num_query, num_gallery = query_gallery.shape
    if query_query.shape != (num_query,) * 2 or gallery_gallery.shape != (num_gallery,) * 2:
        raise UsageError(
            f"distances of shapes {query_gallery.shape}, {query_query.shape} and {gallery_gallery.shape} do not fit; "
            "need (Q, G), (Q, Q) and (G, G)"
        )
    whole = np.block([[query_query.T, query_gallery], [query_gallery.T, gallery_gallery.T]]).astype(np.float32)
    np.square(whole, out=whole)
    if not np.isfinite(whole).all():
        raise DataError(f"distances of image {np.isfinite(whole).all(axis=1).argmin()}, queries first, are not finite")
    squares = _Squares(len(whole), lambda start, stop: whole[start:stop], lambda left, right: whole[left, right])
    return np.concatenate([block for _, block in _rerank(squares, num_query, k1, k2, weight, MAX_BYTES)])


def _rerank(
    squares: _Squares, num_query: int, k1: int, k2: int, weight: float, max_bytes: int
) -> Iterator[tuple[int, Floats]]:
    if k1 < 1 or k2 < 1 or not 0 <= weight <= 1:
        raise UsageError(f"re-ranking needs k1 >= 1, k2 >= 1 and a weight in [0, 1], not {k1}, {k2} and {weight}")
    if not 0 < num_query < squares.size:
        raise UsageError(f"nothing to re-rank: {num_query} queries, {squares.size - num_query} gallery images")
    nearest, largest = _nearest(squares, max(k1 + 1, k2), max_bytes)
    weights = _weights(squares, nearest, largest, k1)
    if k2 > 1:
        weights = _neighbours(nearest[:, :k2], 1 / min(k2, squares.size)) @ weights
    return _blocks(squares, num_query, weights, largest, weight, max_bytes)


def _nearest(squares: _Squares, count: int, max_bytes: int) -> tuple[NDArray[np.int32], Floats]:
    """Returns the (N, count) nearest images of each, itself among them, and its largest squared distance (N,)."""
    size = squares.size
    count, step = min(count, size), max(1, max_bytes // (4 * size))
    nearest, largest = np.empty((size, count), np.int32), np.empty(size, np.float32)
    strips = max(1, min(64, size // (4 * count)))
    for start in range(0, size, step):
        for image, row in enumerate(squares.rows(start, min(start + step, size)), start):
            largest[image] = row.max()
            # the smallest of several numbers each, so at least `count` numbers are within the limit, and few more
            minima = row[: size // strips * strips].reshape(strips, -1).min(axis=0)
            within = np.flatnonzero(row <= np.partition(minima, count - 1)[count - 1])
            nearest[image] = within[np.argsort(row[within], kind="stable")[:count]]
    return nearest, np.maximum(largest, np.finfo(np.float32).tiny)


def _neighbours(nearest: NDArray[np.int32], value: float) -> Any:
    """Returns the (N, N) sparse matrix that holds the value at the given neighbours of each image."""
    size, count = nearest.shape
    data, starts = np.full(nearest.size, value, np.float32), np.arange(0, nearest.size + 1, count)
    return sparse.csr_array((data, nearest.ravel(), starts), shape=(size, size))


def _weights(squares: _Squares, nearest: NDArray[np.int32], largest: Floats, k1: int) -> Any:
    """Returns the (N, N) sparse weights of each image's expanded set of mutual neighbours; rows sum to 1."""

    def mutual(count: int) -> Any:
        near = _neighbours(nearest[:, :count], 1)
        return near.multiply(near.T.tocsr()).tocsr()

    sets, halves = mutual(k1 + 1), mutual(round(k1 / 2) + 1)
    shared = sets.multiply(sets @ halves.T).tocsr()  # how much of each member's half set is in the set
    shared.data = (3 * shared.data > 2 * np.diff(halves.indptr)[shared.indices]).astype(np.float32)
    shared.eliminate_zeros()
    sets = (sets + shared @ halves).tocsr()
    sets.sort_indices()
    image = np.repeat(np.arange(squares.size), np.diff(sets.indptr))
    sets.data = np.exp(-squares.pairs(image, sets.indices) / largest[image])
    sets.data /= np.bincount(image, sets.data, squares.size).astype(np.float32)[image]
    return sets


def _blocks(
    squares: _Squares, num_query: int, weights: Any, largest: Floats, weight: float, max_bytes: int
) -> Iterator[tuple[int, Floats]]:
    """Yields (1 - weight) times the Jaccard distance plus weight times the first distance."""
    size = squares.size - num_query
    of_query, of_gallery = weights[:num_query].tocsr(), weights[num_query:].tocsc()
    step = max(1, min(64, max_bytes // (32 * size)))
    for start in range(0, num_query, step):
        stop = min(start + step, num_query)
        some = slice(of_query.indptr[start], of_query.indptr[stop])
        columns, values = of_query.indices[some], of_query.data[some]
        row = np.repeat(np.arange(stop - start), np.diff(of_query.indptr[start : stop + 1]))
        first, count = of_gallery.indptr[columns], np.diff(of_gallery.indptr)[columns]
        member = np.repeat(np.arange(len(columns)), count)  # each number of the queries meets its column of the gallery
        place = np.arange(len(member)) - np.repeat(count.cumsum() - count - first, count)
        least = np.minimum(values[member], of_gallery.data[place])
        at = row[member] * size + of_gallery.indices[place]
        common = np.bincount(at, least, (stop - start) * size).reshape(-1, size)
        jaccard = 1 - common / (2 - common)
        before = squares.rows(start, stop)[:, num_query:] / largest[start:stop, None]
        yield start, ((1 - weight) * jaccard + weight * before).astype(np.float32)
