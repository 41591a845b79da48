"""Scores against their definitions, golden tables, and what happens with input that cannot be scored."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sextet.core.errors import DataError, UsageError
from sextet.reid.distances import expand_queries, feature_blocks, pool_queries
from sextet.reid.metrics import (
    Labels,
    Protocol,
    camera_pairs,
    evaluate_distances,
    evaluate_features,
    single_gallery_shot,
    true_positive_rates,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "reid_metrics.json").read_text())
APS = ("standard", "trapezoid", "sklearn")


def labels(ids, cameras) -> Labels:
    return Labels(ids=np.asarray(ids), cameras=np.asarray(cameras))


def scores_of_order(order, query_id, gallery_ids, ap):
    """AP, INP, ranks of the matches, straight from the definitions; `order` holds the images that stay."""
    ranks = [rank for rank, image in enumerate(order, 1) if gallery_ids[image] == query_id]
    precisions = []
    for number, rank in enumerate(ranks, 1):
        before = (number - 1) / (rank - 1) if rank > 1 else 1.0
        precisions.append(number / rank if ap == "standard" else (number / rank + before) / 2)
    return sum(precisions) / len(ranks), len(ranks) / ranks[-1], ranks


def brute_force(distances, query, gallery, protocol):
    """One query after another: remove, sort, count."""
    ap, inp, first = [], [], []
    for number, row in enumerate(distances):
        same = gallery.ids == query.ids[number]
        removed = gallery.ids == -1
        if protocol.same_camera == "exclude":
            removed |= same & (gallery.cameras == query.cameras[number])
        stays = np.flatnonzero(~removed)
        if not same[stays].any():
            ap, inp, first = [*ap, math.nan], [*inp, math.nan], [*first, 0]
            continue
        last = same if protocol.ties == "worst" else np.zeros(len(row))
        order = sorted(stays, key=lambda image, row=row, last=last: (row[image], last[image], image))
        value, inverse, ranks = scores_of_order(order, query.ids[number], gallery.ids, protocol.ap)
        if protocol.ap == "sklearn":
            steps = [row[image] for image in stays if same[image]]
            shares = [np.mean(same[stays][row[stays] <= step]) for step in steps]
            value = float(np.mean(shares))
        ap, inp, first = [*ap, value], [*inp, inverse], [*first, ranks[0]]
    valid = np.array(first) > 0
    cmc = [np.mean(np.array(first)[valid] <= k) for k in range(1, protocol.max_rank + 1)] if valid.any() else None
    return np.array(ap), np.array(inp), np.array(first), cmc


def draw_case(seed: int):
    """A small ranking with what can go wrong in one: ties, junk, distractors, people who are not in the gallery."""
    rng = np.random.default_rng(seed)
    num_query, num_gallery = rng.integers(1, 9), rng.integers(1, 41)
    people, cameras = rng.integers(1, 7), rng.integers(1, 4)
    distances = rng.random((num_query, num_gallery)).astype(rng.choice([np.float32, np.float64]))
    if seed % 2:
        distances = np.round(distances * rng.integers(1, 12))
    query = labels(rng.integers(1, people + 3, num_query), rng.integers(0, cameras, num_query))
    gallery = labels(rng.integers(-1, people + 1, num_gallery), rng.integers(0, cameras, num_gallery))
    return distances, query, gallery


@pytest.mark.parametrize("same_camera", ["exclude", "keep"])
@pytest.mark.parametrize("ap", APS)
@pytest.mark.parametrize("ties", ["stable", "worst"])
def test_scores_equal_their_definition_on_200_cases(same_camera: str, ap: str, ties: str) -> None:
    protocol = Protocol(same_camera=same_camera, ap=ap, ties=ties, max_rank=9)
    scored = 0
    for seed in range(400):
        distances, query, gallery = draw_case(seed)
        expected_ap, expected_inp, first, cmc = brute_force(distances, query, gallery, protocol)
        if not first.any():
            with pytest.raises(UsageError, match=f"all {len(first)} queries are invalid"):
                evaluate_distances(distances, query, gallery, protocol)
            continue
        scored += 1
        found = evaluate_distances(distances, query, gallery, protocol)
        np.testing.assert_allclose(found.ap, expected_ap, atol=1e-12)
        np.testing.assert_allclose(found.inp, expected_inp, atol=1e-12)
        np.testing.assert_array_equal(found.first_match, first)
        np.testing.assert_allclose(found.cmc, cmc, atol=1e-12)
        assert (found.num_valid, found.num_invalid) == ((first > 0).sum(), (first == 0).sum())
        np.testing.assert_array_equal(found.top1, np.where(first > 0, first == 1, math.nan))
    assert scored >= 200


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=5, max_size=5), st.sampled_from(APS))
@settings(max_examples=30, deadline=None)
def test_mean_over_ties_is_the_mean_over_their_orders(images: list[tuple[int, int]], ap: str) -> None:
    distances, ids = (np.array(values) for values in zip(*images, (1, 1), strict=True))
    query, cameras = labels([1], [0]), np.ones(6, int)
    found = evaluate_distances(distances[None], query, labels(ids, cameras), Protocol(ap=ap, ties="mean", max_rank=7))
    drawn = []
    for order in map(list, itertools.permutations(range(6))):
        shuffled = labels(ids[order], cameras)
        scores = evaluate_distances(distances[None, order], query, shuffled, Protocol(ap=ap, max_rank=7))
        drawn.append([scores.ap[0], scores.inp[0], scores.first_match[0], scores.top1[0], *scores.cmc])
    values = [found.ap[0], found.inp[0], found.first_match[0], found.top1[0], *found.cmc]
    np.testing.assert_allclose(values, np.mean(drawn, axis=0), atol=1e-9)


@pytest.mark.parametrize("case", GOLDEN["random"], ids=lambda case: f"seed {case['seed']}")
def test_golden_rankings(case: dict) -> None:
    rng = np.random.RandomState(case["seed"])  # noqa: NPY002 - the table was made with it
    distances = (rng.rand(case["queries"], case["gallery"]) * 20).astype(np.float32)
    assert distances.sum(dtype=np.float64) == pytest.approx(case["sum"], abs=1e-3)
    query_ids, gallery_ids = (rng.randint(0, case["ids"], case[side]) for side in ("queries", "gallery"))
    query_cameras, gallery_cameras = (rng.randint(0, case["cameras"], case[side]) for side in ("queries", "gallery"))
    query, gallery = labels(query_ids, query_cameras), labels(gallery_ids, gallery_cameras)
    found = evaluate_distances(distances, query, gallery)
    assert found.num_valid == case["valid"]
    assert found.mean_ap == pytest.approx(case["mean_ap"], abs=1e-6)
    assert found.minp == pytest.approx(case["minp"], abs=1e-6)
    np.testing.assert_allclose(found.cmc[:10], case["cmc"], atol=1e-6)
    np.testing.assert_allclose(found.ap[found.first_match > 0][:4], case["ap"], atol=1e-6)
    np.testing.assert_allclose(found.inp[found.first_match > 0][:4], case["inp"], atol=1e-6)
    older = evaluate_distances(distances, query, gallery, Protocol(ap="trapezoid"))
    assert older.mean_ap == pytest.approx(case["trapezoid"], abs=1e-6)
    assert older.mean_ap_of_all == pytest.approx(case["trapezoid_of_all"], abs=1e-6)


def test_golden_ranking_by_hand() -> None:
    case = GOLDEN["hand"]
    query = labels([case["query_id"]], [case["query_camera"]])
    gallery = labels(case["gallery_ids"], case["gallery_cameras"])
    distances = np.array([case["distances"]])
    found = evaluate_distances(distances, query, gallery)
    assert found.ap[0] == pytest.approx(case["ap"], abs=1e-6)
    assert found.inp[0] == pytest.approx(case["inp"])
    assert (found.cmc == 1).all()
    older = evaluate_distances(distances, query, gallery, Protocol(ap="trapezoid"))
    assert older.ap[0] == pytest.approx(case["trapezoid"], abs=1e-6)


def people(seed: int = 0, *, size: int = 24, noise: float = 1.0):
    """Features of 12 people by 3 cameras: 60 queries and a gallery of 300."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((12, size))
    sides = []
    for count in (60, 300):
        side = labels(rng.integers(1, 13, count), rng.integers(0, 3, count))
        sides += [(centres[side.ids - 1] + noise * rng.standard_normal((count, size))).astype(np.float32), side]
    return sides


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_features_score_as_their_distances_do_whatever_the_chunk(metric: str, tmp_path: Path) -> None:
    query, query_labels, gallery, gallery_labels = people()
    left, right = (side.astype(np.float64) for side in (query, gallery))
    if metric == "cosine":
        left, right = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (left, right))
    distances = ((left[:, None] - right) ** 2).sum(axis=2)
    expected = evaluate_distances(distances, query_labels, gallery_labels)
    assert 0.2 < expected.mean_ap < 0.95
    np.save(tmp_path / "gallery.npy", gallery)
    mapped = np.load(tmp_path / "gallery.npy", mmap_mode="r")
    for chunk in (None, 1, 7):
        found = evaluate_features(query, mapped, query_labels, gallery_labels, metric=metric, chunk=chunk)
        np.testing.assert_allclose(found.ap, expected.ap, atol=1e-6)
    half = evaluate_features(query.astype(np.float16), gallery, query_labels, gallery_labels, metric=metric)
    assert half.mean_ap == pytest.approx(expected.mean_ap, abs=0.01)


def test_distances_of_any_layout_and_type_score_alike() -> None:
    query, query_labels, gallery, gallery_labels = people()
    distances = np.concatenate([block for _, block in feature_blocks(query, gallery)])
    expected = evaluate_distances(distances, query_labels, gallery_labels)
    ranks = distances.ravel().argsort().argsort().reshape(distances.shape)
    for other in (np.asfortranarray(distances), distances.astype(np.float64), ranks):
        np.testing.assert_array_equal(evaluate_distances(other, query_labels, gallery_labels).ap, expected.ap)


def test_a_curve_may_be_longer_than_the_gallery() -> None:
    gallery = labels([2] * 30 + [1] * 10, [0] * 32 + [1] * 8)
    found = evaluate_distances(np.arange(40.0)[None], labels([1], [0]), gallery)
    np.testing.assert_array_equal(found.cmc, np.arange(1, 51) > 30)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_distances_that_are_not_finite_name_the_first_query(value: float) -> None:
    distances = np.ones((4, 6), np.float32)
    distances[2, 3] = distances[3, 0] = value
    with pytest.raises(DataError, match="query 2 to gallery image 3"):
        evaluate_distances(distances, labels([1] * 4, [0] * 4), labels([1] * 6, [1] * 6))


def test_distances_that_are_all_nan_have_no_score() -> None:
    with pytest.raises(DataError, match="query 0 to gallery image 0"):
        evaluate_distances(np.full((3, 6), math.nan), labels([1] * 3, [0] * 3), labels([1] * 6, [1] * 6))


def test_large_finite_distances_are_no_error() -> None:
    distances = np.full((1, 6), 3e38, np.float32)
    distances[0, 0] = 1
    assert evaluate_distances(distances, labels([1], [0]), labels([1, 2, 2, 2, 2, 2], [1] * 6)).mean_ap == 1


@pytest.mark.parametrize("side", ["query", "gallery"])
def test_features_that_are_not_finite_name_the_first_row(side: str) -> None:
    query, query_labels, gallery, gallery_labels = people()
    {"query": query, "gallery": gallery}[side][17, 3] = math.nan
    with pytest.raises(DataError, match=f"{side} features .* 1 of .*row 17"):
        evaluate_features(query, gallery, query_labels, gallery_labels)


def test_one_camera_is_told_which_protocol_to_choose() -> None:
    query, gallery = labels([1, 2, 3], [0] * 3), labels([1, 2, 1, 2], [0] * 4)
    distances = np.arange(12.0).reshape(3, 4)
    with pytest.raises(UsageError) as failure:
        evaluate_distances(distances, query, gallery)
    for words in (
        "all 3 queries are invalid",
        "2 meet",
        "1 do not",
        'same_camera="keep"',
        "--evaluation.same-camera keep",
    ):
        assert words in str(failure.value)
    kept = evaluate_distances(distances, query, gallery, Protocol(same_camera="keep"))
    assert (kept.num_valid, kept.num_invalid) == (2, 1)


@pytest.mark.parametrize("unknown", ["query", "gallery"])
def test_unknown_cameras_are_told_which_protocol_to_choose(unknown: str) -> None:
    cameras = {"query": [0, 0], "gallery": [1, 1]}
    cameras[unknown] = [1, -1]
    sides = [labels([1, 2], cameras[side]) for side in ("query", "gallery")]
    with pytest.raises(UsageError, match=f"1 of 2 {unknown} images is unknown.*--evaluation.same-camera keep"):
        evaluate_distances(np.eye(2), *sides)
    assert evaluate_distances(1 - np.eye(2), *sides, Protocol(same_camera="keep")).mean_ap == 1


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("ap", ["standard", "trapezoid"])
def test_a_collapsed_embedding_scores_what_chance_does_and_says_so(metric: str, ap: str) -> None:
    rng = np.random.default_rng(0)
    same = np.repeat(rng.standard_normal((1, 33)).astype(np.float32), 90, axis=0)
    query, gallery = labels(rng.integers(1, 5, 20), [0] * 20), labels(rng.integers(1, 5, 90), [1] * 90)
    found = evaluate_features(same[:20], same, query, gallery, Protocol(ties="mean", ap=ap), metric=metric)
    assert "collapsed embedding" in found.notes[0]
    lucky = [evaluate_distances(rng.random((20, 90)), query, gallery, Protocol(ap=ap)).mean_ap for _ in range(300)]
    assert found.mean_ap == pytest.approx(np.mean(lucky), abs=4 * np.std(lucky) / math.sqrt(300))
    assert found.rank1 == pytest.approx(np.mean([(gallery.ids == person).mean() for person in query.ids]))
    worst = evaluate_features(same[:20], same, query, gallery, Protocol(ties="worst"), metric=metric)
    assert worst.rank1 == 0
    query_features, query_labels, gallery_features, gallery_labels = people()
    assert evaluate_features(query_features, gallery_features, query_labels, gallery_labels).notes == ()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"ap": "standrad"}, 'did you mean "standard"'),
        ({"ties": "best"}, "stable, worst"),
        ({"same_camera": "drop"}, "exclude, keep"),
        ({"max_rank": 0}, "at least rank 1"),
    ],
)
def test_wrong_protocols_say_what_is_allowed(change: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Protocol(**change)


def test_shapes_that_do_not_fit_are_named() -> None:
    query, gallery = labels([1] * 3, [0] * 3), labels([1] * 4, [1] * 4)
    for shape in [(2, 4), (4, 4), (3, 5), (0, 4), (3,)]:
        with pytest.raises(UsageError, match="fit"):
            evaluate_distances(np.zeros(shape), query, gallery)
    with pytest.raises(UsageError, match="nothing to rank"):
        evaluate_distances(np.zeros((3, 0)), query, labels([], []))
    with pytest.raises(UsageError, match="2 ids but 1 cameras"):
        labels([1, 2], [0])
    with pytest.raises(UsageError, match="integers"):
        labels([1.5, 2], [0, 1])
    with pytest.raises(UsageError, match="query features have 3 numbers"):
        evaluate_features(np.ones((3, 3)), np.ones((4, 5)), query, gallery)
    with pytest.raises(UsageError, match='did you mean "euclidean"'):
        evaluate_features(np.ones((3, 3)), np.ones((4, 3)), query, gallery, metric="euclid")


def test_intervals_hold_the_estimate_and_leave_invalid_queries_out() -> None:
    query, query_labels, gallery, gallery_labels = people()
    query_labels.ids[:5] = 99
    found = evaluate_features(query, gallery, query_labels, gallery_labels)
    intervals = found.intervals()
    assert intervals["mean_ap"].n == intervals["rank1"].n == 55
    assert intervals["mean_ap"].mean == pytest.approx(found.mean_ap)
    assert intervals["rank1"].mean == pytest.approx(found.rank1)
    assert intervals["mean_ap"].low < found.mean_ap < intervals["mean_ap"].high


def test_camera_pairs_score_each_pair_alone() -> None:
    query, query_labels, gallery, gallery_labels = people()
    distances = np.concatenate([block for _, block in feature_blocks(query, gallery)])
    pairs = camera_pairs(feature_blocks(query, gallery, chunk=7), query_labels, gallery_labels)
    assert [(pair.query_camera, pair.gallery_camera) for pair in pairs] == [
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 2),
        (2, 0),
        (2, 1),
    ]
    for pair in pairs:
        rows, columns = query_labels.cameras == pair.query_camera, gallery_labels.cameras == pair.gallery_camera
        alone = evaluate_distances(
            distances[np.ix_(rows, columns)],
            labels(query_labels.ids[rows], query_labels.cameras[rows]),
            labels(gallery_labels.ids[columns], gallery_labels.cameras[columns]),
        )
        assert pair.mean_ap == pytest.approx(alone.mean_ap, abs=1e-6)
        assert pair.rank1 == pytest.approx(alone.rank1)
        assert pair.queries == alone.num_valid


def test_true_positive_rates_equal_a_full_sort() -> None:
    query, query_labels, gallery, gallery_labels = people(noise=2.5)
    gallery_labels.ids[:30], gallery_labels.ids[30:60] = -1, 0
    distances = np.round(np.concatenate([block for _, block in feature_blocks(query, gallery)]), 2)
    same = query_labels.ids[:, None] == gallery_labels.ids
    left_out = (same & (query_labels.cameras[:, None] == gallery_labels.cameras)) | (gallery_labels.ids == -1)
    matching, others = distances[same & ~left_out], distances[~same & ~left_out]
    rates = (0, 1e-3, 1e-2, 0.1, 0.9)
    found = true_positive_rates(distances, query_labels, gallery_labels, rates=rates)
    for rate in rates:
        accepted = [(matching <= limit).mean() for limit in np.unique(distances) if (others <= limit).mean() <= rate]
        assert found[rate] == max(accepted, default=0)
    assert 0 < found[1e-2] < found[0.1] < 1
    with pytest.raises(UsageError, match="false positive rates"):
        true_positive_rates(distances, query_labels, gallery_labels, rates=(1.5,))


def test_single_gallery_shot_shows_one_image_of_each_person() -> None:
    query, gallery = labels([1], [0]), labels([1, 1, 1, 2, 2, 2, 2, 3, -1], [0, 1, 1, 1, 1, 0, 0, 1, 1])
    distances = np.array([[0, 0.1, 0.5, 0.2, 0.2, 0.9, 0.9, 0.3, 0]])
    curve = single_gallery_shot(distances, query, gallery, repeats=20_000)
    # the match is nearest if it is image 1; if image 2, person 3 is nearer always and person 2 half the time
    np.testing.assert_allclose(curve[:4], [0.5, 0.75, 1, 1], atol=0.02)
    again = single_gallery_shot(distances, query, gallery, repeats=20_000)
    other = single_gallery_shot(distances, query, gallery, repeats=20_000, seed=1)
    assert (again == curve).all() and (other != curve).any()


def test_single_gallery_shot_with_one_image_each_is_the_usual_curve() -> None:
    rng = np.random.default_rng(1)
    query, gallery = labels(np.arange(12), [0] * 12), labels(np.arange(12), [1] * 12)
    distances = rng.integers(0, 5, (12, 12)).astype(np.float32)
    for ties in ("stable", "worst", "mean"):
        protocol = Protocol(ties=ties)
        usual = evaluate_distances(distances, query, gallery, protocol).cmc
        np.testing.assert_allclose(single_gallery_shot(distances, query, gallery, protocol, repeats=2), usual)


def test_pooled_queries_use_images_of_the_same_person_and_camera() -> None:
    query, query_labels = np.eye(3, 2, dtype=np.float32), labels([1, 1, 2], [0, 1, 0])
    extra, extra_labels = np.array([[1, 5], [3, 1], [9, 9]], np.float32), labels([1, 1, 2], [0, 0, 1])
    np.testing.assert_array_equal(pool_queries(query, query_labels, extra, extra_labels), [[2, 3], query[1], query[2]])
    np.testing.assert_array_equal(pool_queries(query, query_labels, extra, extra_labels, how="max")[0], [3, 5])
    with pytest.raises(UsageError, match="max, mean"):
        pool_queries(query, query_labels, extra, extra_labels, how="median")


def test_query_expansion_follows_its_formula_and_helps() -> None:
    query, query_labels, gallery, gallery_labels = people(noise=1.5)
    both = np.concatenate((query, gallery)).astype(np.float64)
    both /= np.linalg.norm(both, axis=1, keepdims=True)
    similarity = both @ both.T
    expected = []
    for row in similarity:
        near = np.argsort(-row)[:10]
        expected.append((row[near, None] ** 3 * both[near]).sum(axis=0))
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    found = expand_queries(query, gallery)
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-5)
    plain = evaluate_features(query, gallery, query_labels, gallery_labels).mean_ap
    assert evaluate_features(*found, query_labels, gallery_labels).mean_ap > plain + 0.02
    with pytest.raises(UsageError, match="k >= 1"):
        expand_queries(query, gallery, k=0)
