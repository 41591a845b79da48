"""The answers of every step, kept for people: ``artifacts/samples/000012.json.gz``."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sextet.core.errors import DataError
from sextet.core.files import atomic_write_bytes
from sextet.core.run import Run
from sextet.dapo.evaluate import Reader
from sextet.dapo.groups import Group
from sextet.dapo.learner import Sample
from sextet.dapo.settings import Config
from sextet.dapo.tasks import Problem

MAX_BYTES = 256 * 2**20


def write_samples(
    run: Run, seen: Sequence[Group], groups: Sequence[Group], samples: Sequence[Sample], problems: Sequence[Problem],
    reader: Reader, config: Config,
) -> None:  # fmt: skip
    """Writes up to ``config.samples_kept`` groups of this step; a disk that takes nothing costs a warning.

    Args:
        run: The run.
        seen: All groups that were judged in this step.
        groups: Those that were trained on.
        samples: What was made of them.
        problems: The training problems.
        reader: Makes text of tokens.
        config: The settings.
    """
    if not config.samples_kept:
        return
    trained: dict[int, list[Sample]] = {group.draw: [] for group in groups}
    for sample in samples:
        trained[groups[sample.group].draw].append(sample)
    carried = [group for group in groups if all(group.draw != other.draw for other in seen)]
    ranked = sorted([*carried, *seen], key=lambda group: (group.draw not in trained, group.draw))
    rest = min(config.samples_kept // 4, len(ranked) - len(trained))  # all right and all wrong ones are shown too
    shown = ranked[: min(len(trained), config.samples_kept - rest)] + ranked[len(trained) :]
    tolerance = config.sampling.tolerance
    document = {
        "step": run.step,
        "groups": [
            _group(group, trained.get(group.draw), problems, reader, tolerance)
            for group in shown[: config.samples_kept]
        ],
    }
    try:
        data = gzip.compress(json.dumps(document).encode(), 6, mtime=0)
        atomic_write_bytes(run.artifact(f"samples/{run.step:06}.json.gz"), data)
    except (DataError, OSError) as error:
        run.event("samples lost", step=run.step, error=str(error))


def _group(
    group: Group, samples: Sequence[Sample] | None, problems: Sequence[Problem], reader: Reader, tolerance: float
) -> dict[str, Any]:
    answers = []
    for place, (answer, verdict) in enumerate(zip(group.answers, group.verdicts, strict=True)):
        sample = samples[place] if samples else None
        answers.append(
            {
                "text": reader.decode(answer),
                "pieces": [reader.tokenizer.decode([token]) for token in answer.tokens],
                "logp": [round(value, 4) for value in answer.logp],
                "versions": answer.versions,
                "stopped": answer.stopped,
                "length": len(answer.tokens),
                "score": verdict.score,
                "penalty": sample.penalty if sample else 0.0,
                "reward": verdict.score + (sample.penalty if sample else 0.0),
                "advantage": round(sample.advantage, 6) if sample else None,
                "right": verdict.right,
                "note": verdict.note[:500],
                "failure": verdict.failure,
            }
        )
    return {
        "draw": group.draw,
        "problem": group.problem,
        "kind": group.kind(tolerance),
        "trained": samples is not None,
        "prompt": reader.tokenizer.decode(group.prompt),
        "answer": problems[group.problem].answer,
        "answers": answers,
    }


def steps_with_samples(directory: Path) -> list[int]:
    """Returns the steps of a run of which answers were kept."""
    return sorted(int(path.name[:6]) for path in (directory / "artifacts" / "samples").glob("[0-9]*.json.gz"))


def read_samples(directory: Path, step: int) -> dict[str, Any]:
    """Returns what was kept of a step.

    Raises:
        DataError: Nothing was, or it is damaged.
    """
    path = directory / "artifacts" / "samples" / f"{step:06}.json.gz"
    try:
        with gzip.open(path) as handle:
            data = handle.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise DataError(f"{path} is over {MAX_BYTES:,} bytes")
        document: dict[str, Any] = json.loads(data)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return document
