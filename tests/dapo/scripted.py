"""A pool and a verifier that do what a script says, for tests of what is collected."""

import json
from types import SimpleNamespace

import numpy as np

from sextet.dapo.config import Config, SamplingConfig, resolve
from sextet.dapo.generators import Done
from sextet.dapo.groups import Collector
from sextet.dapo.rewards import Verdict
from sextet.dapo.rollout import NOTHING, Answer, Limits
from sextet.dapo.tasks import Problem

RUN = SimpleNamespace(poll=lambda: None)
RIGHT, WRONG = Verdict(score=1.0, right=True), Verdict(score=-1.0, right=False)
FAILED = Verdict(score=-1.0, right=None, failure="timeout")
LENGTH = 6


class ScriptedPool:
    """Answers are [draw, number, 0, ...]; tickets end in random order, with the weights of when they were started."""

    def __init__(self, seed=0, tickets=1):
        self.rng, self.tickets = np.random.default_rng(seed), tickets
        self.version, self.sent, self.flying, self.kept = 0, [], [], []

    def send(self, requests, limits, tag):
        assert tag == "train"
        size = -(-len(requests) // self.tickets)
        for start in range(0, len(requests), size or 1):
            part = requests[start : start + size]
            self.sent += [request for request in part if not request.begun]
            started = self.version if self.rng.random() < 0.7 else None  # None: waits until it is taken
            self.flying.append((part, limits, started))

    def in_flight(self, tag):
        return [request for part, _, _ in self.flying for request in part]

    def take(self, tag, *, everything):
        number = len(self.flying) if everything else int(self.rng.integers(1, len(self.flying) + 1))
        chosen = self.rng.permutation(len(self.flying))[:number].tolist()
        done = [item for place in chosen for item in self._run(*self.flying[place])]
        self.flying = [ticket for place, ticket in enumerate(self.flying) if place not in chosen]
        return done

    def _run(self, part, limits, started):
        version = self.version if started is None else started
        return [
            Done(request=request, answers=[self._answer(request, n, limits, version) for n in request.numbers],
                 seconds=0.0)
            for request in part
        ]  # fmt: skip

    def _answer(self, request, number, limits, version):
        begun = request.begun.get(number, NOTHING)
        if begun.stopped:
            return begun
        length = 2 + (int(request.key[1]) + number) % (LENGTH - 1)
        whole = [int(request.key[1]), number, *[0] * (length - 2)]
        new = whole[len(begun.tokens) :][: limits.slice_tokens or None]
        return Answer(
            tokens=begun.tokens + new,
            logp=begun.logp + [-0.5 - version] * len(new),
            versions=begun.versions + [version] * len(new),
            stopped=len(begun.tokens) + len(new) == length,
        )


class ScriptedVerifier:
    """Verdicts by a function of (problem, draw, number)."""

    def __init__(self, script):
        self.script, self.asked = script, []

    def verdicts(self, items):
        places = [(extra["index"], *json.loads(text)) for text, _, extra in items]
        self.asked += places
        return [self.script(*place) for place in places]


def decode(answer):
    return json.dumps(answer.tokens[:2])


def mixed(problem, draw, number):
    return RIGHT if number == 0 else WRONG


def by_problem(kinds):
    """A script: the problem's kind, `right`, `wrong`, `failed` or `mixed`."""
    known = {"right": RIGHT, "wrong": WRONG, "failed": FAILED}

    def script(problem, draw, number):
        kind = kinds[problem % len(kinds)]
        return mixed(problem, draw, number) if kind == "mixed" else known[kind]

    return script


def collector(script=mixed, *, number=20, pool=None, seed=3, ahead=0, slice_tokens=0, method="dapo", **fields):
    settings = resolve(
        Config(method=method, sampling=SamplingConfig(**{"prompts": 4, "answers": 2, "max_tokens": LENGTH} | fields))
    ).sampling
    problems = [Problem(prompt=str(index), answer="", extra={"index": index}) for index in range(number)]
    limits = Limits(max_tokens=LENGTH, stop=(), slice_tokens=slice_tokens)
    return Collector(
        settings, problems, [[index] for index in range(number)], pool or ScriptedPool(),
        ScriptedVerifier(script), limits, seed=seed, ahead=ahead,
    )  # fmt: skip


def collect(found, step=0):
    """Publishes the weights of a step and collects."""
    found.pool.version = step
    return found.collect(step, RUN, decode)
