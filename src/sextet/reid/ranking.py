"""Ranks of a query's matches without sorting its gallery: a rank is the number of distances below the match's own.

Only the gallery images at least as near as a query's last match are looked at, and of the others only that they are
finite. All retrieval scores follow from the ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from sextet.core.errors import DataError, UsageError, unknown
from sextet.core.stats import Interval, bootstrap_interval

SameCamera = Literal["exclude", "keep"]
AP = Literal["standard", "trapezoid", "sklearn"]
Ties = Literal["stable", "worst", "mean"]
JUNK = -1  # the id of boxes that show no whole person; 0, Market's distractors, needs no rule: no query has it
KEEP = 'same_camera="keep" (--evaluation.same-camera keep)'
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Labels:
    """Person `ids` (-1 = junk) and 0-based `cameras` (-1 = unknown) of N images."""

    ids: Ints
    cameras: Ints

    def __post_init__(self) -> None:
        for name in ("ids", "cameras"):
            values = np.asarray(getattr(self, name))
            if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
                raise UsageError(f"{name} must be a flat list of integers, not {values.dtype} of shape {values.shape}")
            object.__setattr__(self, name, values.astype(np.int64))
        if len(self.ids) != len(self.cameras):
            raise UsageError(f"{len(self.ids)} ids but {len(self.cameras)} cameras; every image needs one of each")

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How a ranking is scored.

    Attributes:
        same_camera: "exclude" leaves out gallery images of the query's person by the query's camera (Zheng et al.
            2015); "keep" ranks them too, the only way where cameras are unknown or there is but one.
        ap: "standard", the mean precision at the matches; "trapezoid", as in the first Market-1501 code, the mean of
            the precision at and just before each match; "sklearn", which takes equal distances as one step.
        ties: the order of equal distances: "stable" by place in the gallery, "worst" with matches last, "mean" the
            expectation over all orders.
        max_rank: length of the CMC curve; it may exceed the gallery.
    """

    same_camera: SameCamera = "exclude"
    ap: AP = "standard"
    ties: Ties = "stable"
    max_rank: int = 50

    def __post_init__(self) -> None:
        for name, allowed in (("same_camera", SameCamera), ("ap", AP), ("ties", Ties)):
            if getattr(self, name) not in get_args(allowed):
                raise UsageError(unknown(name, str(getattr(self, name)), get_args(allowed)))
        if self.max_rank < 1:
            raise UsageError(f"max_rank is {self.max_rank}; a CMC curve has at least rank 1")


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Retrieval scores of Q queries, of which those without any match are invalid and count nowhere.

    Attributes:
        cmc: (max_rank,) share of valid queries with a match within the first k.
        ap: (Q,) average precision, NaN where invalid.
        inp: (Q,) number of matches over the rank of the last (Ye et al. 2021), NaN where invalid.
        first_match: (Q,) rank of the first match from 1, 0 where invalid; with ties "mean" the expected rank.
        top1: (Q,) 1 where the nearest image matches, with ties "mean" the chance of it; NaN where invalid.
        notes: warnings for people.
    """

    cmc: Floats
    ap: Floats
    inp: Floats
    first_match: NDArray[Any]
    top1: Floats
    notes: tuple[str, ...] = ()

    @property
    def num_valid(self) -> int:
        """Number of queries with a match."""
        return int((self.first_match > 0).sum())

    @property
    def num_invalid(self) -> int:
        """Number of queries without a match."""
        return len(self.ap) - self.num_valid

    @property
    def mean_ap(self) -> float:
        """Mean average precision."""
        return float(np.nansum(self.ap) / max(1, self.num_valid))

    @property
    def mean_ap_of_all(self) -> float:
        """Mean average precision where invalid queries count as 0, as in some older code."""
        return float(np.nansum(self.ap) / len(self.ap))

    @property
    def minp(self) -> float:
        """Mean inverse negative penalty."""
        return float(np.nansum(self.inp) / max(1, self.num_valid))

    @property
    def rank1(self) -> float:
        """Share of queries whose nearest image matches."""
        return float(self.cmc[0])

    def intervals(self, *, confidence: float = 0.95, seed: int = 0) -> dict[str, Interval]:
        """Returns bootstrap intervals over queries of "mean_ap" and "rank1"."""
        values = {"mean_ap": self.ap, "rank1": self.top1}
        return {
            name: bootstrap_interval(value[self.first_match > 0], confidence=confidence, seed=seed)
            for name, value in values.items()
        }


class Ranking:
    """Collects the ranks of all matches from blocks of distances."""

    def __init__(self, query: Labels, gallery: Labels, protocol: Protocol) -> None:
        if protocol.same_camera == "exclude":
            for name, labels in (("query", query), ("gallery", gallery)):
                if missing := int((labels.cameras < 0).sum()):
                    raise UsageError(
                        f"the camera of {missing} of {len(labels)} {name} images is unknown, so images by the query's "
                        f"own camera cannot be left out; give every image its camera, or rank them all: {KEEP}"
                    )
        self.query, self.gallery, self.protocol = query, gallery, protocol
        self.junk = np.flatnonzero(gallery.ids == JUNK)
        by_id = np.argsort(gallery.ids, kind="stable")
        self.by_id = by_id[gallery.ids[by_id] != JUNK]
        ids = gallery.ids[self.by_id]
        self._low, self._high = ids.searchsorted(query.ids), ids.searchsorted(query.ids, "right")
        self._ranks = [np.empty(0, np.int64)] * len(query)
        self._precision: dict[int, float] = {}  # of queries whose ties decide it
        self._expected: dict[int, tuple[float, float, Floats]] = {}
        self._flat = True
        self._mask = np.empty(len(gallery), bool)

    def own(self, query: int) -> tuple[Ints, Ints]:
        """Returns the gallery images of a query's person: those that are its matches, and those left out."""
        images = self.by_id[self._low[query] : self._high[query]]
        if self.protocol.same_camera == "keep":
            return images, images[:0]
        same = self.gallery.cameras[images] == self.query.cameras[query]
        return images[~same], images[same]

    def add(self, start: int, block: NDArray[Any]) -> None:
        """Takes the (n, G) distances of the queries from `start` on; DataError names the first that is not finite."""
        with np.errstate(over="ignore", invalid="ignore"):
            for query, row in enumerate(block, start):
                if not math.isfinite(row.sum()) and not (finite := np.isfinite(row)).all():
                    raise DataError(f"distance of query {query} to gallery image {finite.argmin()} is not finite")
                self._flat = self._flat and bool(np.ptp(row) <= 1e-6 * np.abs(row).max())
                matches, left_out = self.own(query)
                if matches.size:
                    self._ranks[query] = self._rank(query, row, matches, left_out)

    def _rank(self, query: int, row: NDArray[Any], matches: Ints, left_out: Ints) -> Ints:
        near = np.sort(row[matches])
        mask = np.less_equal(row, near[-1], out=self._mask)
        mask[left_out] = False
        mask[self.junk] = False
        candidates = mask.nonzero()[0]
        found = row[candidates]
        ordered = np.sort(found)
        less, upto = ordered.searchsorted(near), ordered.searchsorted(near, "right")
        if (upto - less).max() == 1:
            return less + 1
        own_less, own_upto = near.searchsorted(near), near.searchsorted(near, "right")
        if self.protocol.ties == "mean":
            ties = less, upto, own_less, own_upto
            self._precision[query], *self._expected[query] = expectation(*ties, self.protocol)  # type: ignore[assignment]
        if self.protocol.ap == "sklearn":
            self._precision[query] = float(np.mean(own_upto / upto))
        if self.protocol.ties == "stable":
            by_distance = candidates[np.argsort(found, kind="stable")]
            return 1 + np.flatnonzero(self.gallery.ids[by_distance] == self.query.ids[query])
        return upto - own_upto + np.arange(1, len(near) + 1)

    def scores(self) -> Scores:
        """Returns the scores of the queries; all are NaN and the curve is 0 if no query has a match."""
        size = np.array([len(ranks) for ranks in self._ranks])
        valid = np.flatnonzero(size)
        ap, inp, top1 = np.full((3, len(size)), np.nan)
        first = np.zeros(len(size), np.float64 if self.protocol.ties == "mean" else np.int64)
        cmc = np.zeros(self.protocol.max_rank)
        if valid.size:
            size, ranks = size[valid], np.concatenate(self._ranks)
            ends = size.cumsum()
            starts = ends - size
            place = np.arange(len(ranks)) - np.repeat(starts, size) + 1
            precision = place / ranks
            if self.protocol.ap == "trapezoid":
                before = np.where(ranks > 1, (place - 1) / np.maximum(ranks - 1, 1), 1)
                precision = (precision + before) / 2
            ap[valid] = np.add.reduceat(precision, starts) / size
            inp[valid] = size / ranks[ends - 1]
            first[valid] = ranks[starts]
            top1[valid] = ranks[starts] == 1
            for query, value in self._precision.items():
                ap[query] = value
            certain = np.setdiff1d(valid, list(self._expected))
            seen = np.minimum(first[certain].astype(np.int64), len(cmc) + 1)
            cmc += np.bincount(seen, minlength=len(cmc) + 2)[1:-1].cumsum()
            for query, (last, middle, curve) in self._expected.items():
                inp[query], first[query], top1[query] = last, middle, curve[0]
                cmc += curve
            cmc /= len(valid)
        notes = ("collapsed embedding: all distances are equal, so the ranking says nothing",) if self._flat else ()
        return Scores(cmc=cmc, ap=ap, inp=inp, first_match=first, top1=top1, notes=notes)

    def require_matches(self) -> None:
        """Raises UsageError if no query has a match, saying why and what to choose."""
        if any(len(ranks) for ranks in self._ranks):
            return
        alone = int((self._high > self._low).sum())
        raise UsageError(
            f"all {len(self.query)} queries are invalid: {alone} meet their person in the gallery by their own camera "
            f"only, which the protocol leaves out, and {len(self.query) - alone} do not meet it at all; "
            + (f"to rank images of the same camera too, choose {KEEP}" if alone else "do the person ids fit together?")
        )


def expectation(
    less: Ints, upto: Ints, own_less: Ints, own_upto: Ints, protocol: Protocol
) -> tuple[float, float, float, Floats]:
    """Returns AP, INP, rank of the first match and CMC in expectation over all orders of equal distances.

    Each argument has one number for each of a query's matches by distance: images nearer than it and as near at most,
    and the same of matches. For the AP see McSherry and Najork 2008; the others follow from drawing without return.
    """
    groups = [(less[at], upto[at] - less[at], at, own_upto[at] - at) for at in np.unique(own_less)]
    precision = 0.0
    for nearer, tied, hits_nearer, hits in groups:
        rank = nearer + np.arange(1, tied + 1)
        earlier = hits_nearer + np.arange(tied) * ((hits - 1) / max(tied - 1, 1))  # matches before a match at this rank
        at_match = (earlier + 1) / rank
        if protocol.ap == "trapezoid":
            at_match = (at_match + np.where(rank > 1, earlier / np.maximum(rank - 1, 1), 1)) / 2
        precision += float(hits / tied * at_match.sum())

    def without(tied: int, hits: int) -> Floats:
        """Chance of no match among the first 0, 1, ... of a group."""
        return np.append(1.0, np.cumprod(np.maximum(1 - hits / np.arange(tied, 0, -1), 0)))

    nearer, tied, _, hits = groups[-1]
    inverse_last = (-np.diff(without(tied, hits)) / np.arange(nearer + tied, nearer, -1)).sum()
    nearer, tied, _, hits = groups[0]
    cmc = np.ones(protocol.max_rank)
    cmc[:nearer] = 0
    curve = cmc[nearer : nearer + tied]
    curve[:] = 1 - without(tied, hits)[1 : len(curve) + 1]
    return precision / len(less), float(len(less) * inverse_last), float(nearer + (tied + 1) / (hits + 1)), cmc
