"""What a training will cost, before it starts: ``sextet train dapo --preset paper --dry-run``.

A cost model, not a measurement: operations are 2 per weight and generated token and 6 per weight and trained token (8
with checkpointing), times and the shares of a device's speed that are reached are assumptions, named in the result.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from sextet.core.errors import UsageError
from sextet.core.files import read_json
from sextet.dapo.decoder import Decoder, Shape
from sextet.dapo.settings import Config, resolve

KNOWN = {
    "Qwen2.5-1.5B": Shape(
        kind="qwen2", vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2, head_dim=128,
    ),
    "Qwen2.5-7B": Shape(
        kind="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, head_dim=128, tie_word_embeddings=False,
    ),
    "Qwen2.5-32B": Shape(
        kind="qwen2", vocab_size=152064, hidden_size=5120, intermediate_size=27648, num_hidden_layers=64,
        num_attention_heads=40, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    ),
    "smollm2": Shape(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64,
    ),
}  # fmt: skip
"""Sizes of models that presets name, from their public configurations."""


def shape_of(config: Config) -> Shape:
    """Returns the shape of the configured model.

    Raises:
        UsageError: It is neither here nor known.
    """
    source = config.model.source
    if source == "tiny":
        from sextet.dapo.model import tiny_shape

        return tiny_shape(config.model, 16)
    if (Path(source) / "config.json").is_file():
        found = Shape.of(read_json(Path(source) / "config.json"))
        if found is not None:
            return found
    if Path(source).name in KNOWN:
        return KNOWN[Path(source).name]
    raise UsageError(f'no plan for model.source "{source}": give its folder, or one of {", ".join(KNOWN)}')


def parameters(shape: Shape) -> int:
    """Returns the number of weights."""
    import torch

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(shape).parameters())


def plan(config: Config) -> dict[str, Any]:
    """Returns memory, tokens and hours of a training."""
    config = resolve(replace(config, method="dapo") if config.method == "ablate" else config)
    shape, assumed, sampling, optim = shape_of(config), config.plan, config.sampling, config.optim
    weights, devices = parameters(shape), assumed.devices
    answers = sampling.prompts * sampling.answers
    length = assumed.answer_tokens or sampling.max_tokens / 2
    prompt = assumed.prompt_tokens
    generated = answers * length / (assumed.kept_share if sampling.dynamic else 1.0)
    trained = answers * length + sampling.prompts * prompt
    parts = devices if optim.shard else 1
    trainable = weights if not config.model.lora_rank else weights // 50
    gib = 2**30
    cell = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * 2  # keys and values in bf16
    per_gpu = math.ceil(min(config.rollout.slots, answers) / devices)
    activations = optim.micro_tokens * shape.hidden_size * shape.num_hidden_layers * (2 if optim.checkpointing else 34)
    memory = {
        "weights, gradients, AdamW (fp32)": (4 * weights + 12 * trainable) / parts / gib,
        "weights of the generator (bf16)": 2 * weights / assumed.generator_shards / gib,
        "keys and values of the slots (bf16, mean length)": per_gpu * (prompt + length) * cell / gib,
        "activations of a micro-batch": activations / gib,
        "logits of a chunk (fp32)": 3 * 2**23 * 4 / gib,
    }
    speed = assumed.tflops * 1e12 * devices
    generate = 2 * weights * generated / (speed * assumed.generate_share)
    update = (8 if optim.checkpointing else 6) * weights * trained * optim.passes / (speed * assumed.train_share)
    seconds = generate + update if config.rollout.staleness == 0 else max(generate, update)
    return {
        "model": {"weights (million)": round(weights / 1e6, 1), "layers": shape.num_hidden_layers},
        "a rollout step": {
            "answers trained on": answers,
            "updates": optim.minibatches * optim.passes,
            "tokens generated": round(generated),
            "tokens trained on": round(trained),
            "seconds to generate": round(generate, 1),
            "seconds to update": round(update, 1),
        },
        "the run": {
            "rollout steps": optim.steps,
            "tokens generated (million)": round(generated * optim.steps / 1e6, 1),
            "hours": round(seconds * optim.steps / 3600, 1),
        },
        "memory of a rank (GiB)": {
            **{name: round(value, 2) for name, value in memory.items()},
            "together": round(sum(memory.values()), 1),
        },
        "assumed": {
            "devices": devices,
            "TFLOP/s of a device": assumed.tflops,
            "share of it when generating": assumed.generate_share,
            "share of it when updating": assumed.train_share,
            "tokens of an answer": round(length),
            "tokens of a prompt": prompt,
            "groups with a spread": assumed.kept_share,
        },
    }
