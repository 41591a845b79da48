"""MGN at small scale: what is shared, what is classified, what triplets see, variants of branches, uneven maps."""

import pytest
import torch
from nets import PEOPLE, config, images, network, parameters, randomise, step

from sextet.core.errors import UsageError
from sextet.reid.model import build_model
from sextet.reid.resnet import ResNet
from sextet.reid.settings import LossConfig

CHANNELS = 64


def test_eight_features_eight_classifiers_and_three_features_for_triplets():
    net = network("mgn")
    outputs = net.train()(images())
    assert [logits.shape for logits in outputs.logits] == [(6, PEOPLE)] * 8
    assert [feature.shape for feature in outputs.globals] == [(6, 6)] * 3
    assert [[part.shape for part in parts] for parts in outputs.locals] == [[], [(6, 6)] * 2, [(6, 6)] * 3]
    assert net.feature_size == 48 and net.eval()(images()).shape == (6, 48)


def test_whole_map_features_are_classified_before_their_reduction_and_parts_after_it():
    full, reduced, bn = (network("mgn", **fields) for fields in ({}, {"classify": "reduced"}, {"neck": "bn"}))
    widths = [
        [layer.weight.shape[1] for branch in net.branches for layer in branch.classifiers]
        for net in (full, reduced, bn)
    ]
    assert widths == [[CHANNELS, CHANNELS, 6, 6, CHANNELS, 6, 6, 6], [6] * 8, [6] * 8]
    assert not any("bias" in name for name, _ in network("mgn").named_parameters() if "classifier" in name)


def test_the_triplet_features_are_tested_ones_with_relu_and_unnormalised_with_the_bn_neck():
    relu = network("mgn").train()(images()).globals[0]
    assert (relu >= 0).all() and (relu == 0).any()
    net = network("mgn", neck="bn").train()
    raw = net(images()).globals[0]
    assert (raw < 0).any() and raw.mean(0).abs().max() > 1e-3  # before the normalisation
    bias = [parameter.requires_grad for name, parameter in net.named_parameters() if name.endswith("bn.bias")]
    assert len(bias) == 8 and not any(bias)


def test_branches_begin_equal_and_part_after_one_step_while_the_shared_trunk_is_one():
    trunk = ResNet.small(0.34)
    net = build_model("mgn", config(), PEOPLE, built=trunk)
    stages = [branch.stages.state_dict() for branch in net.branches]
    assert all(torch.equal(stages[0][name], other[name]) for other in stages[1:] for name in stages[0])
    before = {name: value.clone() for name, value in trunk.state_dict().items()}
    step(net)
    stages = [branch.stages.state_dict() for branch in net.branches]
    for name in ("0.0.conv1.weight", "1.0.conv2.weight"):
        assert not torch.equal(stages[0][name], stages[1][name]) and not torch.equal(stages[1][name], stages[2][name])
    after = trunk.state_dict()
    shared = [name for name in before if name.startswith(("conv1", "layer1", "layer2", "layer3.0"))]
    own = [name for name in before if name.startswith(("layer3.1", "layer4"))]
    assert all(not torch.equal(before[name], after[name]) for name in shared if name.endswith("conv1.weight"))
    assert all(torch.equal(before[name], after[name]) for name in own)  # branches hold copies of these
    pointers = [parameter.data_ptr() for parameter in net.parameters()]
    assert len(set(pointers)) == len(pointers)


def test_only_the_global_branch_keeps_the_last_stride():
    net = network("mgn")
    x = net.shared(images(2))
    assert x.shape[2:] == (12, 4)
    assert [branch.stages(x).shape[2:] for branch in net.branches] == [(6, 2), (12, 4), (12, 4)]


def test_stripes_are_pooled_from_their_rows_only():
    branch = network("mgn").eval().branches[2]
    x = branch.stages(torch.randn(2, 32, 12, 4))
    changed = x.clone()
    changed[:, :, 4:8] += 1.0
    branch.stages = torch.nn.Identity()
    before, after = branch.vectors(x), branch.vectors(changed)
    assert [torch.equal(one, two) for one, two in zip(before, after, strict=True)] == [False, True, False, True]
    torch.testing.assert_close(before[0], x.amax((2, 3)))
    torch.testing.assert_close(before[3], x[:, :, 8:].amax((2, 3)))


@pytest.mark.parametrize(
    "pool, expected",
    [
        ("max", lambda x: x.amax((2, 3))),
        ("avg", lambda x: x.mean((2, 3))),
        ("gem", lambda x: x.clamp_min(1e-6).pow(3).mean((2, 3)).pow(1 / 3)),
    ],
)
def test_pooling_kinds(pool, expected):
    branch = network("mgn", pool=pool).branches[1]
    branch.stages = torch.nn.Identity()
    x = torch.rand(2, CHANNELS, 12, 4)
    torch.testing.assert_close(branch.vectors(x)[0], expected(x))
    torch.testing.assert_close(branch.vectors(x)[2], expected(x[:, :, 6:]))


def test_every_parameter_learns():
    for fields in ({}, {"pool": "gem", "neck": "bn", "classifier": "cosine"}):
        net = network("mgn", **fields)
        before = {name: value.clone() for name, value in net.named_parameters()}
        step(net, cosine="classifier" in fields)
        same = [name for name, value in net.named_parameters() if torch.equal(value, before[name])]
        assert all(name.endswith("bn.bias") and "reductions" in name for name in same), same
        assert bool(same) is ("neck" in fields)


def test_triplets_do_not_reach_the_parts_unless_asked():
    for features, reached in (("globals", False), ("all", True), ("concat", True)):
        net = network("mgn", branches="3").train()
        outputs = net(images())
        step(net, loss=LossConfig(softmax=1e-30, features=features))
        moved = net.branches[0].reductions[2].linear.weight.grad.abs().sum() > 1e-12
        assert bool(moved) is reached, features
        assert len(outputs.locals[0]) == 3


@pytest.mark.parametrize(
    "branches, vectors, names",
    [
        ("1", 1, []),
        ("2", 3, ["part-2"]),
        ("1,3", 5, ["part-3"]),
        ("1,2", 4, ["part-2"]),
        ("1,2,4", 9, ["part-2", "part-4"]),
        ("2,2", 6, ["part-2", "part-2-2"]),
    ],
)
def test_variants_of_branches(branches, vectors, names):
    net = network("mgn", branches=branches)
    assert len(step(net).logits) == vectors
    assert net.feature_size == 6 * vectors == net.eval()(images()).shape[1]
    assert list(net.cuts(images(2))) == names


def test_branches_without_stripes_are_mgn_with_as_many_branches():
    net = network("mgn_globals")
    assert [branch.stripes for branch in net.branches] == [1, 1, 1]
    assert len(step(net).logits) == 3 and net.cuts(images(2)) == {}


@pytest.mark.parametrize("branch, part", [("1", slice(0, 6)), ("2", slice(6, 24)), ("3", slice(24, 48))])
def test_one_branch_is_tested_of_a_network_trained_with_all(branch, part):
    whole, one = randomise(network("mgn")), randomise(network("mgn", test_branch=branch))
    assert len(one.train()(images()).logits) == 8
    whole.train()(images())
    assert torch.equal(one.eval()(images()), whole.eval()(images())[:, part])
    assert one.feature_size == part.stop - part.start
    with pytest.raises(UsageError, match="test_branch"):
        config(test_branch="4")


def test_sizes_that_stripes_do_not_divide_are_refused_or_cut_unevenly():
    with pytest.raises(UsageError, match="13 rows has no 2 equal stripes.*height_px.*no-strict-stripes"):
        network("mgn").eval()(images(size=(104, 32)))
    net = network("mgn", strict_stripes=False)
    step(net, size=(104, 32))
    features = net.eval()(images(size=(104, 32)))
    assert features.shape == (6, 48) and features.isfinite().all()
    fitting = randomise(network("mgn")), randomise(network("mgn", strict_stripes=False))
    assert torch.equal(*(one(images()) for one in fitting))


@pytest.mark.parametrize("pool", ["max", "avg", "gem"])
def test_uneven_stripes_cover_the_map(pool):
    branch = network("mgn", pool=pool, strict_stripes=False).branches[2]
    branch.stages = torch.nn.Identity()
    x = torch.rand(2, CHANNELS, 13, 4, requires_grad=True)
    sum(vector.sum() for vector in branch.vectors(x)[1:]).backward()
    if pool != "max":
        assert (x.grad != 0).all()
    whole, *stripes = branch.vectors(x)
    if pool == "max":
        assert torch.equal(whole, torch.stack(stripes).amax(0))


def test_cuts_are_even():
    cuts = network("mgn").cuts(images(2))
    torch.testing.assert_close(cuts["part-3"], torch.tensor([[0, 1 / 3, 2 / 3, 1]] * 2))
    torch.testing.assert_close(cuts["part-2"], torch.tensor([[0, 0.5, 1]] * 2))


def test_the_same_generator_gives_the_same_network_and_leaves_the_default_one_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    one, two, other = network("mgn", seed=3), network("mgn", seed=3), network("mgn", seed=4)
    assert torch.equal(torch.rand(1), expected)
    pairs = [(value, two.state_dict()[name], other.state_dict()[name]) for name, value in one.state_dict().items()]
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)
    assert parameters(one) == parameters(two)
