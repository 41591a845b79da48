import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sextet.core import seeding

PART = st.one_of(st.integers(-5, 10**6), st.text(max_size=6))


@given(st.lists(PART, max_size=4), st.lists(PART, max_size=4))
def test_keys_differ_for_different_places_and_fit_63_bits(first, second):
    a, b = seeding.key(3, *first), seeding.key(3, *second)
    assert 0 <= a < 2**63
    assert (a == b) == (first == second)


def test_streams_do_not_collide_and_one_stream_does_not_move_another():
    places = itertools.product(range(3), seeding.STREAMS, range(50), range(4))
    keys = [seeding.key(seed, name, step, rank) for seed, name, step, rank in places]
    assert len(set(keys)) == len(keys)
    before = seeding.numpy_rng(1, "rollout", 5).random(4)
    seeding.numpy_rng(1, "update", 5).random(1000)
    np.testing.assert_array_equal(before, seeding.numpy_rng(1, "rollout", 5).random(4))


def test_reseeding_the_default_generator_repeats_draws():
    seeding.reseed_default(4, "step", 9)
    first = torch.rand(3)
    torch.rand(100)
    seeding.reseed_default(4, "step", 9)
    assert torch.equal(first, torch.rand(3))
    seeding.reseed_default(4, "step", 10)
    assert not torch.equal(first, torch.rand(3))


def test_keys_are_the_same_on_every_platform_and_version():
    assert seeding.key(0, "step", 1) == 9051425498679698253
