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
    PlanConfig,
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
    "PlanConfig",
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
    """SmolLM2-135M learns two-digit addition by GRPO and by DAPO, 3 seeds: 6 minutes on two cores, 4 GB."""
    return Config(method="ablate", ablation="addition", num_seeds=3, threads=2)


def laptop() -> Config:
    """SmolLM2-135M learns sums and differences of two or three numbers, of reasoning-gym: 25 CPU minutes, 6 GB."""
    return Config(
        model=ModelConfig(source="smollm2"),
        task=TaskConfig(
            name="gym:chain_sum?min_terms=2&max_terms=3&min_digits=1&max_digits=2", chat=False, shots=4, size=4000,
        ),
        sampling=SamplingConfig(prompts=8, answers=16, max_tokens=8),
        optim=OptimConfig(steps=60, learning_rate=1e-5, minibatches=2, weight_decay=0.0),
        rollout=RolloutConfig(slots=128),
        evaluation=EvaluationConfig(every=10, problems=128, samples=4, top_p=1.0),
        threads=2,
    )  # fmt: skip


def paper() -> Config:
    """The values of the paper and of its public recipe, Qwen2.5-32B on 128 GPUs of 80 GB: not run by us."""
    return Config(
        model=ModelConfig(source="Qwen2.5-32B"),
        task=TaskConfig(
            name="file", train="dapo-math-17k.parquet", test="aime-2024.parquet", reward="dapo",
            answer_field="reward_model.ground_truth", max_prompt_tokens=2048,
        ),
        sampling=SamplingConfig(prompts=512, answers=16, max_tokens=20480, cache_tokens=4096),
        optim=OptimConfig(
            steps=400, learning_rate=1e-6, warmup=20, minibatches=16, micro_tokens=22528, checkpointing=True,
            shard=True,
        ),
        loss=LossConfig(old="recompute"),
        rollout=RolloutConfig(backend="vllm", slots=2048),
        evaluation=EvaluationConfig(every=5, problems=30, samples=32),
        plan=PlanConfig(devices=128, tflops=990.0, generator_shards=4, answer_tokens=3000, kept_share=0.4),
        precision="bf16",
    )  # fmt: skip


def gpu_1() -> Config:
    """A model of 1.5 B on GSM8K with one GPU of 80 GB and vLLM: not run by us, see --dry-run for its plan."""
    return Config(
        model=ModelConfig(source="Qwen2.5-1.5B"),
        task=TaskConfig(name="gsm8k"),
        sampling=SamplingConfig(prompts=64, answers=8, max_tokens=1024, cache_tokens=256),
        optim=OptimConfig(steps=200, learning_rate=1e-6, warmup=5, minibatches=4, micro_tokens=32768),
        loss=LossConfig(old="recompute", importance="truncate"),
        rollout=RolloutConfig(backend="vllm", slots=512),
        evaluation=EvaluationConfig(every=20, problems=256, samples=1, top_p=1.0),
        plan=PlanConfig(tflops=990.0, answer_tokens=300),
        precision="bf16",
    )


def ablate() -> Config:
    """The paper's six rows on three small tasks, 5 seeds."""
    return Config(method="ablate", workers="process:2")


PRESETS: dict[str, Callable[[], Config]] = {
    "fast": fast,
    "quick": quick,
    "laptop": laptop,
    "ablate": ablate,
    "gpu-1": gpu_1,
    "paper": paper,
    "smoke": smoke,
}
