"""The test of a policy, and the policy that `sextet.load` returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sextet.core.config import from_dict
from sextet.core.device import Device
from sextet.core.errors import DataError, UsageError
from sextet.core.files import read_json
from sextet.core.seeding import key
from sextet.core.stats import bootstrap_interval
from sextet.dapo.model import Language, Messages, Tokenizer, load_language
from sextet.dapo.packing import Piece, build, micro_batches, pack
from sextet.dapo.rewards import Verdict
from sextet.dapo.rollout import Answer, Engine, Limits, Request
from sextet.dapo.settings import Config, TaskConfig, resolve
from sextet.dapo.tasks import Problem, Task, load_task
from sextet.dapo.verifier import Verifier

Generate = Callable[[Sequence[Request], Limits], Sequence[Sequence[Answer]]]


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Problems to token ids, and answers to text, for one tokenizer and task."""

    tokenizer: Tokenizer
    stop: tuple[int, ...]
    chat: bool
    system: str

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: TaskConfig, task: Task) -> Reader:
        """Returns the reader of a task.

        Raises:
            UsageError: A text that ends answers is not one token.
        """
        stop = [tokenizer.end]
        for text in task.stop:
            ids = tokenizer.encode(text)
            if len(ids) != 1:
                raise UsageError(f"the stop text {text!r} is {len(ids)} tokens of this tokenizer; it must be one")
            stop += ids
        return cls(tokenizer=tokenizer, stop=tuple(stop), chat=config.chat, system=config.system)

    def encode(self, prompt: str | Messages) -> list[int]:
        """Returns the ids of a prompt, in the chat template where there is one and the prompt is a chat."""
        if self.chat or not isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            if self.system:
                messages = [{"role": "system", "content": self.system}, *messages]
            ids = self.tokenizer.chat(messages)
            if ids is not None:
                return ids
            prompt = "\n\n".join(str(message["content"]) for message in messages)
        return self.tokenizer.encode(prompt)

    def decode(self, answer: Answer) -> str:
        """Returns the text of an answer without what ended it."""
        tokens = answer.tokens[:-1] if answer.stopped else answer.tokens
        return self.tokenizer.decode(tokens)


def test(
    problems: Sequence[Problem], reader: Reader, generate: Generate, verifier: Verifier, config: Config, *, seed: int
) -> dict[str, Any]:
    """Answers problems k times each and judges the answers.

    Returns:
        Intervals over problems in percent: ``avg@k``, ``pass@k`` (any right), ``cons@k`` (the majority is right), and
        by kind where problems have kinds; the mean length, and the shares of answers cut off and without a verdict.
    """
    settings, sampling = config.evaluation, config.sampling
    k, chosen = settings.samples, problems[: settings.problems]
    requests = [
        Request(key=("evaluate", index), prompt=reader.encode(problem.prompt), numbers=range(k))
        for index, problem in enumerate(chosen)
    ]
    limits = Limits(
        max_tokens=sampling.max_tokens, stop=reader.stop, temperature=settings.temperature, top_p=settings.top_p,
        seed=seed,
    )  # fmt: skip
    answers = generate(requests, limits)
    items = [
        (reader.decode(answer), problem.answer, problem.extra)
        for problem, group in zip(chosen, answers, strict=True)
        for answer in group
    ]
    verdicts = verifier.verdicts(items)
    groups = [verdicts[start : start + k] for start in range(0, len(verdicts), k)]
    right = 100 * np.array([[bool(verdict.right) for verdict in group] for group in groups], dtype=float)
    scores = {
        **by_kind(f"avg@{k}", right.mean(1), chosen),
        f"pass@{k}": bootstrap_interval(right.max(1)).as_dict(),
        f"cons@{k}": bootstrap_interval([100.0 * majority(group) for group in groups]).as_dict(),
    }
    flat = [answer for group in answers for answer in group]
    return scores | {
        "length": float(np.mean([len(answer.tokens) for answer in flat])),
        "cut off": float(np.mean([not answer.stopped for answer in flat])),
        "without a verdict": float(np.mean([bool(verdict.failure) for verdict in verdicts])),
        "problems": len(chosen),
    }


def by_kind(name: str, values: NDArray[np.float64], problems: Sequence[Problem]) -> dict[str, Any]:
    """The interval of the mean over problems, and over those of each kind where they have kinds."""
    kinds = np.array([str(problem.extra.get("kind", "")) for problem in problems])
    found = {name: bootstrap_interval(values).as_dict()}
    for kind in sorted(set(kinds.tolist()) - {""}):
        found[f"{name}, {kind}"] = bootstrap_interval(values[kinds == kind]).as_dict()
    return found


def majority(verdicts: Sequence[Verdict]) -> bool:
    """Whether the answer that most samples gave is right; the first of equals counts."""
    judged = [verdict for verdict in verdicts if not verdict.failure]
    if not judged:
        return False
    most = Counter(verdict.note for verdict in judged).most_common(1)[0][0]
    return bool(next(verdict.right for verdict in judged if verdict.note == most))


@torch.no_grad()
def right_probability(
    scorer: nn.Module, problems: Sequence[Problem], reader: Reader, config: Config, device: Device
) -> list[float]:
    """Returns for each problem the exact probability of its answer, to the letter, at the training temperature.

    ``scorer`` is a :class:`sextet.dapo.learner.Scorer`.
    """
    end = reader.stop[-1]
    pieces = [
        Piece(
            index=index,
            group=index,
            prompt=reader.encode(problem.prompt),
            answer=[*reader.tokenizer.encode(problem.answer), end],
        )
        for index, problem in enumerate(problems)
    ]
    found: dict[int, float] = {}
    for batch in micro_batches(pack(pieces, 256), config.optim.micro_tokens):
        rows = build(batch)
        with device.autocast():
            logp, _ = scorer(*device.move((rows.tokens, rows.positions, rows.mask, rows.source, rows.target)))
        sums = torch.zeros(len(pieces)).index_add_(0, rows.answer, logp.cpu())
        found.update((index, float(sums[index].exp())) for index in rows.answers)
    return [found[index] for index in range(len(pieces))]


def evaluate(config: Config, directory: Path) -> dict[str, Any]:
    """Tests the model of a finished run again; ``sextet eval``.

    Raises:
        UsageError: The run has no finished model.
    """
    if not (directory / "final" / "model.safetensors").exists():
        raise UsageError(f"{directory} holds no finished model; finish it with: sextet resume {directory}")
    policy = load(directory / "final")
    config = resolve(policy.config if config.method == "ablate" else config)
    task = load_task(config.task, config.seed)
    reader = Reader.of(policy.language.tokenizer, config.task, task)
    settings = config.task
    verifier = Verifier(task.reward, seconds=settings.reward_seconds, megabytes=settings.reward_mb)
    try:
        return test(
            task.test, reader, policy.engine.generate, verifier, config, seed=key(config.seed, "evaluate", "again")
        )
    finally:
        verifier.close()


class Policy:
    """A trained language model that answers prompts."""

    def __init__(self, language: Language, config: Config) -> None:
        self.language, self.config = language, config
        self.reader = Reader(
            tokenizer=language.tokenizer, stop=(language.tokenizer.end,), chat=config.task.chat,
            system=config.task.system,
        )  # fmt: skip
        device = Device(config.device, config.precision, threads=config.threads)
        self.engine = Engine(language.model.to(device.device), slots=config.rollout.slots, device=device.device)

    def generate(
        self, prompts: Sequence[str | Messages], *, samples: int = 1, max_tokens: int | None = None,
        temperature: float = 1.0, top_p: float = 1.0, stop: Sequence[str] = (), seed: int = 0,
    ) -> list[list[str]]:  # fmt: skip
        """Returns sampled answers to each prompt.

        Args:
            prompts: Texts or chats; they go through the chat template as in training.
            samples: Answers to each.
            max_tokens: Most tokens of an answer; None: as in training.
            temperature: Of sampling; at most 1e-3 is greedy for all practical purposes.
            top_p: Of sampling.
            stop: Further texts of one token that end an answer.
            seed: Of the sampling.
        """
        return [
            [self.reader.decode(answer) for answer in group]
            for group in self.answer(
                prompts, samples=samples, max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=stop,
                seed=seed,
            )
        ]  # fmt: skip

    def answer(
        self, prompts: Sequence[str | Messages], *, samples: int = 1, max_tokens: int | None = None,
        temperature: float = 1.0, top_p: float = 1.0, stop: Sequence[str] = (), seed: int = 0,
    ) -> list[list[Answer]]:  # fmt: skip
        """The same as :meth:`generate` with tokens and log-probabilities."""
        ends = [self.language.tokenizer.encode(text)[0] for text in stop]
        limits = Limits(
            max_tokens=max_tokens or self.config.sampling.max_tokens, stop=(*self.reader.stop, *ends),
            temperature=max(temperature, 1e-3), top_p=top_p, seed=seed,
        )  # fmt: skip
        requests = [
            Request(key=("answer", index), prompt=self.reader.encode(prompt), numbers=range(samples))
            for index, prompt in enumerate(prompts)
        ]
        return self.engine.generate(requests, limits)


def load(folder: Path) -> Policy:
    """Returns the policy of a run's ``final`` folder.

    Raises:
        DataError: A file is missing or does not fit.
    """
    record: Mapping[str, Any] = read_json(folder / "config.json")
    config = from_dict(Config, record["config"], source=str(folder / "config.json"))
    about = folder / "language" if (folder / "language").is_dir() else folder.parent / "language"
    if not about.is_dir():
        raise DataError(f"{folder}: the folder `language` with the tokenizer is missing; copy the whole folder again")
    return Policy(load_language(about, config.model.implementation, weights=folder / "model.safetensors"), config)
