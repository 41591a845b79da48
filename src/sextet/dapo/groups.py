"""Dynamic sampling: prompts are drawn, answered and judged until N groups can be learnt from (Algorithm 1).

Every draw has a number, which names the random streams of its answers. So a step that is done again after a kill draws
the same prompts and gets the same answers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sextet.core.errors import DataError
from sextet.core.priority import rank_probabilities
from sextet.core.run import Run
from sextet.core.seeding import numpy_rng
from sextet.dapo.generators import Done, Pool
from sextet.dapo.rewards import Verdict
from sextet.dapo.rollout import Answer, Limits, Request
from sextet.dapo.settings import SamplingConfig
from sextet.dapo.tasks import Problem
from sextet.dapo.verifier import Verifier

TAG = "train"
MOST_CANDIDATES = 16  # times the groups still wanted, where few prompts give a spread


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt with its G answers and their verdicts."""

    draw: int
    problem: int
    prompt: list[int]
    answers: list[Answer]
    verdicts: list[Verdict]

    @property
    def scores(self) -> list[float]:
        """The raw scores, before any shaping by length."""
        return [verdict.score for verdict in self.verdicts]

    @property
    def oldest(self) -> int:
        """The oldest version of weights that sampled a token."""
        return oldest(self.answers)

    def kind(self, tolerance: float) -> str:
        """``mixed``, or without spread ``right``, ``wrong`` or ``failed`` (no verdict on any answer)."""
        judged = [verdict for verdict in self.verdicts if not verdict.failure]
        if not judged:
            return "failed"
        if float(np.std(self.scores)) > tolerance:
            return "mixed"
        return "right" if judged[0].right else "wrong"


def oldest(answers: Sequence[Answer]) -> int:
    """Returns the oldest version of weights that sampled a token of the answers."""
    return min((version for answer in answers for version in answer.versions), default=0)


class Prompts:
    """The order of problems: every one once an epoch, or by priority."""

    def __init__(self, number: int, seed: int, curriculum: float) -> None:
        self.number, self.seed, self.curriculum = number, seed, curriculum
        self.drawn = 0
        self.tried = np.zeros(number)
        self.solved = np.zeros(number)

    def take(self, count: int) -> list[tuple[int, int]]:
        """Returns (number of the draw, problem) of the next draws."""
        first, self.drawn = self.drawn, self.drawn + count
        if self.curriculum:
            p = (self.solved + 1) / (self.tried + 2)
            chances = rank_probabilities(1 - 4 * p * (1 - p), self.curriculum)
            rng = numpy_rng(self.seed, "data", "priority", first)
            count_distinct = min(count, int((chances > 0).sum()))
            chosen = rng.choice(self.number, count_distinct, replace=False, p=chances).tolist()
            chosen += rng.choice(self.number, count - count_distinct, p=chances).tolist()
            return list(enumerate(chosen, first))
        epochs: dict[int, np.ndarray] = {}
        order = []
        for draw in range(first, self.drawn):
            epoch, place = divmod(draw, self.number)
            if epoch not in epochs:
                epochs[epoch] = numpy_rng(self.seed, "data", "order", epoch).permutation(self.number)
            order.append((draw, int(epochs[epoch][place])))
        return order

    def saw(self, problem: int, verdicts: Sequence[Verdict]) -> None:
        """Notes how a problem went; older results fade."""
        judged = [verdict for verdict in verdicts if not verdict.failure]
        self.tried[problem] = self.tried[problem] / 2 + len(judged)
        self.solved[problem] = self.solved[problem] / 2 + sum(bool(verdict.right) for verdict in judged)


class Collector:
    """Collects the groups of each step. Its state holds what is left over and what is on its way.

    Args:
        config: How to sample, with no field left to the method.
        problems: The training problems.
        prompts: The ids of each problem's prompt.
        pool: The generators; None where nothing is collected, on ranks but the first.
        verifier: Judges answers; None as well.
        limits: How to sample an answer.
        seed: Of the run.
        ahead: Rollout steps that generation may run ahead.
    """

    def __init__(
        self, config: SamplingConfig, problems: Sequence[Problem], prompts: Sequence[list[int]], pool: Pool | None,
        verifier: Verifier | None, limits: Limits, *, seed: int, ahead: int = 0,
    ) -> None:  # fmt: skip
        self.config, self.problems, self.texts = config, problems, prompts
        self.pool: Any = pool
        self.verifier: Any = verifier
        self.limits, self.ahead = limits, ahead
        self.order = Prompts(len(problems), seed, config.curriculum)
        self.left: list[Group] = []
        self.share = 1.0
        self.empty = 0
        """Steps in a row without a group to train on."""

    def collect(self, step: int, run: Run, decode: Any) -> tuple[list[Group], list[Group], dict[str, float]]:
        """Returns the groups to train on, all groups that were judged for it, and counts for the logs.

        With ``dynamic`` off every group is trained on. The weights do not change while a step is collected. No group is
        more than ``ahead`` versions old, or one where surplus groups are carried; older ones are dropped and counted.
        """
        config, seen, counts = self.config, [], Counter[str]()
        kept = [group for group in self.left if not self._late(group.answers, step, counts)]
        counts["carried"], self.left = len(kept), kept
        while True:
            run.poll()
            if config.max_rounds == 0 or counts["rounds"] < config.max_rounds:
                counts["rounds"] += self._send(len(kept))
            if len(kept) >= config.prompts or not self.pool.in_flight(TAG):
                break
            groups = self._judge(self.pool.take(TAG, everything=self.ahead == 0), step, decode, counts)
            for group in groups:
                kind = group.kind(config.tolerance)
                counts[kind] += 1
                self.order.saw(group.problem, group.verdicts)
                if not config.dynamic or kind == "mixed":
                    kept.append(group)
            seen += groups
            if groups:
                mixed = sum(group.kind(config.tolerance) == "mixed" for group in groups)
                self.share = 0.5 * self.share + 0.5 * max(mixed / len(groups), 1 / MOST_CANDIDATES)
        surplus = kept[config.prompts :]
        counts["surplus"] = len(surplus)
        # what generation has ahead of training is for the steps to come
        self.left = surplus if config.surplus == "carry" or self.ahead else []
        return kept[: config.prompts], seen, dict(counts)

    def _late(self, answers: Sequence[Answer], step: int, counts: Counter[str]) -> bool:
        """Returns whether answers are too old to train on, and counts them then."""
        late = step - oldest(answers) > max(self.ahead, int(self.config.surplus == "carry"))
        counts["stale"] += late
        return late

    def _send(self, kept: int) -> bool:
        """Draws prompts for the groups still wanted, less those on their way; returns whether there were any."""
        config = self.config
        factor = config.candidates or min(1 / self.share, MOST_CANDIDATES) if config.dynamic else 1.0
        wanted = (1 + self.ahead) * config.prompts - kept
        number = max(0, math.ceil(wanted * factor) - len(self.pool.in_flight(TAG)))
        requests = [self._request(draw, problem) for draw, problem in self.order.take(number)]
        size = math.ceil(config.prompts * factor) if self.ahead else number  # a ticket has one step's work at most
        for start in range(0, number, max(size, 1)):
            self.pool.send(requests[start : start + size], self.limits, TAG)
        return number > 0

    def _request(self, draw: int, problem: int) -> Request:
        return Request(
            key=("rollout", draw, problem), prompt=self.texts[problem], numbers=tuple(range(self.config.answers))
        )

    def _judge(self, finished: Sequence[Done], step: int, decode: Any, counts: Counter[str]) -> list[Group]:
        """Drops answers that are too old, sends unfinished ones back, and asks for verdicts on the others."""
        whole: list[Done] = []
        for done in finished:
            before = sum(len(begun.tokens) for begun in done.request.begun.values())
            counts["tokens"] += sum(len(answer.tokens) for answer in done.answers) - before
            if self._late(done.answers, step, counts):
                continue
            if any(self._goes_on(answer) for answer in done.answers):
                self._send_on(done)
            else:
                whole.append(done)
        items = [(decode(answer), self.problems[int(done.request.key[2])]) for done in whole for answer in done.answers]
        verdicts = iter(self.verifier.verdicts([(text, problem.answer, problem.extra) for text, problem in items]))
        groups = []
        for done in whole:
            judged = [next(verdicts) for _ in done.answers]
            counts["failures"] += sum(bool(verdict.failure) for verdict in judged)
            groups.append(
                Group(
                    draw=int(done.request.key[1]),
                    problem=int(done.request.key[2]),
                    prompt=list(done.request.prompt),
                    answers=done.answers,
                    verdicts=judged,
                )
            )
        return sorted(groups, key=lambda group: group.draw)

    def _goes_on(self, answer: Answer) -> bool:
        return bool(self.limits.slice_tokens) and not answer.stopped and len(answer.tokens) < self.limits.max_tokens

    def _send_on(self, done: Done) -> None:
        request = done.request
        begun = dict(zip(request.numbers, done.answers, strict=True))
        self.pool.send(
            [Request(key=request.key, prompt=request.prompt, numbers=request.numbers, begun=begun)], self.limits, TAG
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the data, what was left over, and what is on its way."""
        flying = self.pool.in_flight(TAG) if self.pool is not None else []
        return {
            "drawn": self.order.drawn,
            "tried": self.order.tried.tolist(),
            "solved": self.order.solved.tolist(),
            "share": self.share,
            "empty": self.empty,
            "left": [
                asdict(group)
                for group in self.left
            ],
            "flying": [
                [*request.key[1:], {str(number): asdict(answer) for number, answer in request.begun.items()}]
                for request in flying
            ],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it; what was on its way is sent again.

        Raises:
            DataError: The state is of other problems.
        """
        if len(state["tried"]) != len(self.problems):
            raise DataError(f"the checkpoint is of {len(state['tried'])} problems; there are {len(self.problems)} now")
        self.order.drawn, self.share, self.empty = state["drawn"], state["share"], state["empty"]
        self.order.tried, self.order.solved = np.array(state["tried"]), np.array(state["solved"])
        self.left = [
            Group(
                draw=left["draw"],
                problem=left["problem"],
                prompt=left["prompt"],
                answers=[Answer(**answer) for answer in left["answers"]],
                verdicts=[Verdict(**verdict) for verdict in left["verdicts"]],
            )
            for left in state["left"]
        ]
        again = []
        for draw, problem, begun in state["flying"]:
            request = self._request(draw, problem)
            parts = {int(number): Answer(**answer) for number, answer in begun.items()}
            again.append(Request(key=request.key, prompt=request.prompt, numbers=request.numbers, begun=parts))
        if self.pool is not None:
            self.pool.send(again, self.limits, TAG)
