"""ResNet trunks (He et al. 2016) whose weights have torchvision's names, with IBN-a (Pan et al. 2018) as an option.

Shapes: B images, C channels, H and W rows and columns.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


class Stages(NamedTuple):
    """A trunk in pieces, run one after the other: (B, 3, H, W) -> (B, channels[-1], H/32, W/32).

    `res2` includes the stem; `res4_first` is the first block of res4, which MGN still shares.
    """

    res2: nn.Module
    res3: nn.Module
    res4_first: nn.Module
    res4_rest: nn.Module
    res5: nn.Module
    channels: tuple[int, int, int, int]
    """Channels after res2, res3, res4 and res5."""


def without_stride(stage: nn.Module) -> nn.Module:
    """Sets every stride of a stage to 1, in place: the last stage then keeps the size of its input."""
    for module in stage.modules():
        if isinstance(module, nn.Conv2d):
            module.stride = (1, 1)
    return stage


class Pointwise(nn.Conv2d):
    """1x1 convolution; where channels are last in memory, a matrix product, which CPUs do about a tenth faster."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, out, H/stride, W/stride)."""
        if x.is_cuda or self.stride != (1, 1) or not x.is_contiguous(memory_format=torch.channels_last):
            return super().forward(x)
        return functional.linear(x.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class IBN(nn.Module):
    """Instance normalisation of the first half of the channels, batch normalisation of the others; names as IBN-Net."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.split = channels // 2
        self.IN = nn.InstanceNorm2d(self.split, affine=True)
        self.BN = nn.BatchNorm2d(channels - self.split)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> the same shape."""
        first, second = x[:, : self.split], x[:, self.split :]
        return torch.cat((self.IN(first.contiguous()), self.BN(second.contiguous())), 1)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int, downsample: nn.Module | None, ibn: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = IBN(width) if ibn else nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, width, H/stride, W/stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x)).add_(shortcut)
        return nn.functional.relu_(x)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; the 3x3 has the stride, as in torchvision."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int, downsample: nn.Module | None, ibn: bool) -> None:
        super().__init__()
        self.conv1 = Pointwise(channels, width)
        self.bn1 = IBN(width) if ibn else nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = Pointwise(width, width * 4)
        self.bn3 = nn.BatchNorm2d(width * 4)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, 4 width, H/stride, W/stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x)).add_(shortcut)
        return nn.functional.relu_(x)


class ResNet(nn.Module):
    """The trunk of a ResNet, without its classifier.

    Args:
        layers: Blocks of each stage.
        widths: Widths of the stages' blocks.
        bottleneck: Bottleneck blocks instead of basic ones.
        ibn: IBN-a in the first three stages.
        thin_stem: A 3x3 convolution of stride 2 without pooling, for small images, instead of 7x7 and max pooling.
    """

    def __init__(
        self,
        layers: tuple[int, ...],
        widths: tuple[int, ...] = (64, 128, 256, 512),
        *,
        bottleneck: bool = False,
        ibn: bool = False,
        thin_stem: bool = False,
    ) -> None:
        super().__init__()
        block = Bottleneck if bottleneck else BasicBlock
        stem = widths[0]
        self.conv1 = nn.Conv2d(3, stem, 3 if thin_stem else 7, 2, 1 if thin_stem else 3, bias=False)
        self.bn1 = nn.BatchNorm2d(stem)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if thin_stem else nn.MaxPool2d(3, 2, 1)
        channels, stages = stem, list[nn.Sequential]()
        for number, (count, width) in enumerate(zip(layers, widths, strict=True)):
            stage = nn.Sequential()
            for index in range(count):
                stride = 2 if number and not index else 1
                out = width * block.expansion
                shortcut = None
                if stride != 1 or channels != out:
                    shortcut = nn.Sequential(Pointwise(channels, out, stride), nn.BatchNorm2d(out))
                stage.append(block(channels, width, stride, shortcut, ibn and number < 3))
                channels = out
            stages.append(stage)
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.channels = tuple(width * block.expansion for width in widths)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @classmethod
    def of_depth(cls, depth: int, *, ibn: bool = False) -> Self:
        """Returns ResNet-18, 34, 50 or 101."""
        return cls(LAYERS[depth], bottleneck=depth >= 50, ibn=ibn)

    @classmethod
    def small(cls, width: float = 1.0) -> Self:
        """Returns a trunk for images of 96x32 pixels on CPUs: 8 layers, stride 16."""
        widths = tuple(8 * max(1, round(base * width / 8)) for base in (24, 48, 96, 192))
        return cls((1, 1, 2, 1), widths, thin_stem=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, C, H/32, W/32); the small trunk: H/16, W/16."""
        for stage in self.stages()[:5]:
            x = stage(x)
        return x

    def stages(self) -> Stages:
        """Returns the trunk in pieces that share its weights."""
        first, *rest = self.layer3.children()
        stem = nn.Sequential(self.conv1, self.bn1, self.relu, self.maxpool, self.layer1)
        return Stages(stem, self.layer2, first, nn.Sequential(*rest), self.layer4, self.channels)  # type: ignore[arg-type]
