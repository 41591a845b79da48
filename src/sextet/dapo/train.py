"""Training, top to bottom: `check`, `train`.

prompts -> G answers each -> verdicts -> groups with a spread, until there are N -> advantages -> updates -> publish
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from sextet.core.device import Device, pick_device
from sextet.core.errors import DataError, SextetError, UsageError
from sextet.core.run import Run
from sextet.dapo.evaluate import Reader, by_kind, right_probability, test
from sextet.dapo.generators import Pool
from sextet.dapo.groups import Collector, Group
from sextet.dapo.learner import Learner, samples_of
from sextet.dapo.lesson import NO_LESSON, teach
from sextet.dapo.model import (
    Language,
    add_adapters,
    load_language,
    model_folder,
    plain_weights,
    tiny,
    write_about,
)
from sextet.dapo.ranks import Trained, from_main, whole
from sextet.dapo.rewards import UNREADABLE
from sextet.dapo.rollout import Limits
from sextet.dapo.samples import write_samples
from sextet.dapo.settings import Config, resolve
from sextet.dapo.tasks import Problem, Task, load_task
from sextet.dapo.verifier import Verifier


class Stalled(SextetError):  # noqa: N818 - says what happened
    """Step after step there was no group to learn from (exit code 3)."""

    exit_code = 3


def check(config: Config) -> None:
    """Raises what would stop the training later, before anything is written: files, packages, device, reward."""
    place = pick_device(config.device)
    if config.precision == "bf16" and not has_bf16(place):
        raise UsageError(f"precision = 'bf16': {place} has no instructions for it; set --precision fp32")
    if config.rollout.backend != "builtin":
        from sextet.dapo.vllm import ready

        ready(config)
    if config.method == "ablate":
        if "addition" in config.tasks:
            model_folder("smollm2")
        return
    task = load_task(config.task, config.seed)
    Verifier.of(task.reward, config.task).close()
    if config.model.source != "tiny":
        model_folder(config.model.source)
    elif task.lesson is None:
        raise UsageError(NO_LESSON)


def has_bf16(place: torch.device) -> bool:
    """Whether a device computes in bf16; one that only emulates it is slower than in fp32."""
    if place.type == "cuda":
        return torch.cuda.get_device_capability(place) >= (8, 0)
    known = torch.cpu.get_capabilities() if place.type == "cpu" and hasattr(torch.cpu, "get_capabilities") else {}
    return not known or any(there for name, there in known.items() if "bf16" in name)


def train(config: Config, run: Run, start: Path | None = None) -> None:
    """Trains a policy and tests it before, during and after.

    Args:
        config: The settings.
        run: Where to keep everything.
        start: A finished part with the weights that a tiny model starts from; None: it is taught first.

    Raises:
        Stalled: No group had a spread in ``sampling.max_empty`` steps in a row.
        DivergenceError: Updates were not finite ``optim.max_bad`` times in a row.
    """
    torch.set_num_threads(config.threads)
    if config.method == "ablate":
        from sextet.dapo.ablate import ablate

        ablate(config, run)
        return
    config = resolve(config)
    task = load_task(config.task, config.seed)
    for note in task.notes:
        run.say(f"data: {note}")
        run.event("warning", text=note)
    if config.rollout.backend != "builtin" and config.loss.old == "rollout":
        run.say(
            "warning: another engine's log-probabilities differ from the trainer's; "
            "set loss.old to recompute and loss.importance to truncate"
        )
    language = begin(config, run, task, start)
    reader = Reader.of(language.tokenizer, config.task, task)
    problems, prompts = fitting(task.train, reader, config, run)
    device = Device(config.device, config.precision, threads=config.threads, world=run.world)
    learner, sampling = Learner(language.model, config, device), config.sampling
    limits = Limits(
        max_tokens=sampling.max_tokens, stop=reader.stop, temperature=sampling.temperature, top_p=sampling.top_p,
        seed=run.key("rollout"), slice_tokens=config.rollout.slice_tokens,
    )  # fmt: skip
    with ExitStack() as stack:
        verifier = pool = None
        if run.world.is_main:  # it drives generators and verifiers; the others only learn
            verifier = stack.enter_context(Verifier.of(task.reward, config.task))
            pool = stack.enter_context(Pool(config, language))
        collector = Collector(
            sampling, problems, prompts, pool, verifier, limits, seed=run.key("data"), ahead=config.rollout.staleness
        )
        run.track(policy=Trained(learner.model, learner.optimiser), collector=collector)
        run.restore()

        def publish(step: int) -> None:
            weights = whole(plain_weights(learner.model))
            if pool is not None:
                pool.publish(weights, step)

        def tested(step: int) -> dict[str, Any]:
            scores = from_main(
                run.world,
                lambda: test(task.test, reader, pool.run, verifier, config, seed=run.key("evaluate", step)),  # type: ignore[union-attr, arg-type]
            )
            if task.reward == "exact":
                chosen = task.test[: config.evaluation.problems]
                chances = right_probability(learner.scorer, chosen, reader, config, device)
                scores |= by_kind("p(right)", 100 * np.array(chances), chosen)
            run.log({f"eval/{name}": value["mean"] for name, value in scores.items() if isinstance(value, dict)})
            return scores

        for step in run.steps(config.optim.steps):
            started = time.perf_counter()
            publish(step)
            published = time.perf_counter()
            if step == 0 or run.every(config.evaluation.every):
                tested(step)
            began, cpu = time.perf_counter(), time.process_time()
            judging = verifier.spent if verifier is not None else 0.0
            groups, seen, counts = from_main(run.world, lambda: collector.collect(step, run, reader.decode))  # noqa: B023
            generated = time.perf_counter()
            samples, logs = samples_of(groups, config) if groups else ([], {})
            if samples:
                logs |= learner.update(samples, run)
            judging = (verifier.spent if verifier is not None else 0.0) - judging
            times = {
                "time/publish": published - started,
                "time/test": began - published,
                "time/collect": generated - began,
                "time/verdicts": judging,
                "time/update": time.perf_counter() - generated,
                "time/cpu": time.process_time() - cpu,
                "time/tokens_per_second": counts.get("tokens", 0.0) / max(generated - began - judging, 1e-9),
            }
            run.log({**group_logs(seen, counts, step), **logs, **times, "groups/trained": float(len(groups))})
            if run.world.is_main:
                write_samples(run, seen, groups, samples, problems, reader, config)
            watch_empty(collector, bool(groups), counts, sampling.max_empty, run)
        publish(config.optim.steps)
        summary = tested(config.optim.steps)
    finish(run, language, learner, {**summary, "steps": config.optim.steps})


def finish(run: Run, language: Language, learner: Learner, summary: dict[str, Any]) -> None:
    """Writes the trained model with all that it needs."""
    about, weights = run.directory / "language", whole(plain_weights(learner.model))
    if run.world.is_main:
        write_about(language, about)
    run.finish(summary, weights)
    if run.world.is_main:
        shutil.copytree(about, run.directory / "final" / "language", dirs_exist_ok=True)


def start_part(config: Config, part: Run) -> Language:
    """Teaches a tiny model, if it was not yet, and finishes the part; returns the model."""
    task = load_task(config.task, config.seed)
    language = tiny(config.model, task.characters, part.rng("init").torch)
    if not part.finished:
        teach(language, task, config.model, part)
    return language


def begin(config: Config, run: Run, task: Task, start: Path | None = None) -> Language:
    """Returns the model at the start: read, or for a tiny one taught in a part of the run."""
    if config.model.source != "tiny":
        language = load_language(model_folder(config.model.source), config.model.implementation)
    else:
        if start is None:
            part = run.child("start")
            start_part(config, part)
            run.world.barrier()
            start = part.directory
        language = tiny(config.model, task.characters, run.rng("init").torch)
        language.model.load_state_dict(load_file(start / "final" / "model.safetensors"))
    if config.model.lora_rank:
        add_adapters(language.model, config.model.lora_rank, config.model.lora_alpha)
    return language


def fitting(
    problems: Sequence[Problem], reader: Reader, config: Config, run: Run
) -> tuple[list[Problem], list[list[int]]]:
    """Returns the problems whose prompts are short enough, with their ids.

    Raises:
        DataError: None is.
    """
    longest = config.task.max_prompt_tokens
    pairs = [(problem, reader.encode(problem.prompt)) for problem in problems]
    kept = [(problem, ids) for problem, ids in pairs if 0 < len(ids) <= longest]
    if len(kept) < len(pairs):
        text = f"{len(pairs) - len(kept)} of {len(pairs)} prompts are empty or longer than {longest} tokens"
        if not kept:
            raise DataError(f"{text}: raise task.max_prompt_tokens, or give shorter ones")
        run.say(f"data: {text}; they are left out")
        run.event("warning", text=text)
    return [problem for problem, _ in kept], [ids for _, ids in kept]


def watch_empty(collector: Collector, trained: bool, counts: dict[str, float], most: int, run: Run) -> None:
    """Counts steps in a row without a group to train on, warns, and stops the run after ``most``."""
    collector.empty = 0 if trained else collector.empty + 1
    if trained:
        return
    right, wrong, failed = (counts.get(kind, 0) for kind in ("right", "wrong", "failed"))
    tally = f"{right:.0f} right, {wrong:.0f} wrong, {failed:.0f} failed"
    text = f"step {run.step}: no group with a spread (all {tally}); nothing to learn from"
    run.say(text)
    run.event("warning", text=text)
    if collector.empty >= most:
        advice = (
            "the verifier fails: see `failure` in the samples" if failed >= max(right, wrong, 1)
            else "give harder problems" if right > wrong
            else "give easier problems, a better starting model, or longer answers (sampling.max_tokens)"
        )  # fmt: skip
        raise Stalled(f"no group had a spread in {collector.empty} steps in a row (the last: all {tally}); {advice}")


def group_logs(seen: Sequence[Group], counts: dict[str, float], step: int) -> dict[str, float]:
    """What is watched of the answers of a step."""
    kinds = dict.fromkeys(("mixed", "right", "wrong", "failed"), 0)
    logs = {f"groups/{name}": float(value) for name, value in {**kinds, **counts}.items()}
    if not seen:
        return logs
    answers = [answer for group in seen for answer in group.answers]
    verdicts = [verdict for group in seen for verdict in group.verdicts]
    lengths = np.array([len(answer.tokens) for answer in answers])
    ages = np.array([step - version for answer in answers for version in answer.versions])
    failures = Counter(f"failures/{verdict.failure}" for verdict in verdicts if verdict.failure)
    return (
        logs
        | dict(failures)
        | {
            "groups/judged": float(len(seen)),
            "answers/number": float(len(answers)),
            "answers/accuracy": float(np.mean([bool(verdict.right) for verdict in verdicts])),
            "answers/score": float(np.mean([verdict.score for verdict in verdicts])),
            "answers/length": float(lengths.mean()),
            "answers/length_min": float(lengths.min()),
            "answers/length_max": float(lengths.max()),
            "answers/unreadable": float(np.mean([verdict.note in UNREADABLE for verdict in verdicts])),
            "answers/truncated": float(np.mean([not answer.stopped for answer in answers])),
            "async/staleness": float(ages.mean()),
            "async/staleness_max": float(ages.max()),
        }
    )
