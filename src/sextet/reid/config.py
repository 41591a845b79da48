"""Presets of MGN and RMGL; the settings themselves, with published values beside ours, are in `settings`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sextet.reid.settings import (
    METHODS,
    VARIANTS,
    AugmentConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
)

__all__ = [
    "METHODS",
    "MGN_PRESETS",
    "RMGL_PRESETS",
    "VARIANTS",
    "AugmentConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
]

MARKET = DataConfig(format="market1501", root="Market-1501-v15.09.15")


def fast() -> Config:
    """MGN on the synthetic benchmark from one trunk: minutes on one core, 1 GB."""
    return Config(
        model=ModelConfig(feature_size=128),
        loss=LossConfig(normalise=True, ramp_start=0.1, ramp_end=0.5),
        optim=OptimConfig(epochs=12, learning_rate=2e-3, warmup=1, trunk_epochs=12),
        augment=AugmentConfig(shift=0.5, erase=0.5),
    )


def smoke() -> Config:
    """Every part of the training in seconds; learns nothing."""
    base = fast()
    return replace(
        base,
        model=replace(base.model, width=0.34, feature_size=16),
        optim=replace(base.optim, people=4, images=2, epochs=0.2, trunk_epochs=0.1),
        data=replace(base.data, people=12),
    )


def paper() -> Config:
    """The values of the MGN paper as its replications give them, on Market-1501: a GPU and ImageNet weights needed."""
    return Config(
        height_px=384,
        width_px=128,
        model=ModelConfig(backbone="resnet50"),
        loss=LossConfig(margin=1.2),
        optim=OptimConfig(epochs=80, name="sgd", learning_rate=0.01, schedule="steps", milestones="40,60"),
        data=MARKET,
    )


def long() -> Config:
    """What replications of MGN needed: amsgrad, 400 epochs of 4 images a person, random erasing; a GPU needed."""
    base = paper()
    return replace(
        base,
        model=replace(base.model, classify="reduced"),
        loss=replace(base.loss, metric=2.0),
        optim=replace(
            base.optim, epochs=400, epoch="ids", name="amsgrad", learning_rate=2e-4, milestones="320,380"
        ),
        augment=AugmentConfig(erase=0.5),
    )  # fmt: skip


def strong() -> Config:
    """The MGN recipe of fast-reid, without its AutoAugment, on Market-1501: a GPU and ImageNet weights needed."""
    base = paper()
    return replace(
        base,
        model=replace(
            base.model, ibn=True, pool="gem", neck="bn", classifier="cosine", classify="reduced"
        ),
        loss=replace(base.loss, kind="soft", features="concat", smoothing=0.1),
        optim=replace(
            base.optim, people=4, images=16, epochs=60, name="adam", learning_rate=3.5e-4, warmup=10,
            schedule="cosine", cosine_start=30, final_rate=7e-7, freeze=1000,
        ),
        augment=AugmentConfig(pad_px=10, erase=0.5),
    )  # fmt: skip


def compare() -> Config:
    """Global, width-matched, PCB, MGN and RMGL over 5 seeds on the drawn benchmark: an hour on two cores."""
    return replace(fast(), method="compare", workers="process:2")


def quick() -> Config:
    """The small comparison, untrained, global and MGN: 4 minutes on two cores, 2 GB."""
    base = fast()
    return replace(
        base, method="compare", methods="global,mgn", num_seeds=2, workers="process:2",
        optim=replace(base.optim, epochs=6, trunk_epochs=6),
    )  # fmt: skip


def rmgl_compare() -> Config:
    """What balanced bands and random shifting do where people are misaligned, 3 seeds: 40 minutes (estimated)."""
    return replace(
        fast(), method="compare", methods="global,rmgl_uniform,rmgl_unshifted,rmgl", num_seeds=3, workers="process:2",
        data=DataConfig(variant="misaligned"),
    )  # fmt: skip


def rmgl_fast() -> Config:
    """RMGL on the synthetic benchmark from one trunk: minutes on one core, 1 GB."""
    return replace(fast(), method="rmgl")


def rmgl_smoke() -> Config:
    """Every part of the training in seconds; learns nothing."""
    return replace(smoke(), method="rmgl")


def rmgl_paper() -> Config:
    """RMGL with the strong baseline's schedule, our choice, on Market-1501: a GPU and ImageNet weights needed."""
    base = paper()
    return replace(
        base,
        method="rmgl",
        model=replace(base.model, neck="bn", pool="max"),
        loss=replace(base.loss, margin=0.3, smoothing=0.1),
        optim=replace(
            base.optim, epochs=120, name="adam", learning_rate=3.5e-4, warmup=10, milestones="40,70"
        ),
        augment=AugmentConfig(shift=0.5, erase=0.5),
    )  # fmt: skip


MGN_PRESETS: dict[str, Callable[[], Config]] = {
    "fast": fast, "quick": quick, "compare": compare, "smoke": smoke, "paper": paper, "long": long, "strong": strong,
}  # fmt: skip
RMGL_PRESETS: dict[str, Callable[[], Config]] = {
    "fast": rmgl_fast, "compare": rmgl_compare, "smoke": rmgl_smoke, "paper": rmgl_paper,
}  # fmt: skip
