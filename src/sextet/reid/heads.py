"""What the networks share behind their trunks: pooling, reductions, classifiers.

Shapes: B images, C channels, H and W rows and columns, n stripes, F features, K people.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sextet.core.errors import UsageError
from sextet.reid.settings import ModelConfig


class Outputs(NamedTuple):
    """What a network in training returns."""

    logits: list[Tensor]
    """(B, K) of every classified feature."""
    globals: list[Tensor]
    """(B, F) features of whole images, for the metric loss."""
    locals: list[list[Tensor]]
    """(B, F) features of the stripes of each branch, for variants of the metric loss."""


class Pool(nn.Module):
    """Pools rows into n stripes of equal height: maximum, mean, or generalised mean with a learned exponent."""

    def __init__(self, kind: str, stripes: int, *, strict: bool = True) -> None:
        super().__init__()
        self.kind, self.stripes, self.strict = kind, stripes, strict
        self.exponent = nn.Parameter(torch.tensor(3.0)) if kind == "gem" else None

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, n).

        Raises:
            UsageError: The stripes do not divide H, and must.
        """
        if self.exponent is None:
            return self.pooled(x)
        return self.pooled(x.clamp_min(1e-6) ** self.exponent) ** (1 / self.exponent)

    def pooled(self, x: Tensor) -> Tensor:
        """Maximum or mean of each stripe, (B, C, H, W) -> (B, C, n); stripes of unequal height share rows."""
        height = x.shape[2]
        if height % self.stripes:
            if self.strict:
                raise UsageError(
                    f"a feature map of {height} rows has no {self.stripes} equal stripes: choose a height_px whose map "
                    "they divide (a multiple of 6 rows for 2 and 3), or --model.no-strict-stripes"
                )
            pool = functional.adaptive_max_pool2d if self.kind == "max" else functional.adaptive_avg_pool2d
            return pool(x, (self.stripes, 1)).squeeze(3)
        stripes: Tensor = x.permute(0, 2, 3, 1).unflatten(1, (self.stripes, -1))  # (B, n, H / n, W, C)
        pooled = stripes.amax((2, 3)) if self.kind == "max" else stripes.mean((2, 3))
        return pooled.transpose(1, 2)


class Reduction(nn.Module):
    """Reduces a pooled vector: linear without bias, batch normalisation, and ReLU unless the neck is "bn".

    Initialised as in the replications of MGN: Kaiming-normal; scale around 1 (std 0.02), bias 0. With the neck "bn"
    (Luo et al. 2019) the bias stays 0 and the metric loss sees the vector before the normalisation.
    """

    def __init__(self, channels: int, features: int, neck: str) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, features, bias=False)
        self.bn = nn.BatchNorm1d(features)
        self.neck = neck
        nn.init.kaiming_normal_(self.linear.weight, mode="fan_in")
        nn.init.normal_(self.bn.weight, 1.0, 0.02)
        self.bn.bias.requires_grad_(neck != "bn")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C) -> the feature for the metric loss and the one to classify and test with, both (B, F)."""
        x = self.linear(x)
        y = self.bn(x)
        if self.neck == "bn":
            return x, y
        y = functional.relu(y)
        return y, y


class Classifier(nn.Module):
    """Logits without bias; with "cosine" they are cosines, for the circle softmax."""

    def __init__(self, features: int, people: int, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(people, features))
        self.cosine = kind == "cosine"
        nn.init.normal_(self.weight, 0.0, 0.001 if kind == "linear" else 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, F) -> (B, K)."""
        if self.cosine:
            return functional.linear(functional.normalize(x), functional.normalize(self.weight))
        return functional.linear(x, self.weight)


def even_cuts(images: int, stripes: int) -> Tensor:
    """Returns the cut rows of equal stripes as shares of the height, (B, n + 1)."""
    return torch.linspace(0, 1, stripes + 1).expand(images, -1)


def names_of(stripes: tuple[int, ...]) -> list[str]:
    """Names of branches: "global" for one stripe, else "part-n"; repeated ones get a number."""
    names: list[str] = []
    for count in stripes:
        name = "global" if count == 1 else f"part-{count}"
        names.append(name if name not in names else f"{name}-{len(names) + 1}")
    return names


def feature_part(config: ModelConfig, counts: tuple[int, ...]) -> slice:
    """Which of the concatenated features are tested: all, or those of `test_branch`; counts are per branch."""
    if not config.test_branch:
        return slice(None)
    place = config.branches.split(",").index(config.test_branch)
    return slice(sum(counts[:place]) * config.feature_size, sum(counts[: place + 1]) * config.feature_size)
