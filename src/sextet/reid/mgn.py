"""The multiple granularity network (Wang et al. 2018): a global branch and branches of 2 and 3 stripes.

| stage | at 384x128, ResNet-50 | shared |
|---|---|---|
| res2, res3, first block of res4 | 1024 x 24 x 8 | by all branches |
| other blocks of res4 | 1024 x 24 x 8 | one copy each |
| res5, global branch | 2048 x 12 x 4 | own |
| res5 without stride, part branches | 2048 x 24 x 8 | own |

Each branch max-pools its whole map and its stripes; a reduction of its own, not shared, makes 256 features of each of
the eight vectors. Whole-map vectors are classified before the reduction and part vectors after it; triplets see the
reduced whole-map features only. The test feature is all eight. Branches "1,1,1" are the same network without stripes.

Shapes: B images, C channels, H and W rows and columns, n stripes, F features.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sextet.reid.heads import Classifier, Outputs, Pool, Reduction, even_cuts, feature_part, names_of
from sextet.reid.resnet import Stages, without_stride
from sextet.reid.settings import ModelConfig


class Branch(nn.Module):
    """One branch: its own copy of the last stages, its stripes, their reductions and classifiers."""

    def __init__(self, stages: Stages, stripes: int, people: int, config: ModelConfig) -> None:
        super().__init__()
        last = copy.deepcopy(stages.res5)
        self.stages = nn.Sequential(copy.deepcopy(stages.res4_rest), last if stripes == 1 else without_stride(last))
        channels, features = stages.channels[3], config.feature_size
        self.stripes = stripes
        self.pool = Pool(config.pool, 1)
        self.stripe_pool = Pool(config.pool, stripes, strict=config.strict_stripes) if stripes > 1 else None
        count = 1 + (stripes if stripes > 1 else 0)
        self.reductions = nn.ModuleList(Reduction(channels, features, config.neck) for _ in range(count))
        self.full = config.full
        widths = [channels if self.full else features] + [features] * (count - 1)
        self.classifiers = nn.ModuleList(Classifier(width, people, config.classifier) for width in widths)

    def vectors(self, x: Tensor) -> list[Tensor]:
        """Shared map (B, C, H, W) -> pooled vectors of the whole map and of each stripe, (B, C') each."""
        x = self.stages(x)
        if self.stripe_pool is None:
            return [self.pool(x).squeeze(2)]
        stripes = self.stripe_pool(x)
        if self.pool.kind == "max":  # the maximum of the whole is the maximum over its stripes
            return [stripes.amax(2), *stripes.unbind(2)]
        return [self.pool(x).squeeze(2), *stripes.unbind(2)]

    def features(self, x: Tensor) -> Tensor:
        """Shared map -> features to test with, (B, F) for each vector side by side."""
        pairs = zip(self.reductions, self.vectors(x), strict=True)
        return torch.cat([reduction(vector)[1] for reduction, vector in pairs], 1)

    def forward(self, x: Tensor) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        """Shared map -> logits, whole-map feature and stripe features for the metric loss."""
        vectors = self.vectors(x)
        reduced = [reduction(vector) for reduction, vector in zip(self.reductions, vectors, strict=True)]
        classified = [vectors[0] if self.full else reduced[0][1], *(second for _, second in reduced[1:])]
        logits = [layer(vector) for layer, vector in zip(self.classifiers, classified, strict=True)]
        whole, *parts = (first for first, _ in reduced)
        return logits, whole, parts


class MGN(nn.Module):
    """The network.

    In training it returns :class:`Outputs`; else the test feature (B, feature_size), 2048 long by default, not
    normalised.

    Args:
        stages: A trunk in pieces; branches begin as copies of its last ones.
        people: Classes.
        config: Settings: branches, pooling, neck, what is classified.

    Raises:
        UsageError: In use: the stripes do not divide the feature map.
    """

    def __init__(self, stages: Stages, people: int, config: ModelConfig) -> None:
        super().__init__()
        self.shared = nn.Sequential(stages.res2, stages.res3, stages.res4_first)
        self.branches: Sequence[Branch] = nn.ModuleList(  # type: ignore[assignment]
            Branch(stages, stripes, people, config) for stripes in config.stripes
        )
        self.names = names_of(config.stripes)
        counts = tuple(1 + (stripes if stripes > 1 else 0) for stripes in config.stripes)
        self.tested = feature_part(config, counts)
        self.feature_size = len(range(sum(counts) * config.feature_size)[self.tested])

    def forward(self, x: Tensor) -> Outputs | Tensor:
        """(B, 3, H, W) -> outputs in training, features (B, feature_size) else."""
        x = self.shared(x)
        if not self.training:
            return torch.cat([branch.features(x) for branch in self.branches], 1)[:, self.tested]
        logits, wholes, parts = zip(*(branch(x) for branch in self.branches), strict=True)
        return Outputs([item for items in logits for item in items], list(wholes), list(parts))

    def cuts(self, x: Tensor) -> dict[str, Tensor]:
        """Images -> where each part branch cuts them, (B, n + 1) shares of the height."""
        pairs = zip(self.names, self.branches, strict=True)
        return {name: even_cuts(len(x), branch.stripes) for name, branch in pairs if branch.stripes > 1}
