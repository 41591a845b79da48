"""Stage 1: populations of self-playing members, several at a time.

MEP pays every member r - alpha log pibar(a|s), pibar being the mean policy of its population, whose other members are
taken as they were at the start of the iteration; so members can be updated anywhere and in any order. With alpha 0
members never see each other: each is a run of self-play (SP), and together they are the population of FCP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from sextet.core.run import Run
from sextet.core.seeding import numpy_rng, torch_rng
from sextet.core.workers import Workers
from sextet.mep.config import Config
from sextet.mep.jobs import Job, Parts, log_all, mean, open_workers, run_jobs
from sextet.mep.overcooked import Layout, Overcooked
from sextet.mep.policy import Policy, Weights, log_policy
from sextet.mep.population import entropy_bonus, population_entropy
from sextet.mep.ppo import Learner, Rollout, collect
from sextet.mep.starts import scatter
from sextet.mep.trajedi import update_trajedi

STAGES = ("init", "mid", "final")


@dataclass(frozen=True, kw_only=True)
class Population:
    """What stage 1 leaves: of each member the weights at every one of `STAGES`, and its last self-play return."""

    weights: dict[str, list[Weights]]
    returns: list[float]

    def pool(self, stages: Sequence[str] = STAGES) -> list[Weights]:
        """Returns the partners for stage 2, by default 3 per member."""
        return [weights for stage in stages for weights in self.weights[stage]]

    def policy(self, config: Config, member: int, stage: str = "final") -> Policy:
        """Returns one member as a policy."""
        policy = Policy(Layout.load(config.layout), config.encoding, config.net)
        policy.load_state_dict(dict(self.weights[stage][member]))
        return policy


def train_population(config: Config, run: Run, workers: Workers | None = None) -> Population:
    """Stage 1 for one population; see `train_populations`."""
    return train_populations(config, run, 1, workers)[0]


def train_populations(config: Config, run: Run, count: int, workers: Workers | None = None) -> list[Population]:
    """Stage 1: `count` independent populations. Of method "trajedi" each is updated as a whole.

    A run that is finished is read back. Source: MEP paper, stage 1; the released code for the order of things.

    Args:
        config: Settings.
        run: Where the members, their checkpoints and metrics are kept.
        count: Populations, all with the same settings.
        workers: Open workers of `open_workers` to use; by default workers of its own.
    """
    options = config.population
    iterations = -(-int(options.steps) // (config.steps_per_update * options.updates_per_iteration))
    if run.finished:
        return _read(run)
    members = Members(config, run, count, iterations)
    run.track(members=members)
    together = config.method == "trajedi"
    job: Job = update_trajedi if together else update_member
    with contextlib.nullcontext(workers) if workers else open_workers(config) as crew:
        for step in run.steps(iterations):
            keys = [run.key("update", step, index) for index in range(count if together else count * options.size)]
            results, parts = run_jobs(crew, job, config, members.states, keys)
            if together:
                results, parts = (
                    [s for group in results for s in group["states"]],
                    [p for r in results for p in r["parts"]],
                )
            members.advance(results, [row["return"] for row in parts])
            log_all(run, "member", parts)
    populations = members.populations()
    named = {
        f"{group}/{stage}/{member}/{name}": tensor
        for group, population in enumerate(populations)
        for stage in STAGES
        for member, weights in enumerate(population.weights[stage])
        for name, tensor in weights.items()
    }
    run.finish({"returns": [population.returns for population in populations]}, named)
    return populations


def _read(run: Run) -> list[Population]:
    returns = run.summary["returns"]
    weights: list[dict[str, list[Any]]] = [{stage: [{} for _ in row] for stage in STAGES} for row in returns]
    for path, tensor in load((run.directory / "final" / "model.safetensors").read_bytes()).items():
        group, stage, member, name = path.split("/")
        weights[int(group)][stage][int(member)][name] = tensor
    return [Population(weights=own, returns=row) for own, row in zip(weights, returns, strict=True)]


class Members:
    """The members of all populations in training, population after population, and snapshots of them.

    Among the snapshots the middle versions are chosen at the end.
    """

    def __init__(self, config: Config, run: Run, count: int, iterations: int) -> None:
        layout, options = Layout.load(config.layout), config.population
        self.size = options.size
        learners = [Learner(config, layout, run.rng("init", index).torch) for index in range(count * options.size)]
        self.states: list[dict[str, Any]] = [learner.state_dict() for learner in learners]
        self.iterations, self.by_return = iterations, options.mid_checkpoint == "by_return"
        every = -(-iterations // options.candidates)
        self.wanted = {0, 1, iterations // 2, iterations, *range(0, iterations, every)}
        self.returns: list[list[float]] = []  # [iteration][member], of the policies at the start of the iteration
        self.snapshots: dict[int, list[Weights]] = {}  # by number of iterations done
        self._snap()

    def _snap(self) -> None:
        if len(self.returns) in self.wanted:
            self.snapshots[len(self.returns)] = [state["policy"] for state in self.states]

    def advance(self, states: list[dict[str, Any]], returns: list[float]) -> None:
        """Takes the members' new states, and the self-play returns they had before."""
        self.states = states
        self.returns.append(returns)
        self._snap()

    def populations(self) -> list[Population]:
        """Returns the weights of all members at each of `STAGES`, population by population.

        Middle: the snapshot whose return is nearest to half of the last (FCP), with the untrained network as first; or
        after half of the iterations, with the state after one iteration as first (the released code).
        """
        last = self.returns[-1]

        def middle(member: int) -> int:
            if not self.by_return:
                return self.iterations // 2
            early = [done for done in self.snapshots if done < self.iterations]
            return min(early, key=lambda done: abs(self.returns[done][member] - last[member] / 2))

        first: int = 0 if self.by_return else 1
        when: dict[str, Callable[[int], int]] = {
            "init": lambda _: first,
            "mid": middle,
            "final": lambda _: self.iterations,
        }
        groups = [range(at, at + self.size) for at in range(0, len(last), self.size)]
        return [
            Population(
                weights={stage: [self.snapshots[at(m)][m] for m in group] for stage, at in when.items()},
                returns=[last[m] for m in group],
            )
            for group in groups
        ]

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that changes."""
        return {"states": self.states, "returns": self.returns, "snapshots": self.snapshots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts a state back."""
        self.states, self.returns, self.snapshots = state["states"], state["returns"], state["snapshots"]


def update_member(
    config: Config, env: Overcooked, members: Sequence[dict[str, Any]], index: int, key: int
) -> tuple[dict[str, Any], Parts]:
    """One iteration of one member, a `Job`.

    Args:
        config: Settings.
        env: Games.
        members: States of the members of all populations.
        index: Which of them to update.
        key: Of its random streams.

    Returns:
        The member's next state, and the means of what is logged.
    """
    options, partner, seats = config.population, None, None
    learner = Learner(config, env.layout)
    learner.load_state_dict(members[index])
    if not options.both_seats:
        partner = members[index]["policy"]
        seats = np.full(env.num_envs, numpy_rng(key, "partner").integers(2))
    rows = []
    for turn in range(options.updates_per_iteration):
        begin = scatter(options.random_starts, numpy_rng(key, "init", turn)) if options.random_starts else None
        generator = torch_rng(key, "rollout", turn)
        rollout = collect(env, learner.policy, generator, partners=partner, seats=seats, begin=begin)
        bonus, parts = torch.zeros(()), Parts()
        if config.method == "mep":
            first = index - index % options.size
            others = [members[other]["policy"] for other in range(first, first + options.size) if other != index]
            bonus, parts = population_bonus(config, learner.policy, rollout, others)
        context = f"member {index}, {learner.env_steps} environment steps"
        rng = torch_rng(key, "update", turn)
        parts |= learner.update(rollout, options.alpha * bonus, rng, total_steps=options.steps, context=context)
        rows.append(parts)
    return learner.state_dict(), mean(rows)


@torch.inference_mode()
def population_bonus(
    config: Config, policy: Policy, rollout: Rollout, others: Sequence[Weights]
) -> tuple[Tensor, Parts]:
    """-log pibar(a|s) of the learner's actions, (T, L), and the mean population entropy of the states it met.

    The learner enters pibar once, as it was when it played. Source: MEP paper, eq. of the shaped reward.
    """
    own = rollout.log_probs.flatten(0, 1)
    log_probs = own.new_empty((len(others) + 1, *own.shape))
    log_probs[0] = own
    inputs = rollout.inputs.flatten(0, 1)
    for row, weights in enumerate(others, 1):
        log_probs[row] = log_policy(policy, inputs, weights)
    log_probs = log_probs if config.population.include_learner else log_probs[1:]
    quirks = config.population.reference_quirks
    bonus = entropy_bonus(log_probs, rollout.actions.flatten(), reference_quirks=quirks)
    entropy = float(population_entropy(log_probs).mean())
    return bonus.view(rollout.actions.shape), {"population_entropy": entropy}
