"""Tasks from files and from the generators of reasoning-gym."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl

from sextet.core.errors import DataError, UsageError, missing_extra
from sextet.core.seeding import numpy_rng
from sextet.dapo.data import Problems, normalised, read_problems, templated
from sextet.dapo.settings import TaskConfig
from sextet.dapo.tasks import Problem, Task

GYM_SIZE = 1000
"""Problems for training of a generator, unless the settings say another number."""


def file_task(config: TaskConfig, seed: int, *, test_only: bool = False) -> Task:
    """Returns the task ``gsm8k``, ``math`` or ``file``: problems of ``config.train``, tested on ``config.test``.

    ``gsm8k`` has files of its own in the data folder. Without a test, ``config.held_out`` problems are taken from the
    end of a permutation that depends on the seed alone. With ``test_only`` and a test, there are none to train on.

    Raises:
        UsageError: No file is named. DataError: A file cannot be used, or nothing is left to train on.
    """
    train, test = config.train, config.test
    if config.name == "gsm8k" and not train:
        train, test = "gsm8k_train", test or "gsm8k_test"
    template = config.template or ("gsm8k" if config.name == "gsm8k" else "")
    reward = {"gsm8k": "number", "math": "math-verify", "file": "robust"}[config.name]
    if test and test_only:
        tested, notes = _read(test, config)
        return _task([], tested.problems, template, reward, notes)
    if not train:
        raise UsageError(
            f"task {config.name} needs a file: set task.train to a path (allowed: see sextet data prompts --help)"
        )
    found, notes = _read(train, config)
    if test:
        tested, more = _read(test, config)
        held, rest = tested.problems, found.problems
        known = {normalised(problem.prompt) for problem in held}
        if both := sum(normalised(problem.prompt) in known for problem in rest):
            more.append(f"{both:,} problems of {train} are in {test} too: sextet data prompts {train} --against {test}")
        notes += more
    else:
        held, rest = split(found.problems, config.held_out, seed, train)
    return _task(rest, held, template, reward, notes)


def _task(train: list[Problem], test: list[Problem], template: str, reward: str, notes: list[str]) -> Task:
    if template:
        train, test = ([templated(problem, template) for problem in some] for some in (train, test))
    return Task(train=train, test=test, reward=reward, notes=tuple(notes))


def _read(path: str, config: TaskConfig) -> tuple[Problems, list[str]]:
    found = read_problems(path, prompt_field=config.prompt_field, answer_field=config.answer_field)
    return found, [f"{path}: {note}" for note in found.notes()]


def split(problems: list[Problem], held_out: int, seed: int, name: str) -> tuple[list[Problem], list[Problem]]:
    """Returns what is held out of problems without copies, and the others before it, in a permuted order."""
    if held_out >= len(problems):
        raise DataError(
            f"{name} has {len(problems):,} problems: with task.held_out = {held_out} none is left to train on; "
            "set it lower, or task.test to other problems"
        )
    order = numpy_rng(seed, "data", "held out").permutation(len(problems))
    shuffled = [problems[index] for index in order]
    cut = len(problems) - held_out
    return shuffled[cut:], shuffled[:cut]


def gym_task(config: TaskConfig, seed: int) -> Task:
    """Returns the task ``gym:NAME`` or ``gym:NAME?max_terms=3&max_digits=2``, with settings of the generator.

    With ``config.shots`` prompts begin with worked examples, as a model without instruction tuning needs them, and
    answers end with the line. There are fewer problems than wanted where the generator repeats itself, with a note.
    """
    name, shots = config.name.removeprefix("gym:"), config.shots
    wanted = (config.size or GYM_SIZE) + config.held_out + shots
    generated = gym_problems(name, wanted, int(numpy_rng(seed, "data", "gym").integers(2**31)))
    problems = list({normalised(problem.prompt): problem for problem in generated}.values())
    shown, problems = problems[:shots], problems[shots:]
    held, rest = split(problems, config.held_out, seed, config.name)
    copies = wanted - shots - len(problems)
    notes = [f"left out: {copies:,} of {wanted:,} generated problems, copies of others"] if copies else []
    task = _task(rest, held, config.template, "gym", notes)
    if not shots:
        return task
    before = "".join(f"Question: {problem.prompt}\nAnswer: {problem.answer}\n" for problem in shown)
    train, test = (
        [replace(problem, prompt=f"{before}Question: {problem.prompt}\nAnswer:") for problem in some]
        for some in (task.train, task.test)
    )
    return replace(task, train=train, test=test)


def gym_problems(name: str, count: int, seed: int) -> list[Problem]:
    """Generates problems with reasoning-gym; some of its tasks have no answer of their own, theirs is empty.

    ``extra`` has the ``dataset`` and its ``entry`` as JSON values, with lists for tuples and texts for keys.

    Args:
        name: Of the generator, with its settings as in the query of an address: ``chain_sum?max_terms=3``.
        count: Number of problems.
        seed: Of the generator.

    Raises:
        UsageError: The package is not installed, or it has no generator of this name, or not with these settings.
    """
    name, _, query = name.partition("?")
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise missing_extra("reasoning-gym", "gym", f"the task gym:{name}") from error
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4)
        raise UsageError(
            f'unknown task "gym:{name}"; nearest: {", ".join(close) or "none"}; reasoning-gym has {len(DATASETS)}: '
            'python -c "from reasoning_gym.factory import DATASETS; print(*sorted(DATASETS))"'
        )
    try:
        settings = {key: _number(value) for key, value in parse_qsl(query, strict_parsing=bool(query))}
        entries = list(reasoning_gym.create_dataset(name, size=count, seed=seed, **settings))
    except Exception as error:  # whatever the generator says of its settings
        raise UsageError(f"gym:{name} cannot be generated ({type(error).__name__}: {error})") from error
    return [
        Problem(
            prompt=entry["question"],
            answer="" if entry["answer"] is None else str(entry["answer"]),
            extra={"dataset": name, "entry": json_safe(entry)},
        )
        for entry in entries
    ]


def _number(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def json_safe(value: Any) -> Any:
    """Returns the value with lists for tuples and sets, numbers for those of numpy, and texts for all else."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_safe(item) for item in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)]
    if value is None or type(value) in (str, int, float, bool):
        return value
    if hasattr(value, "tolist"):
        return json_safe(value.tolist())
    return str(value)
