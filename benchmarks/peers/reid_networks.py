"""Networks of others, by the paths of their checkouts: torchvision, XingangPan/IBN-Net, seathiefwang/MGN-pytorch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

_LIBRARIES = []


def torchvision_models() -> ModuleType:
    """Returns torchvision.models; operators that a build for another torch lacks are declared, so that it imports."""
    if not _LIBRARIES:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)
    import torchvision.models

    return torchvision.models  # type: ignore[no-any-return]


def ibn_net(checkout: Path) -> ModuleType:
    """Returns the module ibnnet.resnet_ibn of the checkout."""
    sys.path.insert(0, str(checkout))
    import ibnnet.resnet_ibn

    return ibnnet.resnet_ibn  # type: ignore[no-any-return]


def third_party_mgn(checkout: Path, *, num_classes: int) -> nn.Module:
    """Returns the MGN of seathiefwang/MGN-pytorch with max pooling and 256-d features, its ResNet-50 untrained."""
    resnet = torchvision_models().resnet
    module = _by_path("third_party_mgn", checkout / "model" / "mgn.py")
    module.resnet50 = lambda pretrained: resnet.resnet50()  # the checkout would download ImageNet weights
    network: nn.Module = module.MGN(SimpleNamespace(num_classes=num_classes, feats=256, pool="max"))
    return network


def third_party_triplets(checkout: Path) -> tuple[nn.Module, nn.Module]:
    """Returns the checkout's batch-hard losses with margin 1.2: the one that loops over anchors, and the vectorised."""
    path = checkout / "loss" / "triplet.py"
    # The loop calls addmm_ with an argument order that torch has removed.
    source = path.read_text().replace(
        "dist.addmm_(1, -2, inputs, inputs.t())", "dist.addmm_(inputs, inputs.t(), beta=1, alpha=-2)"
    )
    # size_average=True is deprecated and means reduction="mean", the default.
    source = source.replace("self.margin,\n                                     self.size_average)", "self.margin)")
    module = ModuleType("third_party_triplet")
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module.TripletLoss(margin=1.2), module.TripletSemihardLoss("cpu", margin=1.2)


def randomise(network: nn.Module, seed: int) -> None:
    """Gives every weight and every statistic of a batch normalisation a random value that keeps activations finite."""
    rng = torch.Generator().manual_seed(seed)
    for name, value in network.state_dict().items():
        if name.endswith("running_var") or (name.endswith("weight") and value.ndim == 1):
            value.copy_(0.5 + torch.rand(value.shape, generator=rng))
        elif name.endswith(("running_mean", "bias")):
            value.copy_(0.1 * torch.randn(value.shape, generator=rng))
        elif value.is_floating_point():
            fan_in = max(1, value[0].numel())
            value.copy_(torch.randn(value.shape, generator=rng) * fan_in**-0.5)


def _by_path(name: str, path: Path) -> Any:
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None or not path.exists():
        sys.exit(f"{path} is missing: give the folder of the checkout")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
