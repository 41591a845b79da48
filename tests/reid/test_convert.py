"""Checkpoints of seathiefwang/MGN-pytorch: every tensor finds its place, and the folder works like a finished run."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import sextet
from sextet.core.errors import DataError, UsageError
from sextet.reid import convert as module
from sextet.reid.config import MGN_PRESETS
from sextet.reid.convert import convert, convert_mgn
from sextet.reid.model import build_model
from sextet.reid.resnet import ResNet
from sextet.reid.settings import ModelConfig

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "reid_trunks.json").read_text())["mgn_pytorch"]
CLASSIFIERS = ("2048_0", "2048_1", "2048_2", "256_1_0", "256_1_1", "256_2_0", "256_2_1", "256_2_2")


def their_state(people):
    """Their names and shapes, built from a ResNet-50; tensors without data."""
    with torch.device("meta"):
        trunk = ResNet.of_depth(50).state_dict()
        state = {}
        for name, value in trunk.items():
            stage, _, inner = name.partition(".")
            block, _, rest = inner.partition(".")
            shared = {"conv1": "0", "bn1": "1", "layer1": "4", "layer2": "5"}
            if stage in shared:
                state[f"backone.{shared[stage]}.{inner}"] = value
            elif stage == "layer3" and block == "0":
                state[f"backone.6.{rest}"] = value
            else:
                place = f"0.{int(block) - 1}" if stage == "layer3" else f"1.{block}"
                state |= {f"p{branch}.{place}.{rest}": value for branch in (1, 2, 3)}
        for number in range(8):
            state[f"reduction_{number}.0.weight"] = torch.empty(256, 2048, 1, 1)
            norm = torch.nn.BatchNorm1d(256).state_dict()
            state |= {f"reduction_{number}.1.{name}": value for name, value in norm.items()}
        for name in CLASSIFIERS:
            state[f"fc_id_{name}.weight"], state[f"fc_id_{name}.bias"] = torch.empty(people, 256), torch.empty(people)
    return state


def shapes(state):
    return {name: tuple(value.shape) for name, value in state.items()}


def test_the_synthetic_checkpoint_has_their_names_and_shapes():
    lines = [f"{name} {shape}" for name, shape in sorted(shapes(their_state(751)).items())]
    assert len(lines) == GOLDEN["tensors"]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == GOLDEN["sha256"]


@pytest.mark.parametrize("prefix", ["", "module.", "model."])
def test_every_tensor_fits_our_network(prefix):
    with torch.device("meta"):
        ours = build_model("mgn", ModelConfig(backbone="resnet50", classify="reduced"), 751)
    theirs = {prefix + name: value for name, value in their_state(751).items()}
    assert shapes(convert_mgn(theirs)) == shapes(ours.state_dict())


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("backone.4.2.conv3.weight", "shared.0.4.2.conv3.weight"),
        ("backone.5.0.bn1.bias", "shared.1.0.bn1.bias"),
        ("backone.6.downsample.1.running_var", "shared.2.downsample.1.running_var"),
        ("p1.0.4.conv2.weight", "branches.0.stages.0.4.conv2.weight"),
        ("p3.1.2.bn3.weight", "branches.2.stages.1.2.bn3.weight"),
        ("reduction_1.0.weight", "branches.1.reductions.0.linear.weight"),
        ("reduction_4.1.running_mean", "branches.1.reductions.2.bn.running_mean"),
        ("reduction_5.0.weight", "branches.2.reductions.1.linear.weight"),
        ("fc_id_2048_2.weight", "branches.2.classifiers.0.weight"),
        ("fc_id_256_1_1.weight", "branches.1.classifiers.2.weight"),
        ("fc_id_256_2_0.weight", "branches.2.classifiers.1.weight"),
    ],
)
def test_branches_and_parts_are_not_swapped(theirs, ours):
    state = {name: torch.zeros(1, 1) for name in their_state(2)} | {theirs: torch.ones(1, 1)}
    ones = [name for name, value in convert_mgn(state).items() if value.any()]
    assert ones == [ours]


def test_other_names_are_refused():
    with pytest.raises(DataError, match="layer1.0.conv1.weight is not of MGN-pytorch"):
        convert_mgn({"layer1.0.conv1.weight": torch.zeros(1)})


def test_a_converted_checkpoint_is_a_folder_that_loads(tmp_path, monkeypatch):
    # A small trunk has the same stages, so that its network can stand for theirs.
    base = MGN_PRESETS["paper"]()
    small = replace(base, height_px=96, width_px=32, model=replace(base.model, backbone="small", width=0.34))
    monkeypatch.setitem(module.MGN_PRESETS, "paper", lambda: small)
    torch.manual_seed(1)
    network = build_model("mgn", replace(small.model, classify="reduced"), 7).eval()
    back = {ours: theirs for theirs, ours in module._PREFIXES.items()}
    checkpoint = {}
    for name, value in network.state_dict().items():
        prefix = next(ours for ours in back if name.startswith(ours))
        checkpoint[back[prefix] + name.removeprefix(prefix)] = value
    checkpoint |= {f"fc_id_{name}.bias": torch.zeros(7) for name in CLASSIFIERS}
    torch.save(checkpoint, tmp_path / "model_best.pt")
    report = convert(tmp_path / "model_best.pt", out=tmp_path / "converted")
    assert report["people"] == 7 and "biases" in report["notes"][-1]
    model = sextet.load(str(tmp_path / "converted"))
    images = torch.randint(0, 256, (2, 3, 96, 32), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    pixels = normalised(images)
    with torch.no_grad():
        expected = functional.normalize(network(pixels) + network(pixels.flip(3)))
    assert abs(model.embed(images) - expected.numpy()).max() <= 1e-6
    with pytest.raises(UsageError, match="exists; choose another folder"):
        convert(tmp_path / "model_best.pt", out=tmp_path / "converted")


def normalised(images):
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (images / 255 - mean) / std
