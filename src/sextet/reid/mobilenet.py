"""MobileNetV2 of width 1 (Sandler et al. 2018) as a trunk: torchvision's names of weights, stages like a ResNet's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn

Value = TypeVar("Value")
# (expansion, channels, blocks, stride of the first block), table 2 of the paper.
_GROUPS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
_LAST_GROUP, _FEATURES = 5, 1280


class MobileNetV2(nn.Module):
    """A MobileNetV2 without its classifier.

    Args:
        last_stride: Stride of the last halving (features.14): 2 as published, 1 keeps maps at 1/16 of the image.
    """

    widths = (24, 24, 32, 96, _FEATURES)

    def __init__(self, *, last_stride: int = 1) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(3, 32, 3, stride=2)]
        channels = 32
        for group, (expansion, out, blocks, stride) in enumerate(_GROUPS):
            first = last_stride if group == _LAST_GROUP else stride
            for block in range(blocks):
                layers.append(InvertedResidual(channels, out, first if block == 0 else 1, expansion))
                channels = out
        self.features = nn.Sequential(*layers, _convolution(channels, _FEATURES, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the map (B, 1280, H/32, W/32) of images (B, 3, H, W); /16 with ``last_stride=1``."""
        return self.features(x)  # type: ignore[no-any-return]

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
        self.conv = nn.Sequential(*expand, filter_each, nn.Conv2d(hidden, out, 1, bias=False), nn.BatchNorm2d(out))
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
    return nn.Sequential(
        nn.Conv2d(channels, out, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU6(inplace=True),
    )
