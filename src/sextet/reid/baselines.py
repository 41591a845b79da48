"""Baselines in the same trainer: a global ResNet, the strong baseline BoT (Luo et al. 2019), PCB (Sun et al. 2018)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from sextet.reid.heads import Classifier, Outputs, Pool, Reduction, even_cuts
from sextet.reid.resnet import Stages, without_stride
from sextet.reid.settings import ModelConfig

PCB_STRIPES = 6


class Global(nn.Module):
    """One vector of the whole map, reduced, classified and tested.

    Args:
        stages: A trunk in pieces.
        people: Classes.
        config: Settings of pooling, neck and what is classified.
        keep_stride: Keep the last stage's stride of 2; the strong baseline does not.
    """

    def __init__(self, stages: Stages, people: int, config: ModelConfig, *, keep_stride: bool = True) -> None:
        super().__init__()
        last = stages.res5 if keep_stride else without_stride(stages.res5)
        self.trunk = nn.Sequential(stages.res2, stages.res3, stages.res4_first, stages.res4_rest, last)
        channels, features = stages.channels[3], config.feature_size
        self.pool = Pool(config.pool, 1)
        self.reduction = Reduction(channels, features, config.neck)
        self.full = config.full
        self.classifier = Classifier(channels if self.full else features, people, config.classifier)
        self.feature_size = features

    def forward(self, x: Tensor) -> Outputs | Tensor:
        """(B, 3, H, W) -> outputs in training, features (B, feature_size) else."""
        vector = self.pool(self.trunk(x)).squeeze(2)
        metric, feature = self.reduction(vector)
        if not self.training:
            tested: Tensor = feature
            return tested
        return Outputs([self.classifier(vector if self.full else feature)], [metric], [])

    def cuts(self, x: Tensor) -> dict[str, Tensor]:
        """A global network cuts nothing."""
        return {}


def bot(stages: Stages, people: int, config: ModelConfig) -> Global:
    """The strong baseline: no last stride, mean pooling, BN neck."""
    return Global(stages, people, replace(config, pool="avg", neck="bn"), keep_stride=False)


class PCB(nn.Module):
    """The part-based convolutional baseline: six stripes, each reduced and classified by itself; softmax loss only."""

    def __init__(self, stages: Stages, people: int, config: ModelConfig) -> None:
        super().__init__()
        last = without_stride(stages.res5)
        self.trunk = nn.Sequential(stages.res2, stages.res3, stages.res4_first, stages.res4_rest, last)
        self.pool = Pool("avg", PCB_STRIPES, strict=config.strict_stripes)
        size = config.feature_size
        self.reductions = nn.ModuleList(Reduction(stages.channels[3], size, "relu") for _ in range(PCB_STRIPES))
        self.classifiers = nn.ModuleList(Classifier(size, people, config.classifier) for _ in range(PCB_STRIPES))
        self.feature_size = PCB_STRIPES * size

    def forward(self, x: Tensor) -> Outputs | Tensor:
        """(B, 3, H, W) -> outputs in training, features (B, feature_size) else."""
        vectors = self.pool(self.trunk(x)).unbind(2)
        features = [reduction(vector)[1] for reduction, vector in zip(self.reductions, vectors, strict=True)]
        if not self.training:
            return torch.cat(features, 1)
        logits = [layer(feature) for layer, feature in zip(self.classifiers, features, strict=True)]
        return Outputs(logits, [], [features])

    def cuts(self, x: Tensor) -> dict[str, Tensor]:
        """Images -> the six equal stripes, (B, 7) shares of the height."""
        return {f"part-{PCB_STRIPES}": even_cuts(len(x), PCB_STRIPES)}
