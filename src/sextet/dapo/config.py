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


def fast() -> Config:
    """DAPO on the recall table with a tiny model: a minute on one core, 0.5 GB."""
    return Config(
        sampling=SamplingConfig(prompts=32, answers=8, max_tokens=4),
        optim=OptimConfig(steps=50, learning_rate=2e-4, minibatches=8, weight_decay=0.0),
        rollout=RolloutConfig(slots=1024),
        evaluation=EvaluationConfig(every=10, problems=200, samples=1, top_p=1.0),
    )


def smoke() -> Config:
    """Every part of the training in seconds; learns next to nothing."""
    return Config(
        model=ModelConfig(width=32, layers=1, warm_steps=60),
        sampling=SamplingConfig(prompts=4, answers=4, max_tokens=4),
        optim=OptimConfig(steps=3, learning_rate=1e-4, minibatches=2),
        evaluation=EvaluationConfig(problems=16, samples=2),
    )


def quick() -> Config:
    """A real model, SmolLM2-135M, learns two-digit addition by GRPO and by DAPO: 3 minutes on two cores, 4 GB."""
    return Config(method="ablate", ablation="addition", num_seeds=1, threads=2)


def ablate() -> Config:
    """The paper's six rows on three small tasks, 5 seeds."""
    return Config(method="ablate", workers="process:2")


PRESETS: dict[str, Callable[[], Config]] = {"fast": fast, "quick": quick, "ablate": ablate, "smoke": smoke}
