"""PBT: members that learn with each other, the worst of them replaced by the best with changed settings.

In an iteration every member plays with every other and with itself, learning from its own seat beside a frozen partner.
Then all pairs are judged, the worst member takes over the best one's weights, step count and settings, and changes
each setting with some probability. The best member at the end is the agent. Source: 2019 code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sextet.core.run import Run
from sextet.core.seeding import numpy_rng, torch_rng
from sextet.core.workers import Workers
from sextet.mep.config import Config, PPOConfig
from sextet.mep.jobs import Parts, log_all, mean, open_workers, run_jobs
from sextet.mep.overcooked import Layout, Overcooked
from sextet.mep.policy import Policy
from sextet.mep.ppo import Learner, collect, shape_rewards
from sextet.mep.responses import read_policy, stack

SCALED = ("clip", "learning_rate", "entropy_coef", "value_coef", "epochs")  # settings that mutate by a factor
FACTORS = (0.75, 1.25)


@dataclass(kw_only=True)
class Brood:
    """The members of all populations in training, population after population, with their scores as last judged."""

    states: list[dict[str, Any]]
    scores: list[float]

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that changes."""
        return {"states": self.states, "scores": self.scores}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts a state back."""
        self.states, self.scores = state["states"], state["scores"]


def train_pbt(config: Config, run: Run, count: int, workers: Workers | None = None) -> list[Policy]:
    """Trains `count` independent populations; returns the best member of each.

    A run that is finished is read back.

    Args:
        config: Settings; `ppo` holds those from which all members start.
        run: Where the members, their checkpoints and metrics are kept.
        count: Populations.
        workers: Open workers of `open_workers` to use; by default workers of its own.
    """
    options, layout = config.pbt, Layout.load(config.layout)
    if not run.finished:
        total = count * options.size
        learners = [Learner(config, layout, run.rng("init", index).torch) for index in range(total)]
        settings = {name: getattr(config.ppo, name) for name in (*SCALED, "gae_lambda")}
        states = [{"learner": learner.state_dict(), "settings": settings} for learner in learners]
        brood = Brood(states=states, scores=[0.0] * total)
        run.track(brood=brood)
        games = options.size * config.population.updates_per_iteration * config.steps_per_update
        with contextlib.nullcontext(workers) if workers else open_workers(config) as crew:
            for step in run.steps(-(-int(options.steps) // games)):
                keys = [run.key("update", step, index) for index in range(total)]
                brood.states, parts = run_jobs(crew, update_pbt, config, brood.states, keys)
                keys = [run.key("evaluate", step, index) for index in range(total)]
                rows, _ = run_jobs(crew, judge_pbt, config, brood.states, keys)
                brood.scores = pair_scores(rows, options.size)
                last = (step + 1) * games >= options.steps
                if not last:
                    for at in range(0, total, options.size):
                        group = slice(at, at + options.size)
                        rng = run.rng("update", "mutate", step, at).numpy
                        brood.states[group] = exploit(brood.states[group], brood.scores[group], config, rng)
                log_all(run, "member", parts)
        best = [at + int(np.argmax(brood.scores[at : at + options.size])) for at in range(0, total, options.size)]
        weights = [brood.states[index]["learner"]["policy"] for index in best]
        named = {f"{group}/{name}": tensor for group, row in enumerate(weights) for name, tensor in row.items()}
        chosen = [brood.states[index]["settings"] for index in best]
        run.finish({"scores": [brood.scores[index] for index in best], "settings": chosen}, named)
    return [read_policy(config, run, index) for index in range(count)]


def with_settings(config: PPOConfig, settings: dict[str, Any]) -> PPOConfig:
    """Puts a member's settings in; the final step size and entropy weight keep their ratio to those at the start."""
    ends = {
        f"{name}_final": getattr(config, f"{name}_final") * settings[name] / getattr(config, name)
        for name in ("learning_rate", "entropy_coef")
        if getattr(config, name)
    }
    return replace(config, **settings, **ends)


def update_pbt(
    config: Config, env: Overcooked, states: Sequence[dict[str, Any]], index: int, key: int
) -> tuple[dict[str, Any], Parts]:
    """One iteration of one member, a `Job`: it learns with every member of its population in turn, itself included.

    Returns:
        The member's next state, and the means of what is logged.
    """
    own, size = states[index], config.pbt.size
    first = index - index % size
    learner = Learner(replace(config, ppo=with_settings(config.ppo, own["settings"])), env.layout)
    learner.load_state_dict(own["learner"])
    rows = []
    for partner in range(first, first + size):
        for turn in range(config.population.updates_per_iteration):
            seats = np.full(env.num_envs, numpy_rng(key, "partner", partner, turn).integers(2))
            generator, weights = torch_rng(key, "rollout", partner, turn), states[partner]["learner"]["policy"]
            rollout = collect(env, learner.policy, generator, partners=weights, seats=seats)
            context = f"member {index}, {learner.env_steps} environment steps"
            rng, none = torch_rng(key, "update", partner, turn), torch.zeros(())
            rows.append(learner.update(rollout, none, rng, total_steps=config.pbt.steps, context=context))
    return {"learner": learner.state_dict(), "settings": own["settings"]}, mean(rows)


def judge_pbt(
    config: Config, env: Overcooked, states: Sequence[dict[str, Any]], index: int, key: int
) -> tuple[list[float], Parts]:
    """Games of one member with every member of its population, a `Job`.

    Returns:
        Mean return with each, rewards shaped as they are at its step count; and nothing to log.
    """
    size, games = config.pbt.size, config.pbt.games
    first = index - index % size
    learner = Learner(config, env.layout)
    learner.load_state_dict(states[index]["learner"])
    partners = stack([states[other]["learner"]["policy"] for other in range(first, first + size)])
    chosen = {name: tensor.repeat_interleave(games, 0) for name, tensor in partners.items()}
    hall = Overcooked(env.layout, size * games, horizon=env.horizon)
    seats = np.arange(size * games) % 2
    rollout = collect(hall, learner.policy, torch_rng(key, "rollout"), partners=chosen, seats=seats)
    shaping = max(0.0, 1 - learner.env_steps / config.ppo.shaping_steps)
    rewards = shape_rewards(rollout, shaping, team=True).sum(0)
    return rewards.view(size, games).mean(1).tolist(), {}


def pair_scores(rows: Sequence[Sequence[float]], size: int) -> list[float]:
    """Mean over the pairs of each member, a pair's score being the mean of both members' games: rows (k, size)."""
    scores: list[float] = []
    for at in range(0, len(rows), size):
        table = np.array(rows[at : at + size])
        scores += ((table + table.T) / 2).mean(1).tolist()
    return scores


def exploit(
    states: Sequence[dict[str, Any]], scores: Sequence[float], config: Config, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Replaces the worst member of a population by a copy of the best whose settings mutate."""
    best, worst = int(np.argmax(scores)), int(np.argmin(scores))
    result = list(states)
    if best != worst:
        settings = mutate(states[best]["settings"], config.pbt.mutation, rng)
        result[worst] = {"learner": states[best]["learner"], "settings": settings}
    return result


def mutate(settings: dict[str, Any], chance: float, rng: np.random.Generator) -> dict[str, Any]:
    """Changes each setting with probability `chance`: times 0.75 or 1.25, equally likely; whole epochs, at least one.

    lambda moves by min(1 - lambda, lambda) / 2 up or down instead, so that it stays between 0 and 1.
    """
    changed = dict(settings)
    for name in (*SCALED, "gae_lambda"):
        hit, up = rng.random() < chance, int(rng.integers(2))
        if not hit:
            continue
        if name == "gae_lambda":
            value = settings[name]
            changed[name] = value + (2 * up - 1) * min(1 - value, value) / 2
        else:
            value = settings[name] * FACTORS[up]
            changed[name] = max(1, int(value)) if name == "epochs" else value
    return changed
