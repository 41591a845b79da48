"""The page of a run: ask its model, look at its answers step by step, watch its curves; and its routes.

A run, finished or not, and each training of an ablation is a "part", chosen by name; nothing in a request becomes a
path. An error is ``{"error": a sentence}``. Texts of models and prompts are data to be shown, never code.

- ``GET /api/parts``: ``[{name, samples, finished}]``. All routes below take the parameter ``part``; by default the
  first.
- ``GET /api/part``: task, settings, state, results and warnings of a part, and its steps with samples.
- ``GET /api/curves``: all series of the metrics: ``{name: [[step, value] or [step, mean, least, most]]}``.
- ``GET /api/samples?step=``: the groups of a step, with texts and verdicts but without tokens; with ``&draw=`` one
  group, with the tokens of its answers and their log-probabilities.
- ``GET /api/model``: what the finished model can be asked, with examples.
- ``POST /api/ask``: answers to a :class:`Question`, judged where its prompt is one of the task's problems.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, HTTPException, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from sextet.core.errors import SextetError, UsageError, unknown
from sextet.core.files import read_json, read_text
from sextet.core.metrics import read_metrics
from sextet.core.records import parts_of
from sextet.dapo.evaluate import Reader, load
from sextet.dapo.rollout import Limits, Request
from sextet.dapo.samples import read_samples, steps_with_samples
from sextet.dapo.settings import METHODS
from sextet.dapo.tasks import Problem, load_task
from sextet.dapo.verifier import Verifier
from sextet.serve import Demo, Options
from sextet.serve.turns import Turns

SECONDS = 60.0  # of a question, waiting included
MOST_ANSWERS = 16
MOST_NEW = 1024  # tokens of an answer, unless training allowed more
MOST_TOKENS = 16_384  # of all answers to a question, their prompts included
POINTS = 400  # of a curve
PIECE, TEXT = 1000, 20_000  # characters of a token and of a text that are shown
TOKENS = ("pieces", "logp", "versions")
Number = Annotated[int, Query(ge=0, lt=2**53)]
WEIGHTS = "final/model.safetensors"
NOT_YET = "there is no finished model yet; samples and curves can be looked at while it is trained"
NOTED = ("warning", "update skipped", "samples lost", "save failed")


class Question(BaseModel):
    """What a model is asked."""

    model_config = ConfigDict(extra="forbid")
    prompt: Annotated[str, Field(min_length=1, max_length=20_000)]
    part: str | None = None
    samples: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] = 4
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0


def shown(problem: Problem) -> str:
    """Returns a prompt as people see it: a chat as its texts, one after the other."""
    return problem.prompt if isinstance(problem.prompt, str) else "\n\n".join(one["content"] for one in problem.prompt)


class Desk:
    """A finished model with its task.

    Args:
        folder: The run's ``final`` folder.

    Raises:
        SextetError: The model cannot be loaded.
    """

    def __init__(self, folder: Path) -> None:
        self.policy = load(folder)
        self.config, self.reader = self.policy.config, self.policy.reader
        self.problems, self.reward = dict[str, Problem](), ""
        with contextlib.suppress(SextetError):  # without the task's files the model answers all the same
            task = load_task(self.config.task, self.config.seed)
            self.reader = Reader.of(self.reader.tokenizer, self.config.task, task)
            self.problems = {shown(problem): problem for problem in (*task.test, *task.train)}
            self.reward = task.reward
        self.most_new = max(MOST_NEW, self.config.sampling.max_tokens)
        self.room = int(self.policy.language.record.get("max_position_embeddings") or MOST_TOKENS)

    def about(self) -> dict[str, Any]:
        """Returns what can be asked, and prompts to begin with."""
        return {
            "examples": [prompt for prompt in list(self.problems)[:200] if len(prompt) < TEXT][:8],
            "characters": getattr(self.reader.tokenizer, "characters", None), "most_samples": MOST_ANSWERS,
            "most_new": self.most_new, "max_tokens": self.config.sampling.max_tokens,
        }  # fmt: skip

    def ask(self, question: Question, until: float) -> dict[str, Any]:
        """Returns answers with their tokens' probabilities.

        Raises:
            SextetError: The question is too large, or the model cannot read it.
            HTTPException: There is no answer at the time ``until`` (of `time.monotonic`).
        """
        problem = self.problems.get(question.prompt)
        prompt = self.reader.encode(problem.prompt if problem else question.prompt)
        number, new = question.samples, question.max_tokens or self.config.sampling.max_tokens
        both = len(prompt) + new
        if not prompt or new > self.most_new or both > self.room or number * both > MOST_TOKENS:
            raise UsageError(
                f"{number} answers of {new:,} tokens to a prompt of {len(prompt):,} are impossible: a prompt has 1 or "
                f"more, an answer at most {self.most_new:,}, both {self.room:,}, and all together {MOST_TOKENS:,}"
            )

        def poll() -> None:
            if time.monotonic() > until:
                raise HTTPException(503, f"no answer within {SECONDS:.0f} seconds; ask for fewer or shorter answers")

        limits = Limits(
            max_tokens=new, stop=self.reader.stop, temperature=max(question.temperature, 1e-3), top_p=question.top_p,
            seed=question.seed,
        )  # fmt: skip
        wanted = Request(key=("answer", 0), prompt=prompt, numbers=range(number))
        answers = self.policy.engine.generate([wanted], limits, poll)[0]
        texts, decode = [self.reader.decode(answer) for answer in answers], self.reader.tokenizer.decode
        found: list[dict[str, Any]] = [
            {**asdict(answer), "text": text, "pieces": [decode([token]) for token in answer.tokens]}
            for answer, text in zip(answers, texts, strict=True)
        ]
        if problem is not None:
            items, most = [(text, problem.answer, problem.extra) for text in texts], self.config.task.reward_mb
            # without the reward there is no verdict
            with (
                contextlib.suppress(SextetError),
                Verifier(self.reward, seconds=3, megabytes=most) as judge,
            ):
                for one, verdict in zip(found, judge.verdicts(items), strict=True):
                    one |= asdict(verdict)
        return {"answer": problem and problem.answer, "prompt_tokens": len(prompt), "answers": [*map(bounded, found)]}


_desk = lru_cache(maxsize=2)(lambda folder, changed: Desk(folder))  # models in memory; another file is another one


def bounded(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer of which texts and tokens of absurd length are cut."""
    text = answer["text"] if len(answer["text"]) <= TEXT else f"… {answer['text'][-TEXT:]}"
    return answer | {"pieces": [piece[:PIECE] + "…" * (len(piece) > PIECE) for piece in answer["pieces"]], "text": text}


def curves(folder: Path) -> dict[str, list[list[float]]]:
    """Returns every series of a part's metrics; those of more than `POINTS` as means of stretches, with bounds."""
    series: dict[str, list[list[float]]] = {}
    for row in read_metrics(folder / "metrics.jsonl"):
        for name in row.keys() - {"step"}:
            series.setdefault(name, []).append([row["step"], row[name]])
    for name, value in _summary(folder).get("summary", {}).items():
        if f"eval/{name}" in series:  # the test after the last step
            series[f"eval/{name}"].append([_summary(folder)["steps"], value["mean"]])
    for name, points in series.items():
        if len(points) > POINTS:
            stretches = np.array_split(np.array(points, dtype=float), POINTS)
            series[name] = [[p[-1, 0], *(float(f(p[:, 1])) for f in (np.mean, np.min, np.max))] for p in stretches]
    return series


def _summary(folder: Path) -> dict[str, Any]:
    return read_json(folder / "summary.json") if (folder / "summary.json").exists() else {}


@lru_cache(maxsize=3)
def _groups(folder: Path, step: int) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = read_samples(folder, step)["groups"]
    return [group | {"answers": [*map(bounded, group["answers"])]} for group in groups]


def parts_by_name(runs: Sequence[Path]) -> dict[str, Path]:
    """Returns the parts of runs; the supervised starts of tiny models are left out."""
    return {
        "/".join(filter(None, (run.name if len(runs) > 1 else "", name))): folder
        for run in runs
        for name, folder in parts_of(run)
        if (folder / "config.json").exists() and "start" not in name.rpartition("/")[2].split("-")
    }


def about_part(folder: Path) -> dict[str, Any]:
    """Returns what /api/part says."""
    config = read_json(folder / "config.json")["config"]
    rows, done = read_metrics(folder / "metrics.jsonl"), _summary(folder)
    return {
        "name": folder.absolute().name, "step": rows[-1]["step"] + 1 if rows else 0, "finished": bool(done),
        "samples": steps_with_samples(folder), "why_not": "" if (folder / WEIGHTS).exists() else NOT_YET,
        "config": config, "seconds": done.get("seconds"),
        "method": METHODS.get(config["method"], {}), "results": done.get("summary", {}), "warnings": warnings(folder),
    }  # fmt: skip


def warnings(folder: Path) -> list[str]:
    """Returns the last warnings of a training."""
    text = read_text(folder / "events.jsonl") if (folder / "events.jsonl").exists() else ""
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]
    return [str(row.get("text") or row.get("error")) for row in rows if row["event"] in NOTED][-20:]


def desk(folder: Path) -> Desk:
    """Returns the model of a part, loaded if need be.

    Raises:
        HTTPException: 409 where there is none yet. SextetError: It cannot be loaded.
    """
    if not (folder / WEIGHTS).exists():
        raise HTTPException(409, NOT_YET)
    return _desk(folder / "final", (folder / WEIGHTS).stat().st_mtime_ns)


def samples(folder: Path, step: int, draw: int | None) -> Any:
    """Returns the groups of a step without tokens, or the group of a draw with them; HTTPException 404 for others."""
    if step not in (steps := steps_with_samples(folder)):
        there = f"there are those of {len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else "there are none"
        raise HTTPException(404, f"no samples of step {step}; {there}")
    groups = {group["draw"]: group for group in _groups(folder, step)}
    if draw is None:
        return [
            group | {"answers": [{k: v for k, v in one.items() if k not in TOKENS} for one in group["answers"]]}
            for group in groups.values()
        ]
    if draw not in groups:
        raise HTTPException(404, f"no group {draw} in step {step}; there are {sorted(groups)}"[:300])
    return groups[draw]


def demo(runs: Sequence[Path], options: Options) -> Demo:
    """Returns the page of runs, finished or not, see `sextet.serve`.

    Raises:
        UsageError: Options of another page.
    """
    if options.study or options.games:
        raise UsageError("--study and --games are for the page of mep")
    turns = Turns(at_once=2, queue=8, seconds=SECONDS + 5)
    page, router = Path(__file__).with_name("page"), routes(runs, turns)
    return Demo(router=router, page=page, close=turns.close, gauges=turns.gauges)


def routes(runs: Sequence[Path], turns: Turns) -> APIRouter:
    """Returns the routes of the page."""
    router = APIRouter(prefix="/api")

    async def reply(part: str | None, work: Any, *arguments: Any, how: Any = asyncio.to_thread) -> Response:
        parts = parts_by_name(runs)
        folder = parts.get(next(iter(parts)) if part is None else part)
        if folder is None:
            raise HTTPException(404, unknown("part", str(part)[:80], parts))
        try:
            value = json.dumps(await how(work, folder, *arguments))
        except SextetError as error:  # where the run lies is nobody's business
            text = str(error).replace(str(folder), folder.name)
            raise HTTPException(400 if isinstance(error, UsageError) else 422, text) from error
        # without NaN, which browsers do not read
        return Response(json.dumps(json.loads(value, parse_constant=lambda _: None)), media_type="application/json")

    @router.get("/parts")
    async def get_parts() -> Any:
        return [
            {"name": name, "samples": len(steps_with_samples(at)), "finished": (at / "summary.json").exists()}
            for name, at in parts_by_name(runs).items()
        ]

    @router.get("/part")
    async def get_part(part: str | None = None) -> Response:
        return await reply(part, about_part)

    @router.get("/curves")
    async def get_curves(part: str | None = None) -> Response:
        return await reply(part, curves)

    @router.get("/samples")
    async def get_samples(step: Number, draw: Number | None = None, part: str | None = None) -> Response:
        return await reply(part, samples, step, draw)

    @router.get("/model")
    async def get_model(part: str | None = None) -> Response:
        return await reply(part, lambda folder: desk(folder).about(), how=turns)

    @router.post("/ask")
    async def post_ask(question: Question) -> Response:
        until = time.monotonic() + SECONDS
        return await reply(question.part, lambda folder: desk(folder).ask(question, until), how=turns)

    return router
