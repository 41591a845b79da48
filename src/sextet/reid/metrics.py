"""Scores of person re-identification from distances or features: the usual ones, and those of special protocols.

Distances may be a (Q, G) matrix or blocks of its rows, so that it need not exist as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sextet.core.errors import UsageError
from sextet.core.seeding import numpy_rng
from sextet.reid.distances import BLOCK, Blocks, Metric, feature_blocks
from sextet.reid.ranking import Labels, Protocol, Ranking, Scores

__all__ = [
    "CameraPair",
    "Labels",
    "Protocol",
    "Scores",
    "camera_pairs",
    "evaluate_distances",
    "evaluate_features",
    "single_gallery_shot",
    "true_positive_rates",
]

DEFAULT = Protocol()
Distances = NDArray[Any] | Blocks
Rates = Sequence[float]


def evaluate_distances(distances: Distances, query: Labels, gallery: Labels, protocol: Protocol = DEFAULT) -> Scores:
    """Returns the scores of the ranking by `distances` (Q, G).

    Raises DataError for a distance that is not finite, naming the first query, and UsageError for shapes that do not
    fit, for unknown cameras with same_camera "exclude", and if no query has a match.
    """
    ranking = Ranking(query, gallery, protocol)
    for start, block in _checked(distances, query, gallery):
        ranking.add(start, block)
    ranking.require_matches()
    return ranking.scores()


def evaluate_features(
    query: NDArray[Any],
    gallery: NDArray[Any],
    query_labels: Labels,
    gallery_labels: Labels,
    protocol: Protocol = DEFAULT,
    *,
    metric: Metric = "cosine",
    chunk: int | None = None,
) -> Scores:
    """Returns the scores of the ranking by distances of features (Q, D) and (G, D), `chunk` queries at a time.

    Features may be memory-mapped. Raises what `evaluate_distances` raises, and DataError for features that are not
    finite, naming the first row.
    """
    blocks = feature_blocks(query, gallery, metric=metric, chunk=chunk)
    return evaluate_distances(blocks, query_labels, gallery_labels, protocol)


def _checked(distances: Distances, query: Labels, gallery: Labels) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yields blocks of whole rows as float32 or float64; UsageError if they do not fit the labels."""
    num_query, num_gallery = len(query), len(gallery)
    if not num_query or not num_gallery:
        raise UsageError(f"nothing to rank: {num_query} queries and {num_gallery} gallery images")
    if isinstance(distances, np.ndarray):
        rows, whole = max(1, BLOCK // num_gallery), distances
        distances = ((start, whole[start : start + rows]) for start in range(0, max(1, len(whole)), rows))
    done = 0
    for start, block in distances:
        done += len(block)
        if block.shape[1:] != (num_gallery,) or not len(block) or start + len(block) != done or done > num_query:
            raise UsageError(f"distances of shape {block.shape} do not fit {num_query} x {num_gallery} labels")
        yield start, np.ascontiguousarray(block, dtype=np.promote_types(block.dtype, np.float32))
    if done != num_query:
        raise UsageError(f"distances of {done} queries do not fit the labels of {num_query}")


@dataclass(frozen=True)
class CameraPair:
    """Scores of the queries of one camera among the gallery images of another; `queries` counts the valid ones."""

    query_camera: int
    gallery_camera: int
    mean_ap: float
    rank1: float
    queries: int


def camera_pairs(
    distances: Distances, query: Labels, gallery: Labels, protocol: Protocol = DEFAULT
) -> list[CameraPair]:
    """Returns scores by query camera and gallery camera, without pairs that have no valid query.

    Raises what `evaluate_distances` raises for distances and cameras.
    """
    columns = {int(camera): np.flatnonzero(gallery.cameras == camera) for camera in np.unique(gallery.cameras)}
    rankings = {
        camera: Ranking(query, Labels(ids=gallery.ids[at], cameras=gallery.cameras[at]), protocol)
        for camera, at in columns.items()
    }
    for start, block in _checked(distances, query, gallery):
        for camera, ranking in rankings.items():
            ranking.add(start, block[:, columns[camera]])
    pairs = []
    for gallery_camera, ranking in rankings.items():
        scores = ranking.scores()
        for query_camera in np.unique(query.cameras[scores.first_match > 0]):
            at = (query.cameras == query_camera) & (scores.first_match > 0)
            means = float(scores.ap[at].mean()), float(scores.top1[at].mean())
            pairs.append(CameraPair(int(query_camera), gallery_camera, *means, int(at.sum())))
    return sorted(pairs, key=lambda pair: (pair.query_camera, pair.gallery_camera))


def true_positive_rates(
    distances: Distances,
    query: Labels,
    gallery: Labels,
    protocol: Protocol = DEFAULT,
    *,
    rates: Rates = (1e-4, 1e-3, 1e-2),
) -> dict[float, float]:
    """Returns the points of the ROC curve at the given false positive rates, over pairs of all queries.

    Each is the share of matching pairs accepted by the largest threshold that accepts at most that share of the
    others. Distances must be comparable between queries. Only the smallest distances of the others are kept.
    """
    if not all(0 <= rate < 1 for rate in rates) or not rates:
        raise UsageError(f"false positive rates must lie in [0, 1), not {tuple(rates)}")
    ranking = Ranking(query, gallery, protocol)
    own = [ranking.own(number) for number in range(len(query))]
    others = len(query) * len(ranking.by_id) - sum(len(matches) + len(left_out) for matches, left_out in own)
    accepted = [math.floor(rate * others + 1e-9) for rate in rates]
    keep, threshold = max(accepted) + 1, math.inf
    same: list[NDArray[Any]] = []
    smallest: list[NDArray[Any]] = []
    for start, block in _checked(distances, query, gallery):
        ranking.add(start, block)
        for row, (matches, left_out) in zip(block, own[start : start + len(block)], strict=True):
            mask = row < threshold
            mask[matches] = mask[left_out] = mask[ranking.junk] = False
            same.append(row[matches])
            smallest.append(row[mask])
            if sum(map(len, smallest)) > 2 * keep + len(gallery):
                smallest = [np.partition(np.concatenate(smallest), keep - 1)[:keep]]
                threshold = float(smallest[0].max())
    ranking.require_matches()
    of_same, of_others = np.concatenate(same), np.sort(np.concatenate(smallest))
    limits = [of_others[count] if count < len(of_others) else math.inf for count in accepted]
    return {rate: float((of_same < limit).mean()) for rate, limit in zip(rates, limits, strict=True)}


def single_gallery_shot(
    distances: Distances,
    query: Labels,
    gallery: Labels,
    protocol: Protocol = DEFAULT,
    *,
    repeats: int = 10,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Returns the (max_rank,) CMC curve of the first CUHK03 protocol (Li et al. 2014).

    Each query meets one random image of every person, `repeats` times; ties follow the protocol. Raises what
    `evaluate_distances` raises.
    """
    ranking = Ranking(query, gallery, protocol)
    ids, first, count = np.unique(gallery.ids[ranking.by_id], return_index=True, return_counts=True)
    places = np.arange(1, protocol.max_rank + 1)
    curves = []
    for start, block in _checked(distances, query, gallery):
        ranking.add(start, block)
        for number, row in enumerate(block, start):
            matches, _ = ranking.own(number)
            if not matches.size:
                continue
            draw = numpy_rng(seed, "evaluate", number).random((repeats, len(ids)))
            shown = ranking.by_id[first + (draw * count).astype(np.int64)]
            person = ids.searchsorted(query.ids[number])
            shown[:, person] = matches[(draw[:, person] * len(matches)).astype(np.int64)]
            found, own = row[shown], row[shown[:, [person]]]
            tied = found == own
            if protocol.ties == "stable":
                tied &= shown < shown[:, [person]]
            nearer, equal = (found < own).sum(axis=1), tied.sum(axis=1)
            if protocol.ties == "stable":
                nearer, equal = nearer + equal, np.ones_like(equal)
            elif protocol.ties == "worst":
                nearer, equal = nearer + equal - 1, np.ones_like(equal)
            curves.append(np.clip((places - nearer[:, None]) / equal[:, None], 0, 1).mean(axis=0))
    ranking.require_matches()
    return np.asarray(np.mean(curves, axis=0))
