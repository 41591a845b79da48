"""Training, top to bottom: `check`, `train`.

prompts -> G answers each -> verdicts -> groups with a spread, until there are N -> advantages -> updates -> publish
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sextet.core.device import Device, pick_device
from sextet.core.errors import SextetError
from sextet.core.run import Run
from sextet.dapo.generators import Pool
from sextet.dapo.groups import Collector, Group
from sextet.dapo.learner import Learner
from sextet.dapo.model import Characters, Language, load_language, model_folder, tiny
from sextet.dapo.rollout import Answer, Limits
from sextet.dapo.settings import Config, resolve
from sextet.dapo.tasks import Example, Problem, Task, load_task
from sextet.dapo.verifier import Verifier


class Stalled(SextetError):  # noqa: N818 - says what happened
    """No group could be learnt from, step after step (exit code 3)."""

    exit_code = 3


def check(config: Config) -> None:
    """Raises what would stop the training later, before anything is written."""
    pick_device(config.device)


def train(config: Config, run: Run) -> None:
    """Trains a policy and tests it."""
    torch.set_num_threads(config.threads)
    config = resolve(config)
    task = load_task(config.task, config.seed)
    language = begin(config, run, task)
    tokenizer = language.tokenizer
    device = Device(config.device, config.precision, threads=config.threads, world=run.world)
    learner = Learner(language.model, config, device)
    prompts = [encode(problem, tokenizer, config) for problem in task.train]
    stop = [tokenizer.end, *(tokenizer.encode(text)[0] for text in task.stop)]
    sampling = config.sampling
    limits = Limits(
        max_tokens=sampling.max_tokens, stop=stop, temperature=sampling.temperature, top_p=sampling.top_p,
        seed=run.key("rollout"), slice_tokens=config.rollout.slice_tokens,
    )  # fmt: skip

    def decode(answer: Answer) -> str:
        return tokenizer.decode([token for token in answer.tokens if token not in stop])

    verifier, pool = Verifier(task.reward), Pool(config, language)
    collector = Collector(
        sampling, task.train, prompts, pool, verifier, limits, seed=run.key("data"), ahead=config.rollout.staleness
    )
    empty = 0
    run.track(model=learner.model, optimiser=learner.optimiser, collector=collector)
    try:
        run.restore()
        for step in run.steps(config.optim.steps):
            started = time.perf_counter()
            pool.publish(learner.model.state_dict(), step)
            groups, seen, counts = collector.collect(step, run, decode)
            generated = time.perf_counter()
            logs = group_logs(seen, counts, sampling.tolerance)
            if groups:
                logs |= learner.update(groups, run)
            empty = 0 if groups else empty + 1
            logs |= {
                "time/collect": generated - started,
                "time/update": time.perf_counter() - generated,
                "groups/trained": float(len(groups)),
            }
            run.log(logs)
            if empty >= sampling.max_empty:
                raise Stalled(f"no group with a spread in {empty} steps: {counts}")
    finally:
        pool.close()
        verifier.close()
    run.finish({"accuracy": 0.0}, learner.model.state_dict())


def encode(problem: Problem, tokenizer: object, config: Config) -> list[int]:
    """Returns the ids of a problem's prompt."""
    assert isinstance(problem.prompt, str)
    return tokenizer.encode(problem.prompt)  # type: ignore[attr-defined, no-any-return]


def begin(config: Config, run: Run, task: Task) -> Language:
    """Returns the model at the start: read, or for a tiny one taught in a part of the run."""
    if config.model.source != "tiny":
        return load_language(model_folder(config.model.source), config.model.implementation)
    language = tiny(config.model, task.characters, run.rng("init").torch)
    part = run.child("start")
    if not part.finished:
        teach(language, task, config, part)
    from safetensors.torch import load_file

    language.model.load_state_dict(load_file(part.directory / "final" / "model.safetensors"))
    return language


def teach(language: Language, task: Task, config: Config, part: Run) -> None:
    """The supervised start of a tiny model: the task's examples, with a cosine schedule."""
    assert task.lesson is not None and isinstance(language.tokenizer, Characters)
    optimiser = torch.optim.AdamW(language.model.parameters(), 3e-3, weight_decay=0.01, fused=True)
    part.track(model=language.model, optimiser=optimiser)
    for step in part.steps(config.model.warm_steps):
        optimiser.param_groups[0]["lr"] = 1.5e-3 * (1 + np.cos(np.pi * step / config.model.warm_steps))
        loss = lesson_loss(language.model, task.lesson(part.rng("data", step).numpy), language.tokenizer)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(language.model.parameters(), 1.0)
        optimiser.step()
        part.log({"loss": loss.detach()})
    part.finish({}, language.model.state_dict())


def lesson_loss(model: nn.Module, examples: Sequence[Example], tokenizer: Characters) -> Tensor:
    """Mean cross-entropy of what follows the prompts."""
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


def group_logs(seen: Sequence[Group], counts: dict[str, float], tolerance: float) -> dict[str, float]:
    """What the paper asks to watch of the answers of a step."""
    if not seen:
        return {f"groups/{name}": float(value) for name, value in counts.items()}
    lengths = np.array([len(answer.tokens) for group in seen for answer in group.answers])
    right = [bool(verdict.right) for group in seen for verdict in group.verdicts]
    cut = [not answer.stopped for group in seen for answer in group.answers]
    return {
        "answers/accuracy": float(np.mean(right)),
        "answers/length": float(lengths.mean()),
        "answers/length_min": float(lengths.min()),
        "answers/length_max": float(lengths.max()),
        "answers/truncated": float(np.mean(cut)),
        **{f"groups/{name}": float(value) for name, value in counts.items()},
    }


_ = Path
