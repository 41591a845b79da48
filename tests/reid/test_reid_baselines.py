"""The baselines: global, width-matched, BoT, PCB."""

import pytest
import torch
from nets import PEOPLE, images, network, parameters, step

from sextet.core.errors import UsageError


def test_global_is_one_reduced_feature_of_the_whole_map():
    net = network("global")
    outputs = step(net)
    assert [logits.shape for logits in outputs.logits] == [(6, PEOPLE)]
    assert len(outputs.globals) == 1 and outputs.locals == [] and net.feature_size == 6
    assert net.trunk(images(2)).shape == (2, 64, 6, 2)
    assert (
        net.classifier.weight.shape[1] == 64 and network("global", classify="reduced").classifier.weight.shape[1] == 6
    )
    assert net.cuts(images(2)) == {}


def test_the_wide_network_is_about_as_large_as_mgn():
    sizes = {method: parameters(network(method, width=1.0, feature_size=128)) for method in ("global", "wide", "mgn")}
    assert sizes["global"] < sizes["wide"]
    assert 0.8 < sizes["wide"] / sizes["mgn"] < 1.25, sizes


def test_bot_keeps_the_last_map_large_pools_means_and_tests_behind_its_neck():
    net = network("bot")
    outputs = step(net)
    assert net.trunk(images(2)).shape[2:] == (12, 4)
    assert net.pool.kind == "avg" and not net.reduction.bn.bias.requires_grad
    net.train()
    outputs = net(images())
    vector = net.pool(net.trunk(images())).squeeze(2)
    torch.testing.assert_close(outputs.globals[0], net.reduction.linear(vector))
    assert (net.eval()(images()) < 0).any()  # no ReLU


def test_pcb_classifies_and_tests_six_stripes():
    net = network("pcb")
    outputs = step(net)
    assert len(outputs.logits) == 6 and outputs.globals == [] and net.feature_size == 36
    assert net.eval()(images()).shape == (6, 36)
    cuts = net.cuts(images(2))["part-6"]
    torch.testing.assert_close(cuts, torch.linspace(0, 1, 7).expand(2, -1))
    with pytest.raises(UsageError, match="13 rows has no 6 equal stripes"):
        net(images(size=(104, 32)))


@pytest.mark.parametrize("method", ["global", "wide", "bot", "pcb"])
def test_every_parameter_learns(method):
    net = network(method)
    before = {name: value.clone() for name, value in net.named_parameters()}
    step(net)
    same = [name for name, value in net.named_parameters() if torch.equal(value, before[name])]
    assert same == (["reduction.bn.bias"] if method == "bot" else [])


def test_a_larger_trunk_fits_the_heads_too():
    net = network("rmgl", backbone="resnet18", branches="3").eval()
    with torch.no_grad():
        assert net(images(1, size=(192, 32))).shape == (1, 24)
