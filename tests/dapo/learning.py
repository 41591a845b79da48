"""Learners, groups and a plain reference of the loss, for tests of the update."""

import math

import numpy as np
import torch
from torch import nn

from dapo.lm import limits, requests
from sextet.core.device import Device, World
from sextet.core.seeding import Rng, numpy_rng, torch_rng
from sextet.dapo.config import Config, LossConfig, OptimConfig, SamplingConfig, resolve
from sextet.dapo.groups import Group
from sextet.dapo.learner import Learner, samples_of
from sextet.dapo.rewards import Verdict
from sextet.dapo.rollout import Answer, Engine, Limits, Request


class FakeRun:
    """What the learner asks of a run."""

    def __init__(self, folder=None, step=0):
        self.folder, self.step, self.events = folder, step, []

    def rng(self, *path):
        return Rng(numpy_rng(1, *path), torch_rng(1, *path))

    def event(self, name, **fields):
        self.events.append({"event": name, **fields})

    def artifact(self, name):
        path = self.folder / "artifacts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


class Bigram(nn.Module):
    """A model whose next token depends on the last only: column t of ``head`` holds the logits after token t."""

    checkpointing = False

    def __init__(self, logits):
        super().__init__()
        self.head = nn.Parameter(torch.tensor(logits, dtype=torch.float32).T.contiguous())

    def forward(self, tokens, positions, mask, cache=None):
        if cache is not None:
            keys = torch.zeros(*tokens.shape, 1)[:, None]
            cache.update(0, keys, keys)
        return nn.functional.one_hot(tokens, self.head.shape[1]).float()


def settings(method="dapo", *, loss=None, sampling=None, optim=None, **fields):
    return resolve(
        Config(
            method=method,
            loss=LossConfig(**loss or {}),
            sampling=SamplingConfig(**{"prompts": 8, "answers": 4, "max_tokens": 12} | (sampling or {})),
            optim=OptimConfig(**{"learning_rate": 1e-3, "clip": 1e9, "weight_decay": 0.0} | (optim or {})),
            device="cpu",
            **fields,
        )
    )


def learner(model, config, world=None):
    return Learner(model, config, Device("cpu", world=world or World()))


def answered_groups(model, *, number=8, answers=4, max_tokens=12, seed=0, flat=()):
    """Groups as a model answers, with random verdicts; those in ``flat`` have no spread."""
    rng = np.random.default_rng(seed)
    asked = requests(number, answers, model.head.shape[0], seed)
    found = Engine(model, slots=64).generate(asked, limits(max_tokens))
    groups = []
    for index, (request, given) in enumerate(zip(asked, found, strict=True)):
        scores = [1.0 if number == 0 else float(rng.choice([-1, 1])) for number in range(answers)]
        scores = [1.0] * answers if index in flat else [-1.0, *scores[1:]] if min(scores) > 0 else scores
        verdicts = [Verdict(score=score, right=score > 0) for score in scores]
        groups.append(Group(draw=index, problem=index, prompt=request.prompt, answers=given, verdicts=verdicts))
    return groups


def moved(model, size=0.02, seed=7):
    """Moves a model's weights a little, so that it is no longer the one that sampled."""
    rng = torch_rng(seed, "init")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=rng)
    return model


def gradient(found):
    return torch.cat([parameter.grad.flatten() for parameter in found.parameters])


def updated(model, config, groups, *, order=None, world=None, run=None):
    """One update on groups; returns its gradient, the logs and the learner."""
    found = learner(model, config, world)
    samples, _ = samples_of([groups[place] for place in order or range(len(groups))], config)
    logs = found.update(samples, run or FakeRun())
    return gradient(found), logs, found


def close(found, expected, relative):
    error = ((found - expected).norm() / expected.norm()).item()
    assert error < relative, error


def text_scores(model, prompt, answer, temperature=1.0):
    """Log-probabilities and entropies of an answer's tokens by one plain causal pass, with their graph."""
    text = torch.tensor([[*prompt, *answer]])
    mask = torch.full((text.shape[1],) * 2, -torch.inf).triu(1)[None, None]
    hidden = model(text, torch.arange(text.shape[1])[None], mask)
    logp = ((hidden @ model.head.T) / temperature).log_softmax(-1)[0, len(prompt) - 1 : -1]
    return logp.gather(1, torch.tensor(answer)[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def plain_loss(model, groups, config, *, old=None, reference=None):
    """The loss of DAPO or GRPO, answer by answer and token by token, as the papers write it."""
    loss, total, terms, answers = config.loss, 0, [], 0
    for group in groups:
        rewards = []
        for answer, score in zip(group.answers, group.scores, strict=True):
            zone = config.sampling.max_tokens - config.sampling.cache_tokens
            over = (
                max(0, len(answer.tokens) - zone) / config.sampling.cache_tokens if config.sampling.cache_tokens else 0
            )
            rewards.append(score - loss.overlong_punishment * over)
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((value - mean) ** 2 for value in rewards) / (len(rewards) - 1))
        for answer, reward in zip(group.answers, rewards, strict=True):
            if loss.overlong_filter and not answer.stopped:
                continue
            advantage = (reward - mean) / (std + 1e-6)
            logp, entropy = text_scores(model, group.prompt, answer.tokens, config.sampling.temperature)
            mu = torch.tensor(answer.logp)
            with torch.no_grad():
                centre = text_scores(old, group.prompt, answer.tokens)[0] if old is not None else mu
                anchor = text_scores(reference, group.prompt, answer.tokens)[0] if reference is not None else None
            ratio = (logp - centre).exp()
            value = -torch.minimum(ratio * advantage, ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high) * advantage)
            if loss.dual_clip and advantage < 0:
                value = value.clamp(max=-loss.dual_clip * advantage)
            if loss.importance == "truncate":
                value = value * (centre - mu).exp().clamp(max=loss.importance_cap)
            elif loss.importance == "mask":
                weight = (centre - mu).exp()
                value = value * weight * ((weight <= loss.importance_cap) & (weight >= 1 / loss.importance_cap))
            elif loss.importance == "sequence":
                value = value * (centre - mu).mean().exp().clamp(max=loss.importance_cap)
            if anchor is not None:
                value = value + loss.kl * ((anchor - logp).exp() - (anchor - logp) - 1)
            value = value - loss.entropy * entropy
            terms.append(value.sum() if loss.aggregate == "token" else value.mean())
            total, answers = total + len(answer.tokens), answers + 1
    return sum(terms) / (total if loss.aggregate == "token" else answers)


def plain_gradient(model, groups, config, **others):
    model.zero_grad()
    plain_loss(model, groups, config, **others).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def by_hand(prompt, *answers):
    """A group of answers given as (tokens, probabilities when sampled, score) and, if they vary, versions."""
    made = [
        Answer(
            tokens=list(tokens), logp=[math.log(p) for p in chances], versions=(more or [[0] * len(tokens)])[0],
            stopped=True,
        )
        for tokens, chances, _, *more in answers
    ]  # fmt: skip
    verdicts = [Verdict(score=float(score), right=score > 0) for _, _, score, *_ in answers]
    return Group(draw=0, problem=0, prompt=list(prompt), answers=made, verdicts=verdicts)


def practise(model, config, contexts, judge, *, steps, stop=(), seed=0):
    """Trains a model on prompts of one token; returns all answers as (step, answer, verdict)."""
    found, engine, sampling = learner(model, config), Engine(model, slots=4096), config.sampling
    rng, drawn, answers = np.random.default_rng(seed), 0, []
    wanted = Limits(max_tokens=sampling.max_tokens, stop=stop, seed=seed)
    for step in range(steps):
        groups = []
        for _ in range(sampling.max_rounds):
            prompts = rng.choice(contexts, sampling.prompts).tolist()
            asked = [
                Request(key=("practice", drawn + place), prompt=[prompt], numbers=range(sampling.answers))
                for place, prompt in enumerate(prompts)
            ]
            drawn += len(asked)
            for request, given in zip(asked, engine.generate(asked, wanted), strict=True):
                verdicts = [
                    Verdict(score=1.0 if judge(request.prompt, answer) else -1.0, right=judge(request.prompt, answer))
                    for answer in given
                ]
                group = Group(draw=0, problem=0, prompt=list(request.prompt), answers=given, verdicts=verdicts)
                answers += zip([step] * len(given), given, verdicts, strict=True)
                if not sampling.dynamic or group.kind(sampling.tolerance) == "mixed":
                    groups.append(group)
            if len(groups) >= sampling.prompts or not sampling.dynamic:
                break
        if groups:
            found.update(samples_of(groups[: sampling.prompts], config)[0], FakeRun(step=step))
    return answers
