"""The supervised start of a tiny model: it learns a task's examples, slips and all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from sextet.core.errors import UsageError
from sextet.core.run import Run
from sextet.dapo.model import Characters, Language
from sextet.dapo.settings import ModelConfig
from sextet.dapo.tasks import Example, Task

RATE = 3e-3
NO_LESSON = "this task has no examples for a tiny model; choose --model.source smollm2 or a model's folder"


def teach(language: Language, task: Task, config: ModelConfig, part: Run) -> None:
    """Trains with AdamW and a cosine schedule, and finishes the part.

    Raises:
        UsageError: The task has no examples.
    """
    if task.lesson is None or not isinstance(language.tokenizer, Characters):
        raise UsageError(NO_LESSON)
    model = language.model
    optimiser = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01, fused=True)
    part.track(model=model, optimiser=optimiser)
    for step in part.steps(config.warm_steps):
        optimiser.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * step / config.warm_steps)) / 2
        loss = lesson_loss(model, task.lesson(part.rng("data", step).numpy), language.tokenizer)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        part.log({"loss": loss.detach()})
    part.finish({}, model.state_dict())


def lesson_loss(model: nn.Module, examples: Sequence[Example], tokenizer: Characters) -> Tensor:
    """Mean cross-entropy () of what follows the prompts, the end included."""
    pairs = [(tokenizer.encode(prompt), [*tokenizer.encode(text), tokenizer.end]) for prompt, text in examples]
    longest = max(len(prompt) + len(text) for prompt, text in pairs)
    tokens = torch.full((len(pairs), longest), tokenizer.end)
    targets = torch.full((len(pairs), longest), -100)
    for row, (prompt, text) in enumerate(pairs):
        tokens[row, : len(prompt) + len(text)] = torch.tensor(prompt + text)
        targets[row, len(prompt) - 1 : len(prompt) + len(text) - 1] = torch.tensor(text)
    mask = torch.full((longest, longest), -torch.inf).triu(1)[None, None]
    hidden = model(tokens, torch.arange(longest).expand(len(pairs), -1), mask)
    head: Tensor = model.head  # type: ignore[assignment]
    return functional.cross_entropy((hidden @ head.T).flatten(0, 1), targets.flatten())
