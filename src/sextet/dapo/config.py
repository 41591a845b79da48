"""Presets of DAPO; the settings themselves, with published values beside ours, are in `settings`."""

from __future__ import annotations

from collections.abc import Callable

from sextet.dapo.settings import (
    METHODS,
    Config,
    EvaluationConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    SamplingConfig,
    TaskConfig,
    resolve,
)

__all__ = [
    "METHODS",
    "PRESETS",
    "Config",
    "EvaluationConfig",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
    "RolloutConfig",
    "SamplingConfig",
    "TaskConfig",
    "resolve",
]

PRESETS: dict[str, Callable[[], Config]] = {}
