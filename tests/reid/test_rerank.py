"""Re-ranking against its golden table, against a dense version of its seven steps, and on input at the edges."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from sextet.core.errors import DataError, UsageError
from sextet.reid.metrics import Labels, evaluate_distances
from sextet.reid.rerank import rerank, rerank_blocks, rerank_distances

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "reid_rerank.json").read_text())


def golden_case():
    rng = np.random.RandomState(5)  # noqa: NPY002 - the table was made with it
    centres, ids = rng.randn(40, 64), np.repeat(np.arange(40), 8)
    features = centres[ids] + 1.6 * rng.randn(320, 64)
    features = (features / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float32)
    query, cameras = np.arange(320) % 8 == 0, np.tile(np.arange(8) % 4, 40)
    sides = [Labels(ids=ids[side], cameras=cameras[side]) for side in (query, ~query)]
    return features[query], features[~query], *sides


def euclidean(left, right):
    difference = left[:, None].astype(np.float64) - right
    return np.sqrt((difference**2).sum(axis=2)).astype(np.float32)


def matrices(query, gallery):
    return euclidean(query, gallery), euclidean(query, query), euclidean(gallery, gallery)


@pytest.mark.parametrize("row", GOLDEN["rows"], ids=lambda row: f"{row['k1']}-{row['k2']}-{row['weight']}")
@pytest.mark.parametrize("form", ["features", "distances"])
def test_golden_table(row: dict, form: str) -> None:
    query, gallery, query_labels, gallery_labels = golden_case()
    numbers = {name: row[name] for name in ("k1", "k2", "weight")}
    distances = euclidean(query, gallery)
    assert distances.sum(dtype=np.float64) == pytest.approx(GOLDEN["sum"], rel=1e-7)
    plain = evaluate_distances(distances, query_labels, gallery_labels)
    for name, value in GOLDEN["plain"].items():
        assert getattr(plain, name) == pytest.approx(value, abs=1e-6)
    if form == "features":
        found = rerank(query, gallery, **numbers)
    else:
        found = rerank_distances(*matrices(query, gallery), **numbers)
    assert found.dtype == np.float32
    assert found.sum(dtype=np.float64) == pytest.approx(row["sum"], rel=1e-5)
    np.testing.assert_allclose(found[0, :4], row["first"], atol=2e-6)
    scores = evaluate_distances(found, query_labels, gallery_labels)
    for name in ("mean_ap", "minp", "rank1"):
        assert getattr(scores, name) == pytest.approx(row[name], abs=1e-5)


def dense(features, num_query, k1, k2, weight):
    """The steps of the paper one image after the other, on full matrices."""
    squares = ((features[:, None] - features) ** 2).sum(axis=2)
    squares /= squares.max(axis=1, keepdims=True)
    order = np.argsort(squares, axis=1, kind="stable")

    def mutual(image, count):
        return {j for j in order[image, :count] if image in order[j, :count]}

    weights = np.zeros_like(squares)
    for image in range(len(features)):
        members = mutual(image, k1 + 1)
        expanded = set(members)
        for member in members:
            half = mutual(member, round(k1 / 2) + 1)
            if len(half & members) > 2 / 3 * len(half):
                expanded |= half
        at = sorted(expanded)
        weights[image, at] = np.exp(-squares[image, at]) / np.exp(-squares[image, at]).sum()
    if k2 > 1:
        weights = np.array([weights[order[image, :k2]].mean(axis=0) for image in range(len(features))])
    common = np.minimum(weights[:num_query, None], weights[None, num_query:]).sum(axis=2)
    return (1 - weight) * (1 - common / (2 - common)) + weight * squares[:num_query, num_query:]


@pytest.mark.parametrize("seed", range(6))
def test_equals_the_steps_on_full_matrices_whatever_the_memory(seed: int) -> None:
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((15, 16))
    features = centres[rng.integers(0, 15, 110)] + rng.standard_normal((110, 16))
    k1, k2 = int(rng.integers(1, 26)), int(rng.integers(1, 9))
    expected = dense(features, 30, k1, k2, 0.3)
    for max_bytes in (1, 20_000, 1 << 29):
        found = rerank(features[:30], features[30:], k1=k1, k2=k2, max_bytes=max_bytes)
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_blocks_score_as_the_whole_does() -> None:
    query, gallery, query_labels, gallery_labels = golden_case()
    whole = evaluate_distances(rerank(query, gallery), query_labels, gallery_labels)
    blocks = rerank_blocks(query, gallery, max_bytes=50_000)
    np.testing.assert_allclose(evaluate_distances(blocks, query_labels, gallery_labels).ap, whole.ap, atol=1e-6)


def test_more_neighbours_than_images_means_all_of_them() -> None:
    features = np.random.default_rng(0).standard_normal((9, 5))
    few = rerank(features[:3], features[3:], k1=8, k2=9)
    np.testing.assert_array_equal(rerank(features[:3], features[3:], k1=100, k2=200), few)
    assert np.isfinite(few).all()


def test_copies_of_one_image_stay_finite() -> None:
    same = np.ones((60, 8), np.float32)
    assert np.isfinite(rerank(same[:10], same[10:])).all()


def test_wrong_input_is_named() -> None:
    features = np.random.default_rng(0).standard_normal((20, 5))
    for numbers in ({"k1": 0}, {"k2": 0}, {"weight": 1.5}):
        with pytest.raises(UsageError, match="k1 >= 1, k2 >= 1 and a weight in"):
            rerank(features[:5], features[5:], **numbers)
    with pytest.raises(UsageError, match="0 queries"):
        rerank(features[:0], features)
    distances = matrices(features[:5], features[5:])
    with pytest.raises(UsageError, match="do not fit"):
        rerank_distances(distances[0], distances[2], distances[1])
    distances[0][2, 4] = math.nan
    with pytest.raises(DataError, match="image 2"):
        rerank_distances(*distances)
    features[7, 1] = math.inf
    with pytest.raises(DataError, match="gallery features .*row 2"):
        rerank(features[:5], features[5:])
