"""Losses: published values, naive loops, gradients at coinciding features, and how parts are weighed."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from sextet.core.errors import UsageError
from sextet.reid.heads import Outputs
from sextet.reid.losses import (
    Shares,
    batch_hard,
    chosen_features,
    circle_loss,
    circle_softmax,
    hardest,
    total_loss,
)
from sextet.reid.settings import LossConfig
from sextet.reid.train import ramp

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "reid_losses.json").read_text())
PEOPLE = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
CLASSES = torch.tensor([0, 5, 2, 3])


def drawn():
    rng = np.random.RandomState(2)
    return torch.from_numpy(rng.randn(8, 5)), torch.from_numpy(rng.randn(4, 6))


def total(outputs, labels, config, *, metric_weight=1.0, cosine=False):
    return total_loss(outputs, labels, config, metric_weight=metric_weight, cosine=cosine, shares=Shares())


@pytest.mark.parametrize("margin", [0.3, 1.2, None])
def test_batch_hard_has_the_published_value(margin):
    features, _ = drawn()
    golden = GOLDEN["batch_hard"]["soft" if margin is None else str(margin)]
    assert batch_hard(features, PEOPLE, margin).item() == pytest.approx(golden, abs=1e-9)


def test_the_hardest_pairs_have_the_published_distances():
    positive, negative = hardest(drawn()[0], PEOPLE)
    np.testing.assert_allclose(positive[:3], GOLDEN["hardest_positive"], atol=1e-8)
    np.testing.assert_allclose(negative[:3], GOLDEN["hardest_negative"], atol=1e-8)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softmax_has_the_published_value(smoothing):
    logits = [part.float() for part in (drawn()[1], drawn()[1])]  # the mean of equal ones is each of them
    loss, parts = total(Outputs(logits, [], []), CLASSES, LossConfig(smoothing=smoothing))
    assert loss.item() == pytest.approx(GOLDEN["softmax"][str(smoothing)], abs=1e-6)
    exact, _ = total(Outputs([drawn()[1]], [], []), CLASSES, LossConfig(smoothing=smoothing))
    assert exact.item() == pytest.approx(GOLDEN["softmax"][str(smoothing)], abs=1e-9)
    assert parts.keys() == {"softmax_loss"}


def naive_batch_hard(features, labels, margin):
    losses = []
    for a in range(len(labels)):
        positives = [math.dist(features[a], features[b]) for b in range(len(labels)) if labels[b] == labels[a]]
        negatives = [math.dist(features[a], features[b]) for b in range(len(labels)) if labels[b] != labels[a]]
        losses.append(max(0.0, margin + max(positives) - min(negatives)))
    return sum(losses) / len(losses)


def batches(draw_people):
    return st.tuples(draw_people, st.integers(0, 2**31))


SOME = batches(st.lists(st.integers(0, 3), min_size=4, max_size=12).filter(lambda ids: 1 < len(set(ids)) < len(ids)))


@settings(deadline=None, max_examples=50)
@given(SOME)
def test_batch_hard_equals_a_loop(batch):
    people, seed = batch
    features = np.random.default_rng(seed).normal(size=(len(people), 3))
    found = batch_hard(torch.from_numpy(features), torch.tensor(people), 0.3)
    assert found.item() == pytest.approx(naive_batch_hard(features, people, 0.3), abs=1e-5)


def naive_circle(features, labels, margin=0.6, scale=80.0):
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    losses = []
    for a in range(len(labels)):
        positive = negative = 0.0
        for b in range(len(labels)):
            cosine = float(unit[a] @ unit[b])
            if a != b and labels[a] == labels[b]:
                positive += math.exp(-scale * max(0.0, 1 + margin - cosine) * (cosine - (1 - margin)))
            if labels[a] != labels[b]:
                negative += math.exp(scale * max(0.0, cosine + margin) * (cosine - margin))
        losses.append(math.log1p(positive * negative))
    return sum(losses) / len(losses)


@settings(deadline=None, max_examples=50)
@given(SOME)
def test_circle_loss_equals_a_loop(batch):
    people, seed = batch
    features = np.random.default_rng(seed).normal(size=(len(people), 6))
    found = circle_loss(torch.from_numpy(features), torch.tensor(people))
    assert found.item() == pytest.approx(naive_circle(features, people), rel=1e-9, abs=1e-9)


def test_circle_softmax_equals_a_loop():
    rng = np.random.default_rng(0)
    cosines, labels, scale, margin = rng.uniform(-1, 1, (5, 7)), [0, 3, 6, 3, 1], 64.0, 0.35
    losses = []
    for row, own in zip(cosines, labels, strict=True):
        logits = [
            scale
            * (
                max(0.0, 1 + margin - cosine) * (cosine - (1 - margin))
                if person == own
                else max(0.0, cosine + margin) * (cosine - margin)
            )
            for person, cosine in enumerate(row)
        ]
        top = max(logits)
        losses.append(top + math.log(sum(math.exp(logit - top) for logit in logits)) - logits[own])
    found = circle_softmax(torch.from_numpy(cosines), torch.tensor(labels), scale=scale, margin=margin, smoothing=0.0)
    assert found.item() == pytest.approx(sum(losses) / len(losses), abs=1e-9)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("kind", ["triplet", "soft", "circle"])
def test_gradients_stay_finite_when_features_coincide(kind, normalise):
    base = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    features = base.repeat_interleave(4, 0)[torch.tensor([0, 1, 2, 4, 3, 5, 6, 7])]  # also twice across people
    features.requires_grad_()
    config = LossConfig(kind=kind, normalise=normalise, margin=1.2)
    outputs = Outputs([torch.zeros(8, 4)], [features * 30], [])
    loss, _ = total(outputs, PEOPLE, config)
    loss.backward()
    assert loss.isfinite() and features.grad.isfinite().all()


def test_all_equal_features_cost_the_margin_and_do_not_explode():
    features = torch.full((8, 16), 3.0, requires_grad=True)
    loss = batch_hard(features, PEOPLE, 0.3)
    loss.backward()
    assert loss.item() == pytest.approx(0.3, abs=1e-5)
    assert features.grad.abs().max() < 10


def test_errors_name_what_the_batch_lacks():
    features = torch.randn(4, 3)
    with pytest.raises(UsageError, match="two people or more in a batch; this one has 1"):
        batch_hard(features, torch.zeros(4, dtype=torch.int64), 0.3)
    with pytest.raises(UsageError, match="two images of a person"):
        batch_hard(features, torch.arange(4), 0.3)


def test_anchors_are_a_part_and_see_everybody():
    features, _ = drawn()
    whole = hardest(features, PEOPLE)
    first, second = (hardest(features, PEOPLE, part) for part in (slice(0, 4), slice(4, 8)))
    for all_of, one, two in zip(whole, first, second, strict=True):
        torch.testing.assert_close(torch.cat((one, two)), all_of)
    halves = [batch_hard(features, PEOPLE, 1.2, part).item() for part in (slice(0, 4), slice(4, 8))]
    assert sum(halves) / 2 == pytest.approx(batch_hard(features, PEOPLE, 1.2).item())


def outputs_of_two_branches(dtype=torch.float32):
    draw = torch.Generator().manual_seed(1)

    def some(size):
        return torch.randn(8, size, generator=draw).to(dtype)

    return Outputs([some(4) for _ in range(3)], [some(5), some(5)], [[some(5), some(5)], []])


def test_the_total_is_the_mean_softmax_plus_the_mean_triplet_loss():
    outputs = outputs_of_two_branches()
    softmax = torch.stack([functional.cross_entropy(logits, PEOPLE) for logits in outputs.logits]).mean()
    triplet = torch.stack([batch_hard(feature, PEOPLE, 1.2) for feature in outputs.globals]).mean()
    loss, parts = total(outputs, PEOPLE, LossConfig(softmax=2.0, metric=3.0, margin=1.2), metric_weight=0.5)
    torch.testing.assert_close(loss, 2 * softmax + 0.5 * 3 * triplet)
    torch.testing.assert_close(parts["metric_loss"], triplet)
    assert not any(part.requires_grad for part in parts.values())
    without, parts = total(outputs, PEOPLE, LossConfig(), metric_weight=0.0)
    torch.testing.assert_close(without, softmax)
    assert "metric_loss" not in parts


def test_which_features_the_metric_loss_sees():
    outputs = outputs_of_two_branches()
    shapes = {which: [tuple(one.shape) for one in chosen_features(outputs, which)] for which in ("globals", "all")}
    assert shapes == {"globals": [(8, 5)] * 2, "all": [(8, 5)] * 4}
    joined = chosen_features(outputs, "concat")
    assert [tuple(one.shape) for one in joined] == [(8, 5), (8, 5), (8, 10)]
    assert torch.equal(joined[2], torch.cat(outputs.locals[0], 1))


def test_normalised_triplets_do_not_see_the_length_of_features():
    outputs = outputs_of_two_branches()
    longer = outputs._replace(globals=[7 * feature for feature in outputs.globals])
    for normalise, same in ((True, True), (False, False)):
        losses = [total(one, PEOPLE, LossConfig(normalise=normalise))[0].item() for one in (outputs, longer)]
        assert (losses[0] == pytest.approx(losses[1], rel=1e-5)) is same


@pytest.mark.parametrize("kind", ["triplet", "circle"])
def test_outputs_of_16_bits_are_compared_in_32(kind):
    coarse = outputs_of_two_branches(torch.bfloat16)
    fine = Outputs(*[[[p.float() for p in x] if isinstance(x, list) else x.float() for x in part] for part in coarse])
    for cosine in (False, True):
        config = LossConfig(kind=kind)
        found, expected = (total(one, PEOPLE, config, cosine=cosine)[0] for one in (coarse, fine))
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_ramp_is_off_then_linear_then_full():
    config = LossConfig(ramp_start=0.2, ramp_end=0.6)
    assert [ramp(done, config) for done in (0.0, 0.2, 0.4, 0.6, 1.0)] == pytest.approx([0, 0, 0.5, 1, 1])
    assert [ramp(done, LossConfig()) for done in (0.0, 0.5, 1.0)] == [1.0, 1.0, 1.0]
    step = LossConfig(ramp_start=0.3, ramp_end=0.3)
    assert [ramp(done, step) for done in (0.0, 0.29, 0.3, 0.5)] == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("start, end", [(0.5, 0.1), (-0.1, 0.5), (0.2, 1.5)])
def test_ramps_that_cannot_be_are_refused(start, end):
    with pytest.raises(UsageError, match="ramp_end"):
        LossConfig(ramp_start=start, ramp_end=end)
