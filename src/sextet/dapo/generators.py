"""Generators as workers: what a worker holds, and the pool that sends prompts out and takes answers in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from sextet.core.device import Device
from sextet.core.errors import DivergenceError
from sextet.core.workers import Result, WorkerError, Workers
from sextet.dapo.decoder import Decoder, Shape
from sextet.dapo.foreign import Foreign
from sextet.dapo.model import Language
from sextet.dapo.rollout import Answer, Engine, Limits, Request
from sextet.dapo.settings import Config

Weights = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a generator is made of; its weights come later."""

    config: Config
    record: dict[str, Any]
    folder: str
    builtin: bool
    """Whether the code of the network is ours."""


class Generator:
    """The built-in generator in a worker."""

    def __init__(self, setting: Setting) -> None:
        config = setting.config
        self.device = Device(config.device, config.precision, threads=config.threads)
        shape = Shape.of(setting.record)
        if setting.builtin and shape is not None:
            with torch.device("meta"):
                model: Any = Decoder(shape)
        else:
            from pathlib import Path

            model = Foreign.load(Path(setting.folder))
        self.engine = Engine(model, slots=config.rollout.slots, device=self.device.device)

    def load_weights(self, weights: Weights) -> None:
        """Takes the policy's weights and their version."""
        dtype = self.device.dtype
        state = {name: value.to(self.device.device, dtype) for name, value in weights["model"].items()}
        self.engine.model.load_state_dict(state, assign=True, strict=False)
        self.engine.version = int(weights["version"])

    def generate(self, requests: Sequence[Request], limits: Limits) -> tuple[list[list[Answer]], int]:
        """Returns the answers of each request, and the number of prompt tokens that were computed."""
        before = self.engine.prefilled
        with self.device.autocast():
            answers = self.engine.generate(requests, limits)
        return answers, self.engine.prefilled - before


def make_generator(setting: Setting) -> Any:
    """Makes the generator of the configured backend; the factory of the workers."""
    if setting.config.rollout.backend == "builtin":
        return Generator(setting)
    from sextet.dapo.vllm import make_vllm_generator

    return make_vllm_generator(setting)


@dataclass(frozen=True, kw_only=True)
class Done:
    """Answers to a request, and what they cost: new tokens, and seconds of its ticket shared by tokens."""

    request: Request
    answers: list[Answer]
    seconds: float


class Pool:
    """Sends requests to generators and takes in answers. In-flight requests can be listed, so that none is lost."""

    def __init__(self, config: Config, language: Language) -> None:
        setting = Setting(
            config=config,
            record=language.record,
            folder=str(language.folder or ""),
            builtin=isinstance(language.model, Decoder),
        )
        self.workers = Workers.open(config.workers, make_generator, setting, threads=config.threads)
        self.tickets = config.rollout.tasks
        self.prefilled = 0
        self._count = 0
        self._sent: dict[str, tuple[str, Sequence[Request]]] = {}
        self._kept: dict[str, list[Done]] = {}

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Gives all generators new weights, for tickets that start from now on."""
        self.workers.publish({"model": dict(weights), "version": version})

    def send(self, requests: Sequence[Request], limits: Limits, tag: str) -> None:
        """Starts work on requests, cut into as many tickets as configured."""
        size = math.ceil(len(requests) / self.tickets) if requests else 1
        for start in range(0, len(requests), size):
            part = requests[start : start + size]
            self._count += 1
            key = f"{self._count:08}"
            self._sent[key] = (tag, part)
            self.workers.submit("generate", part, limits, key=key)

    def take(self, tag: str, *, everything: bool) -> list[Done]:
        """Returns finished requests of a tag: all that were sent, or as soon as there are any.

        Raises:
            DivergenceError: The weights of a generator give logits that are not finite.
        """
        while self.waiting(tag) and (everything or not self._kept.get(tag)):
            at_least = None if everything and all(sent == tag for sent, _ in self._sent.values()) else 1
            for result in self._gather(at_least):
                owner, requests = self._sent.pop(result.key)
                answers, prefilled = result.value
                self.prefilled += prefilled
                tokens = sum(len(answer.tokens) for group in answers for answer in group) or 1
                self._kept.setdefault(owner, []).extend(
                    Done(
                        request=request,
                        answers=group,
                        seconds=result.seconds * sum(len(answer.tokens) for answer in group) / tokens,
                    )
                    for request, group in zip(requests, answers, strict=True)
                )
        return self._kept.pop(tag, [])

    def _gather(self, at_least: int | None) -> list[Result]:
        try:
            return self.workers.gather(at_least=at_least)
        except WorkerError as error:
            kind, _, text = error.detail.strip().splitlines()[-1].partition(": ")
            if kind.endswith(DivergenceError.__name__):
                raise DivergenceError(text) from error
            raise

    def waiting(self, tag: str) -> int:
        """Number of tickets of a tag that have not been taken in."""
        return sum(owner == tag for owner, _ in self._sent.values())

    def in_flight(self, tag: str) -> list[Request]:
        """Requests of a tag that were sent and not taken."""
        sent = [request for owner, requests in self._sent.values() if owner == tag for request in requests]
        return sent + [done.request for done in self._kept.get(tag, [])]

    def run(self, requests: Sequence[Request], limits: Limits, tag: str = "test") -> list[list[Answer]]:
        """Returns the answers of each request, in their order, beside whatever else is on its way."""
        self.send(requests, limits, tag)
        found = {done.request.key: done.answers for done in self.take(tag, everything=True)}
        return [found[request.key] for request in requests]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the generators."""
        self.workers.close()
