"""Trunks have the names of weights that torchvision and IBN-Net publish, and compute alike in every memory layout."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from sextet.reid.mobilenet import MobileNetV2
from sextet.reid.resnet import Pointwise, ResNet, without_stride

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "reid_trunks.json").read_text())


def fingerprint(state):
    lines = [f"{name} {tuple(value.shape)}" for name, value in sorted(state.items())]
    return {"tensors": len(lines), "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest()}


@pytest.mark.parametrize("depth", [18, 34, 50, 101])
@pytest.mark.parametrize("ibn", [False, True])
def test_resnets_have_the_published_names(depth, ibn):
    with torch.device("meta"):
        network = ResNet.of_depth(depth, ibn=ibn)
    assert fingerprint(network.state_dict()) == GOLDEN[f"resnet{depth}_ibn_a" if ibn else f"resnet{depth}"]


def test_mobilenet_has_the_published_names():
    with torch.device("meta"):
        assert fingerprint(MobileNetV2().state_dict()) == GOLDEN["mobilenet_v2"]


@pytest.mark.parametrize("build", [lambda: ResNet.of_depth(50), lambda: ResNet.of_depth(18), MobileNetV2])
def test_stages_halve_the_map_where_mgn_expects_it(build):
    with torch.device("meta"):
        stages = build().stages()
        x, shapes = torch.zeros(1, 3, 384, 128), []
        for stage in stages[:5]:
            x = stage(x)
            shapes.append((x.shape[1], x.shape[2], x.shape[3]))
    channels = stages.channels
    assert [shape[1:] for shape in shapes] == [(96, 32), (48, 16), (24, 8), (24, 8), (12, 4)]
    assert (shapes[0][0], shapes[1][0], shapes[3][0], shapes[4][0]) == channels


@pytest.mark.parametrize("build", [lambda: ResNet.of_depth(50), MobileNetV2])
def test_the_last_stage_keeps_its_size_without_stride(build):
    with torch.device("meta"):
        stages = build().stages()
        x = torch.zeros(1, 3, 384, 128)
        for stage in stages[:4]:
            x = stage(x)
        assert without_stride(stages.res5)(x).shape[2:] == (24, 8)


@pytest.mark.parametrize("stride", [1, 2])
def test_pointwise_convolutions_are_the_same_in_every_layout(stride):
    torch.manual_seed(0)
    layer = Pointwise(6, 10, stride).double()
    plain = nn.Conv2d(6, 10, 1, stride, bias=False).double()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 6, 8, 4, dtype=torch.float64)
    found = []
    for network, format in (
        (plain, torch.contiguous_format),
        (layer, torch.contiguous_format),
        (layer, torch.channels_last),
    ):
        pixels = x.clone(memory_format=format).requires_grad_()
        network.weight.grad = None
        out = network(pixels)
        out.square().sum().backward()
        found.append((out.detach(), pixels.grad, network.weight.grad))
    for others in found[1:]:
        for value, expected in zip(others, found[0], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
