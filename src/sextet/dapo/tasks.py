"""Built-in tasks with answers that can be verified, for models that know nothing and for SmolLM2.

- ``table``: 200 keys of three digits, each with a value of two. The supervised start leaves three quarters nearly
  learnt and a quarter wrong most of the time: what a language model is like on a data set it can partly do.
- ``hard_table``: 400 keys, a tenth of them hard.
- ``chain``: sums of 2 to 7 digits with the running sums written out; the supervised start is full of slips.
- ``addition``: two numbers from 10 to 49 after worked examples, for a pretrained model.

Those of files and of reasoning-gym are in `sources`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sextet.core.config import require
from sextet.core.errors import UsageError, unknown
from sextet.core.seeding import numpy_rng
from sextet.dapo.settings import TaskConfig

Example = tuple[str, str]
"""A prompt and what is to follow it."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A prompt, as a text or chat messages, and what the verifier needs to judge an answer to it."""

    prompt: str | tuple[dict[str, str], ...]
    answer: str
    extra: dict[str, Any] = field(default_factory=dict)
    """Further JSON values for the verifier; ``kind`` names what tables show apart."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Problems to train on and to test with, and how their answers are judged."""

    train: Sequence[Problem]
    test: Sequence[Problem]
    reward: str
    stop: tuple[str, ...] = ()
    """Texts of one token that end an answer, besides the tokenizer's end; see `stops`."""
    characters: str = ""
    """Of a tiny model's texts."""
    lesson: Callable[[np.random.Generator], Sequence[Example]] | None = None
    """A batch of examples for the supervised start of a tiny model."""
    notes: tuple[str, ...] = ()
    """What was left out of the data, for people."""


def table(config: TaskConfig, seed: int, *, keys: int = 200, hard: float = 0.25, right: float = 0.12) -> Task:
    """The recall table; ``right`` is the probability of the right value of a hard key after the supervised start."""
    rng, number = numpy_rng(seed, "data", "table"), config.size or keys
    require(number <= 1000, "task.size", number, "1000 or less: keys have three digits")
    names = rng.choice(1000, number, replace=False)
    values = rng.integers(0, 100, (number, 4))
    values[:, 1:] = (values[:, :1] + rng.integers(1, 100, (number, 3))) % 100  # three wrong ones
    hardness = rng.permutation(number) < round(hard * number)
    problems = [
        Problem(prompt=f"{name:03}=", answer=f"{value:02}", extra={"kind": "hard" if is_hard else "easy"})
        for name, value, is_hard in zip(names, values[:, 0], hardness, strict=True)
    ]

    def lesson(rng: np.random.Generator) -> list[Example]:
        chosen = rng.integers(0, number, 256)
        ok = rng.random(256) < np.where(hardness[chosen], right, 0.95)
        column = np.where(ok, 0, rng.integers(1, 4, 256))
        return [(problems[key].prompt, f"{values[key, which]:02}") for key, which in zip(chosen, column, strict=True)]

    return Task(train=problems, test=problems, reward="exact", characters="0123456789=", lesson=lesson)


def hard_table(config: TaskConfig, seed: int) -> Task:
    """The table of which a tenth is hard."""
    return table(config, seed, keys=400, hard=0.1, right=0.05)


def chain(config: TaskConfig, seed: int, *, slips: float = 0.35) -> Task:
    """Sums with running sums written out: ``3+4+5=`` is answered by ``7,12#12``."""

    def draw(rng: np.random.Generator) -> list[int]:
        return rng.integers(1, 10, int(rng.integers(2, 8))).tolist()  # type: ignore[no-any-return]

    def worked(terms: Sequence[int], rng: np.random.Generator | None) -> str:
        sums, total = [], terms[0]
        for term in terms[1:]:
            total += term
            if rng is not None and rng.random() < slips:
                total += int(rng.choice([-2, -1, 1, 2]))
            sums.append(str(total))
        return ",".join(sums) + f"#{total}"

    def problem(terms: Sequence[int]) -> Problem:
        return Problem(prompt="+".join(map(str, terms)) + "=", answer=str(sum(terms)))

    def lesson(rng: np.random.Generator) -> list[Example]:
        chosen = [draw(rng) for _ in range(128)]
        return [("+".join(map(str, terms)) + "=", worked(terms, rng)) for terms in chosen]

    rng = numpy_rng(seed, "data", "chain")
    problems = list(dict.fromkeys(tuple(draw(rng)) for _ in range((config.size or 4000) + config.held_out)))
    held, rest = problems[: config.held_out], problems[config.held_out :]
    return Task(
        train=[problem(terms) for terms in rest], test=[problem(terms) for terms in held], reward="after-hash",
        characters="0123456789+=,#-", lesson=lesson,
    )  # fmt: skip


def addition(config: TaskConfig, seed: int) -> Task:
    """Sums of two numbers from 10 to 49 after worked examples."""
    rng = numpy_rng(seed, "data", "addition")
    pairs = rng.permutation(1600)
    least = config.shots + config.held_out
    require(
        least < len(pairs),
        "task.held_out",
        config.held_out,
        f"under {len(pairs) - config.shots}: so many sums are there",
    )
    shots = [divmod(int(pair), 40) for pair in pairs[: config.shots]]
    before = "".join(f"{a + 10}+{b + 10}={a + b + 20}\n" for a, b in shots)

    def problem(pair: int) -> Problem:
        a, b = pair // 40 + 10, pair % 40 + 10
        return Problem(prompt=f"{before}{a}+{b}=", answer=str(a + b))

    rest = pairs[config.shots :]
    held = rest[: config.held_out]
    train = rest[config.held_out :][: config.size or None]
    return Task(
        train=[problem(int(pair)) for pair in train], test=[problem(int(pair)) for pair in held], reward="exact",
        characters="0123456789+=\n",
    )  # fmt: skip


BUILT_IN: dict[str, Callable[[TaskConfig, int], Task]] = {
    "table": table, "hard_table": hard_table, "chain": chain, "addition": addition,
}  # fmt: skip


def load_task(config: TaskConfig, seed: int, *, test_only: bool = False) -> Task:
    """Returns the task of the settings; a generated one depends on nothing but settings and seed.

    With ``test_only`` and a test of its own, the problems to train on are not read, and need not be there.

    Raises:
        UsageError: Unknown name. DataError: Files that cannot be used.
    """
    if config.name in BUILT_IN:
        task = BUILT_IN[config.name](config, seed)
    elif config.name in ("gsm8k", "math", "file") or config.name.startswith("gym:"):
        from sextet.dapo.sources import file_task, gym_task

        gym = config.name.startswith("gym:")
        task = gym_task(config, seed) if gym else file_task(config, seed, test_only=test_only)
    else:
        raise UsageError(unknown("task", config.name, [*BUILT_IN, "gsm8k", "math", "file", "gym:NAME"]))
    return replace(task, reward=config.reward or task.reward, stop=stops(config))


def stops(config: TaskConfig) -> tuple[str, ...]:
    """Texts that end an answer besides the tokenizer's end: the line where the worked examples are lines."""
    return ("\n",) if config.name == "addition" or (config.shots and config.name.startswith("gym:")) else ()
