"""MobileNetV2 of width 1 (Sandler et al. 2018) as a trunk: torchvision's names of weights, stages like a ResNet's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn

from sextet.reid.resnet import Pointwise, Stages

Value = TypeVar("Value")
# (expansion, channels, blocks, stride of the first block), table 2 of the paper.
_GROUPS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
_FEATURES = 1280


class MobileNetV2(nn.Module):
    """A MobileNetV2 without its classifier."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(3, 32, 3, stride=2)]
        channels = 32
        for expansion, out, blocks, stride in _GROUPS:
            for block in range(blocks):
                layers.append(InvertedResidual(channels, out, 1 if block else stride, expansion))
                channels = out
        self.features = nn.Sequential(*layers, _convolution(channels, _FEATURES, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, 1280, H/32, W/32)."""
        features: Tensor = self.features(x)
        return features

    def stages(self) -> Stages:
        """Returns the trunk in pieces that share its weights, cut where a ResNet has the same strides."""
        blocks = self.features
        return Stages(blocks[:4], blocks[4:7], blocks[7], blocks[8:14], blocks[14:], (24, 32, 96, _FEATURES))

    @staticmethod
    def rename_keys(state: Mapping[str, Value]) -> dict[str, Value]:
        """Returns the state dict with torchvision's names; tonylins/pytorch-mobilenet-v2 numbers the layers flatly."""
        if not any(name.endswith("features.1.conv.4.weight") for name in state):
            return dict(state)
        return {_FLAT.sub(_nested, name): value for name, value in state.items()}


class InvertedResidual(nn.Module):
    """Expand by 1x1, filter each channel by 3x3, project by 1x1 without activation; added to the input if it fits."""

    def __init__(self, channels: int, out: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels * expansion
        expand = [_convolution(channels, hidden, 1)] if expansion > 1 else []
        filter_each = _convolution(hidden, hidden, 3, stride=stride, groups=hidden)
        self.conv = nn.Sequential(*expand, filter_each, Pointwise(hidden, out), nn.BatchNorm2d(out))
        self.adds = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, out, H/stride, W/stride)."""
        out: Tensor = self.conv(x)
        return x + out if self.adds else out


_FLAT = re.compile(r"features\.(\d+)\.conv\.(\d+)\.")


def _nested(match: re.Match[str]) -> str:
    block, layer = int(match[1]), int(match[2])
    activated = 1 if block == 1 else 2
    place = f"{layer // 3}.{layer % 3}" if layer < 3 * activated else f"{layer - 2 * activated}"
    return f"features.{block}.conv.{place}."


def _convolution(channels: int, out: int, size: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(channels, out, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(Pointwise(channels, out) if size == 1 else layer, nn.BatchNorm2d(out), nn.ReLU6(inplace=True))
