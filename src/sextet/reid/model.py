"""From settings to a network."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from sextet.reid.baselines import PCB, Global, bot
from sextet.reid.mgn import MGN
from sextet.reid.mobilenet import MobileNetV2
from sextet.reid.resnet import ResNet
from sextet.reid.rmgl import RMGL
from sextet.reid.settings import ModelConfig
from sextet.reid.weights import load_weights

log = logging.getLogger("sextet.reid")
Trunk = ResNet | MobileNetV2
WIDE = 1.7  # width of the "wide" global network: as many parameters and operations as MGN on the small trunk


def build_trunk(config: ModelConfig, method: str) -> Trunk:
    """Returns the trunk, with the weights of the file that the settings name.

    Raises:
        DataError: The file's weights do not fit.
    """
    if config.backbone == "small":
        trunk: Trunk = ResNet.small(config.width * (WIDE if method == "wide" else 1.0))
    elif config.backbone == "mobilenetv2":
        trunk = MobileNetV2()
    else:
        trunk = ResNet.of_depth(int(config.backbone.removeprefix("resnet")), ibn=config.ibn)
    if config.weights:
        for note in load_weights(trunk, config.weights):
            log.warning(note)
    return trunk


def build_model(
    method: str,
    config: ModelConfig,
    people: int,
    *,
    trunk: Mapping[str, Tensor] | None = None,
    built: Trunk | None = None,
    rng: torch.Generator | None = None,
) -> nn.Module:
    """Returns the network of a method.

    Args:
        method: Key of METHODS.
        config: Its settings; methods that are variants of another change some.
        people: Classes.
        trunk: Weights of the trunk, in place of the settings' file.
        built: A trunk to use.
        rng: Source of the initial weights; by default torch's own.
    """
    if rng is not None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.set_state(rng.get_state())
            return build_model(method, config, people, trunk=trunk, built=built)
    built = built or build_trunk(config, method)
    if trunk is not None:
        built.load_state_dict(trunk)
    stages = built.stages()
    if method in ("global", "wide"):
        return Global(stages, people, config)
    if method == "bot":
        return bot(stages, people, config)
    if method == "pcb":
        return PCB(stages, people, config)
    if method == "mgn":
        return MGN(stages, people, config)
    if method == "mgn_globals":
        return MGN(stages, people, replace(config, branches="1,1,1"))
    if method == "rmgl_uniform":
        config = replace(config, bands="uniform")
    return RMGL(stages, people, config)


def for_testing(network: nn.Module) -> nn.Module:
    """Returns a copy in evaluation mode whose normalisations are folded into the convolutions before them.

    It is faster and gives the same features but for rounding.
    """
    folded = copy.deepcopy(network).eval()
    for module in list(folded.modules()):
        children = list(module.named_children())
        for (name, first), (place, second) in zip(children, children[1:], strict=False):
            if isinstance(first, nn.Conv2d) and isinstance(second, nn.BatchNorm2d):
                setattr(module, name, fuse_conv_bn_eval(first, second))
                setattr(module, place, nn.Identity())
    return folded
