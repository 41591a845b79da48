"""RMGL: bands that see only their region, balanced pooling against a loop, and every decision that is ours."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import PEOPLE, images, network, parameters, randomise, step
from test_losses import GOLDEN

from sextet.core.checkpoint import pack_tensors
from sextet.core.errors import UsageError
from sextet.reid.rmgl import BandNorm, balanced_bands, cut_rows, join_bands, pool_bands, split_bands
from sextet.reid.settings import ModelConfig

CUTS = ("input", "res2", "res3", "res4", "output")


# --- what a band sees ---


def local_maps(net, x):
    """The map of the local path before pooling, of each branch: (B, n, C, rows of a band, W)."""
    maps = [branch.maps(shared, banded)[1] for branch, shared, banded in net._branches(x)]
    return [
        one.unflatten(2, (branch.bands, -1)).transpose(1, 2) for one, branch in zip(maps, net.branches, strict=True)
    ]


def rows_of(net, band, of):
    """Rows of pixels that map into one band only: stem and res2 look 5 rows beyond a cut behind them."""
    height, margin = 96 // of, 0 if net.at_input else 6
    return slice(band * height + (margin if band else 0), (band + 1) * height - (margin if band < of - 1 else 0))


@pytest.mark.parametrize("cut", ["input", "res2"])
@torch.no_grad()
def test_pixels_of_other_bands_do_not_exist_for_a_band(cut):
    net, x = randomise(network("rmgl", cut=cut)), images(2)
    before = local_maps(net, x)
    for index, branch in enumerate(net.branches):
        for changed in range(branch.bands):
            y = x.clone()
            y[:, :, rows_of(net, changed, branch.bands)] += 1.0
            after = local_maps(net, y)[index]
            same = [torch.equal(before[index][:, band], after[:, band]) for band in range(branch.bands)]
            assert same == [band != changed for band in range(branch.bands)]


@torch.no_grad()
def test_cut_at_the_output_bands_see_beyond_their_rows():
    net, x = randomise(network("rmgl", cut="output")), images(2)
    y = x.clone()
    y[:, :, rows_of(net, 1, 2)] += 1.0
    before, after = local_maps(net, x)[0], local_maps(net, y)[0]
    assert not torch.equal(before[:, 0], after[:, 0])


@torch.no_grad()
def test_later_cuts_let_more_through():
    x = images(2)
    y = x.clone()
    y[:, :, 54:] += 1.0  # of the lower of two bands, 6 rows off the cut
    moved = []
    for cut in CUTS:
        net = randomise(network("rmgl", cut=cut, branches="2"))
        upper = [local_maps(net, image)[0][:, 0] for image in (x, y)]
        moved.append(int((upper[0] != upper[1]).any(1).any(2).sum()))  # rows of the last map, over two images
    assert moved[0] == moved[1] == 0 and moved == sorted(moved) and moved[2] > 0, moved


@torch.no_grad()
def test_the_global_path_does_not_depend_on_the_cut():
    nets = [randomise(network("rmgl", cut=cut)) for cut in CUTS]
    wholes = [[branch.maps(s, b)[0] for branch, s, b in net._branches(images(2))] for net in nets]
    for others in wholes[1:]:
        assert all(torch.equal(one, two) for one, two in zip(wholes[0], others, strict=True))


def test_maps_are_split_and_joined_without_loss():
    x = torch.randn(2, 3, 12, 4)
    banded = split_bands(x, 3)
    assert banded.shape == (6, 3, 4, 4) and torch.equal(banded[1], x[0, :, 4:8])
    assert torch.equal(join_bands(banded, 3), x)


# --- balanced pooling ---


def slow_bands(x, bands):
    """The rule of balanced bands for one map (C, H, W), as a loop."""
    channels, height, _ = x.shape
    votes = [0] * height
    for channel in range(channels):
        rows = [max(x[channel, row].tolist()) for row in range(height)]
        votes[rows.index(max(rows))] += 1
    found, before = [], 0
    for row in range(height):
        found.append(min(bands - 1, (bands * (2 * before + votes[row])) // (2 * channels)))
        before += votes[row]
    return found, votes


def slow_pool(x, bands, kind):
    found, votes = slow_bands(x, bands)
    channels, height, _ = x.shape
    position = [bands * (2 * sum(votes[:row]) + votes[row]) for row in range(height)]
    vectors = []
    for band in range(bands):
        rows = [row for row in range(height) if found[row] == band]
        if not rows:
            rows = [min(range(height), key=lambda row: (abs(position[row] - (2 * band + 1) * channels), row))]
        inside = x[:, rows]
        vectors.append(inside.amax((1, 2)) if kind == "max" else inside.mean((1, 2)))
    return torch.stack(vectors, 1)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.sampled_from(("max", "avg")),
    st.booleans(),
)  # fmt: skip
def test_balanced_pooling_equals_a_loop(seed, channels, height, bands, kind, ties):
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=(2, channels, height, 3)))
    x = x.round() if ties else x
    found = balanced_bands(x, bands)
    assert found.tolist() == [slow_bands(one, bands)[0] for one in x]
    expected = torch.stack([slow_pool(one, bands, kind) for one in x])
    torch.testing.assert_close(pool_bands(x, bands, kind), expected)


def test_votes_are_the_published_ones():
    rng = np.random.RandomState(2)
    rng.randn(8, 5), rng.randn(4, 6)
    x = torch.from_numpy(rng.rand(1, 8, 12, 4))
    assert x.amax(3).argmax(2)[0].tolist() == GOLDEN["rows_of_maxima"]
    up_to = np.array(GOLDEN["votes_up_to_row"])
    votes = np.diff(up_to, prepend=0)
    for bands in (2, 3):
        expected = np.minimum((bands * (up_to - votes / 2) / 8).astype(int), bands - 1)
        assert balanced_bands(x, bands)[0].tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("row", [0, 5, 11])
def test_all_votes_in_one_row_still_give_finite_vectors(kind, row):
    x = torch.zeros(1, 8, 12, 4)
    x[:, :, row] = 1.0
    x.requires_grad_()
    pooled = pool_bands(x, 3, kind)
    pooled.sum().backward()
    assert pooled.shape == (1, 8, 3) and pooled.isfinite().all() and x.grad.isfinite().all()


def test_even_votes_give_even_stripes():
    x = torch.zeros(1, 24, 12, 4)
    for channel in range(24):
        x[0, channel, channel % 12] = 1.0 + channel
    for bands in (2, 3, 4):
        assert balanced_bands(x, bands)[0].tolist() == [row * bands // 12 for row in range(12)]
        expected = x.unflatten(2, (bands, -1)).amax((3, 4))
        assert torch.equal(pool_bands(x, bands, "max"), expected)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(2, 4))
def test_cuts_move_with_the_body(seed, shift, bands):
    draw = torch.Generator().manual_seed(seed)
    x = torch.zeros(2, 30, 16, 3)
    x[:, :, 4:10] = torch.rand(2, 30, 6, 3, generator=draw) + 0.1
    moved = torch.zeros_like(x)
    moved[:, :, shift:] = x[:, :, :-shift]
    inner = [cut_rows(balanced_bands(one, bands), bands)[:, 1:-1] * 16 for one in (x, moved)]
    torch.testing.assert_close(inner[0] + shift, inner[1])


def test_votes_of_many_channels_count_in_16_bits():
    x = torch.zeros(1, 2048, 8, 2, dtype=torch.bfloat16)
    x[:, :512, 1] = 1
    x[:, 512:, 6] = 1
    assert balanced_bands(x, 4)[0].tolist() == balanced_bands(x.float(), 4)[0].tolist() == [0, 0, 1, 1, 1, 1, 2, 3]


def test_cuts_carry_no_gradient_and_pooling_does():
    x = torch.rand(2, 8, 12, 4, requires_grad=True)
    pool_bands(x, 3, "avg").sum().backward()
    covered = [torch.bincount(row, minlength=3) for row in balanced_bands(x, 3)]
    for image, rows in enumerate(covered):
        assert x.grad[image].sum().item() == pytest.approx(8 * 3, rel=1e-5) or (rows == 0).any()
    assert not balanced_bands(x, 3).requires_grad


def test_cut_rows_are_shares_of_the_height():
    bands = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1]])
    assert cut_rows(bands, 2).tolist() == [[0, 0.75, 1], [0, 0.25, 1]]


# --- the network and its options ---


def test_seven_features_and_two_for_triplets():
    net = network("rmgl")
    outputs = step(net)
    assert [logits.shape for logits in outputs.logits] == [(6, PEOPLE)] * 7
    assert [feature.shape for feature in outputs.globals] == [(6, 6)] * 2
    assert [len(parts) for parts in outputs.locals] == [2, 3]
    assert net.feature_size == 42 and net.eval()(images()).shape == (6, 42)
    assert network("rmgl", feature_size=256).feature_size == 1792


@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_trains_and_moves_the_features(cut):
    net = randomise(network("rmgl", cut=cut))
    features = net(images())
    assert cut == "res2" or not torch.equal(features, randomise(network("rmgl"))(images()))
    before = {name: value.clone() for name, value in net.named_parameters()}
    step(net)
    assert [name for name, value in net.named_parameters() if torch.equal(value, before[name])] == []


def test_branches_have_weights_of_their_own_or_share_them():
    apart, shared = network("rmgl"), network("rmgl", share_branches=True)
    stages = parameters(apart.branches[0].stages)
    assert parameters(apart) - parameters(shared) == stages
    for net, together in ((apart, False), (shared, True)):
        step(net)
        one, two = (branch.stages.state_dict() for branch in net.branches)
        assert torch.equal(one["2.0.conv1.weight"], two["2.0.conv1.weight"]) is together
    again = network("rmgl", share_branches=True, seed=1)
    again.load_state_dict(shared.state_dict())
    assert torch.equal(again.eval()(images()), shared.eval()(images()))
    pack_tensors(shared.state_dict())  # checkpoints hold weights that are shared


def test_bands_have_normalisations_of_their_own_or_share_them():
    shared, apart = network("rmgl"), network("rmgl", band_bn="separate")
    assert parameters(shared) == parameters(apart)  # only statistics are apart
    assert len(apart.state_dict()) > len(shared.state_dict())
    step(apart)
    norms = [module for module in apart.modules() if isinstance(module, BandNorm)]
    differ = [not torch.equal(norm.whole.running_mean, norm.bands.running_mean) for norm in norms]
    assert sum(differ) > len(norms) / 2  # a 1x1 convolution of all rows sees the same in bands
    assert all(norm.whole.weight is norm.bands.weight for norm in norms)
    counts = {module.num_batches_tracked.item() for norm in norms for module in (norm.whole, norm.bands)}
    assert counts == {1}
    step(shared)
    counts = {m.num_batches_tracked.item() for m in shared.branches.modules() if isinstance(m, torch.nn.BatchNorm2d)}
    assert counts == {2}  # whole maps and bands
    again = network("rmgl", band_bn="separate", seed=1)
    again.load_state_dict(apart.state_dict())
    assert torch.equal(again.eval()(images()), apart.eval()(images()))


def test_shared_branches_have_one_pair_of_normalisations():
    net = network("rmgl", band_bn="separate", share_branches=True)
    assert all(isinstance(norm.whole, torch.nn.BatchNorm2d) for norm in net.modules() if isinstance(norm, BandNorm))
    step(net)


def test_stages_before_the_cut_run_once():
    net = network("rmgl", cut="res4")
    step(net)
    tracked = [[m.num_batches_tracked.item() for m in stage.modules() if isinstance(m, torch.nn.BatchNorm2d)]
               for stage in net.branches[0].stages]  # fmt: skip
    assert [set(counts) for counts in tracked] == [{1}, {1}, {2}]


def test_one_head_for_a_branch():
    net = network("rmgl", head="joint")
    outputs = step(net)
    assert [logits.shape for logits in outputs.logits] == [(6, PEOPLE)] * 2
    assert [feature.shape[1] for feature in outputs.globals] == [18, 24] and outputs.locals == [[], []]
    assert net.feature_size == 42 == net.eval()(images()).shape[1]
    assert parameters(net) > parameters(network("rmgl"))


def test_uniform_bands_are_stripes_and_are_the_method_rmgl_uniform():
    even, balanced = randomise(network("rmgl_uniform")), randomise(network("rmgl"))
    assert torch.equal(even(images()), randomise(network("rmgl", bands="uniform"))(images()))
    assert not torch.equal(even(images()), balanced(images()))
    step(network("rmgl_uniform"))
    torch.testing.assert_close(even.cuts(images(1))["part-3"], torch.tensor([[0, 1 / 3, 2 / 3, 1]]))
    cuts = balanced.cuts(images(2))
    assert list(cuts) == ["part-2", "part-3"] and cuts["part-3"].shape == (2, 4)
    for rows in cuts.values():
        assert (rows.diff() >= 0).all() and (rows[:, 0] == 0).all() and (rows[:, -1] == 1).all()
        assert (rows * 12 == (rows * 12).round()).all()  # between rows of the map


@pytest.mark.parametrize("bands", ["abp", "uniform"])
def test_pooling_kinds_reach_the_bands(bands):
    features = {}
    for pool in ("max", "avg", "gem"):
        net = randomise(network("rmgl", pool=pool, bands=bands))
        features[pool] = net(images())
        net.train()
        step(net)
        exponents = [value for name, value in net.named_parameters() if "exponent" in name]
        assert len(exponents) == (4 if pool == "gem" else 0)
        assert all(value.grad is not None and value.item() != 3.0 for value in exponents)
    local = slice(6, 18)
    assert not torch.allclose(features["max"][:, local], features["avg"][:, local])
    assert not torch.allclose(features["gem"][:, local], features["avg"][:, local])


@pytest.mark.parametrize("branches, size", [("2", 18), ("3", 24), ("1,2,3", 42), ("2,4", 48)])
def test_variants_of_branches(branches, size):
    net = network("rmgl", branches=branches)
    step(net)
    assert net.feature_size == size == net.eval()(images()).shape[1]


def test_one_branch_is_tested_of_a_network_trained_with_both():
    whole, one = randomise(network("rmgl")), randomise(network("rmgl", test_branch="3"))
    assert torch.equal(one(images()), whole(images())[:, 18:])


def test_settings_that_leave_nothing_are_refused():
    with pytest.raises(UsageError, match="branches"):
        network("rmgl", branches="1")
    with pytest.raises(UsageError, match="test_branch"):
        network("rmgl", test_branch="1")


def test_sizes_that_bands_do_not_divide_are_refused():
    with pytest.raises(UsageError, match="3 bands do not divide a map of 32 rows.*height_px.*cut"):
        network("rmgl").eval()(images(size=(64, 32)))
    with pytest.raises(UsageError, match="2 bands have 10 rows together.*whole image 9.*multiple of 32"):
        network("rmgl").eval()(images(size=(72, 32)))
    net = network("rmgl", strict_stripes=False)
    step(net, size=(72, 32))
    assert net.eval()(images(size=(72, 32))).isfinite().all()


def test_defaults_are_the_documented_ones():
    config = ModelConfig()
    assert (config.cut, config.bands, config.share_branches) == ("res2", "abp", False)
    assert (config.band_bn, config.head, config.pool) == ("shared", "parts", "max")
