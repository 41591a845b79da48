"""The test of a policy, and the policy that `sextet.load` returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sextet.core.config import difference, from_dict, override, to_dict
from sextet.core.device import Device
from sextet.core.errors import DataError, UsageError
from sextet.core.files import read_json
from sextet.core.seeding import key
from sextet.core.stats import bootstrap_interval
from sextet.dapo.model import Language, Messages, Tokenizer, load_language, model_folder
from sextet.dapo.packing import Piece, build, micro_batches, pack
from sextet.dapo.rewards import Verdict
from sextet.dapo.rollout import Answer, Engine, Limits, Request
from sextet.dapo.settings import Config, TaskConfig, resolve
from sextet.dapo.tasks import Problem, Task, load_task, stops
from sextet.dapo.verifier import Verifier

Generate = Callable[[Sequence[Request], Limits], Sequence[Sequence[Answer]]]
GREEDY = 1e-3
"""Lowest temperature: the likeliest token for all practical purposes."""


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
        max_tokens=sampling.max_tokens, stop=reader.stop, temperature=max(settings.temperature, GREEDY),
        top_p=settings.top_p, seed=seed,
    )  # fmt: skip
    answers = generate(requests, limits)
    items = [
        (reader.decode(answer), problem.answer, problem.extra)
        for problem, group in zip(chosen, answers, strict=True)
        for answer in group
    ]
    verdicts = verifier.verdicts(items)
    groups = [verdicts[start : start + k] for start in range(0, len(verdicts), k)]
    texts = [[text for text, *_ in items[start : start + k]] for start in range(0, len(items), k)]
    right = 100 * np.array([[bool(verdict.right) for verdict in group] for group in groups], dtype=float)
    scores = {
        **by_kind(f"avg@{k}", right.mean(1), chosen),
        f"pass@{k}": bootstrap_interval(right.max(1)).as_dict(),
        f"cons@{k}": bootstrap_interval(
            [100.0 * majority(*pair) for pair in zip(groups, texts, strict=True)]
        ).as_dict(),
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


def majority(verdicts: Sequence[Verdict], texts: Sequence[str]) -> bool:
    """Whether the answer that most samples gave is right; the first of equals counts.

    Answers are what the verifier read in the texts, or the texts where it does not say.
    """
    judged = [(v.note or text, v.right) for v, text in zip(verdicts, texts, strict=True) if not v.failure]
    if not judged:
        return False
    most = Counter(said for said, _ in judged).most_common(1)[0][0]
    return bool(dict(reversed(judged))[most])


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
    """Tests the model of a finished run again, as the settings say; ``sextet eval RUN``.

    Raises:
        UsageError: The run has no finished model. DataError: A file is missing or cannot be used.
    """
    final = directory / "final" if (directory / "final").is_dir() else directory
    if not (final / "model.safetensors").exists():
        raise UsageError(f"{directory} holds no finished model; finish it with: sextet resume {directory}")
    own = read_config(final)
    if config.method == "ablate":  # its model is that of a part, for which counts what was changed
        changed: dict[str, Any] = {}
        for name, (_, value) in difference(to_dict(read_config(directory)), to_dict(config)).items():
            group, _, field = name.rpartition(".")
            (changed.setdefault(group, {}) if group else changed)[field] = value
        config = override(own, changed, source="fields")
    return measure(Policy(read_language(final, own), config), config)


def evaluate_start(config: Config) -> dict[str, Any]:
    """Tests the model that a training would start from; ``sextet eval dapo --model.source FOLDER``.

    Raises:
        UsageError: It is a tiny one, which is taught by the training. DataError: A file cannot be used.
    """
    if config.model.source == "tiny":
        raise UsageError("a tiny model has to be trained first; name another: --model.source smollm2, or its folder")
    folder = model_folder(config.model.source)
    return measure(Policy(load_language(folder, config.model.implementation), config), config)


def measure(policy: Policy, config: Config) -> dict[str, Any]:
    """Tests a policy on the test problems of the settings, which need not be those of its training."""
    config, settings = resolve(replace(config, method="dapo") if config.method == "ablate" else config), config.task
    task = load_task(settings, config.seed, test_only=True)
    reader = Reader.of(policy.language.tokenizer, settings, task)
    seed = key(config.seed, "evaluate", "again")
    with Verifier.of(task.reward, settings) as verifier:
        scores = test(task.test, reader, policy.engine.generate, verifier, config, seed=seed)
    return scores | ({"notes": list(task.notes)} if task.notes else {})


class Policy:
    """A trained language model that answers prompts."""

    def __init__(self, language: Language, config: Config) -> None:
        self.language, self.config = language, config
        nothing = Task(train=(), test=(), reward="", stop=stops(config.task))
        self.reader = Reader.of(language.tokenizer, config.task, nothing)
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
            temperature: Of sampling; 0: always the likeliest token.
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
            temperature=max(temperature, GREEDY), top_p=top_p, seed=seed,
        )  # fmt: skip
        requests = [
            Request(key=("answer", index), prompt=self.reader.encode(prompt), numbers=range(samples))
            for index, prompt in enumerate(prompts)
        ]
        return self.engine.generate(requests, limits)


def read_config(folder: Path) -> Config:
    """Returns the settings that a run, or its ``final`` folder, was made with."""
    record: Mapping[str, Any] = read_json(folder / "config.json")
    return from_dict(Config, record["config"], source=str(folder / "config.json"))


def read_language(folder: Path, config: Config) -> Language:
    """Returns the model of a ``final`` folder."""
    about = folder / "language" if (folder / "language").is_dir() else folder.parent / "language"
    if not about.is_dir():
        raise DataError(f"{folder}: the folder `language` with the tokenizer is missing; copy the whole folder again")
    return load_language(about, config.model.implementation, weights=folder / "model.safetensors")


def load(folder: Path) -> Policy:
    """Returns the policy of a run's ``final`` folder.

    Raises:
        DataError: A file is missing or does not fit.
    """
    config = read_config(folder)
    return Policy(read_language(folder, config), config)
