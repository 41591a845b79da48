"""Batches of people: how they are made up, what an epoch covers, and that only seed and step decide."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sextet.core.errors import UsageError
from sextet.reid.sampler import PeopleSampler

COUNTS = st.lists(st.integers(1, 11), min_size=2, max_size=12)


def labels_of(counts, seed=0):
    labels = np.repeat(np.arange(len(counts)), counts)
    return np.random.default_rng(seed).permutation(labels)


@settings(deadline=None, max_examples=60)
@given(COUNTS, st.integers(2, 6), st.integers(2, 5), st.sampled_from(("images", "ids")), st.integers(0, 100))
def test_every_batch_has_p_people_with_k_images_each(counts, people, images, epoch, seed):
    labels = labels_of(counts)
    if people > len(counts):
        with pytest.raises(UsageError):
            PeopleSampler(labels, people, images, epoch=epoch, seed=seed)
        return
    sampler = PeopleSampler(labels, people, images, epoch=epoch, seed=seed)
    for number in range(3):
        batches = sampler.epoch(number)
        assert len(batches) == sampler.batches_per_epoch
        for batch in batches:
            assert batch.shape == (people * images,)
            rows = batch.reshape(people, images)
            persons = labels[rows]
            assert (persons == persons[:, :1]).all() and len(set(persons[:, 0])) == people
            for person, chosen in zip(persons[:, 0], rows, strict=True):
                distinct = min(images, counts[person])
                assert len(set(chosen)) == distinct, "only people with fewer than K images repeat some"
                assert np.bincount(np.unique(chosen, return_inverse=True)[1]).max() == -(-images // distinct)


@settings(deadline=None, max_examples=60)
@given(COUNTS, st.integers(2, 5), st.integers(2, 5))
def test_an_epoch_of_images_repeats_as_little_as_it_must(counts, people, images):
    labels = labels_of(counts)
    if people > len(counts):
        return
    batches = PeopleSampler(labels, people, images).epoch(0)
    taken = np.bincount(np.concatenate(batches), minlength=len(labels))
    groups = np.zeros(len(counts), int)
    for batch in batches:
        groups[np.unique(labels[batch])] += 1
    most = -(-np.array(counts) // images)
    assert (groups <= most).all()
    assert (most - groups > 0).sum() < people  # it ends when too few people have any left
    for person, count in enumerate(counts):
        if groups[person] == most[person]:
            own = taken[labels == person]
            assert own.min() >= 1 and own.sum() == most[person] * images
            assert own.max() <= (2 if count >= images else -(-images // count))


@settings(deadline=None, max_examples=60)
@given(COUNTS, st.integers(2, 5), st.integers(2, 5))
def test_an_epoch_of_ids_takes_everybody_once(counts, people, images):
    if people > len(counts):
        return
    labels = labels_of(counts)
    batches = PeopleSampler(labels, people, images, epoch="ids").epoch(0)
    assert len(batches) == -(-len(counts) // people)
    often = np.bincount(np.concatenate([labels[batch[::images]] for batch in batches]), minlength=len(counts))
    assert often.min() == 1 and often.sum() == len(batches) * people and often.max() <= 2


def test_epochs_of_a_set_like_market():
    rng = np.random.default_rng(0)
    counts = rng.integers(2, 33, 751)
    labels = labels_of(counts)
    ids = PeopleSampler(labels, 16, 4, epoch="ids")
    assert ids.batches_per_epoch == 47  # 751 people x 4 images, and one person more to fill the last batch
    images = PeopleSampler(labels, 16, 4, epoch="images")
    covered = np.unique(np.concatenate(images.epoch(0)))
    assert 0.97 < len(covered) / len(labels) <= 1.0
    assert images.batches_per_epoch * 64 == pytest.approx(len(labels), rel=0.12)


def test_seed_and_step_decide_and_nothing_else():
    labels = labels_of([5, 6, 7, 8, 9, 3])
    one, two = (PeopleSampler(labels, 3, 4, seed=7) for _ in range(2))
    steps = list(range(4 * one.batches_per_epoch))
    forward = [one[step] for step in steps]
    backward = [two[step] for step in reversed(steps)][::-1]
    assert all(np.array_equal(a, b) for a, b in zip(forward, backward, strict=True))
    other = PeopleSampler(labels, 3, 4, seed=8)
    assert any(not np.array_equal(a, other[step]) for step, a in enumerate(forward))
    first, second = (np.concatenate(one.epoch(number)) for number in (0, 1))
    assert not np.array_equal(first, second)


def test_everybody_is_met_with_everybody():
    labels = labels_of([4] * 8)
    sampler = PeopleSampler(labels, 4, 4)
    pairs = set()
    for step in range(200):
        people = np.unique(labels[sampler[step]])
        pairs |= {(a, b) for a in people for b in people}
    assert len(pairs) == 64


def test_labels_need_not_be_contiguous_or_sorted():
    labels = np.array([900, -5, 900, 7, -5, 7, 7])
    for batch in PeopleSampler(labels, 3, 2).epoch(0):
        assert set(labels[batch]) == {900, -5, 7}


def test_too_few_people_are_named_with_both_numbers():
    with pytest.raises(UsageError, match="batches of 16 people cannot be made of 3.*--optim.people"):
        PeopleSampler(labels_of([4, 4, 4]), 16, 4)
