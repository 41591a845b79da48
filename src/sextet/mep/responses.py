"""Stage 2: a best response to a frozen population, those partners more often with whom it does worst.

MEP draws partners by rank, with the learner among them; FCP and TrajeDi use the same code with uniform partners.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from sextet.core.priority import rank_probabilities
from sextet.core.run import Run
from sextet.core.seeding import numpy_rng, torch_rng
from sextet.core.workers import Workers
from sextet.mep.config import Config
from sextet.mep.evaluate import play
from sextet.mep.jobs import Parts, log_all, mean, open_workers, run_jobs
from sextet.mep.overcooked import Layout, Overcooked
from sextet.mep.policy import Policy, PolicyAgent, Weights
from sextet.mep.ppo import Learner, collect


class Responses:
    """Best responses in training: learner, iterations done, and its return with each of K partners.

    Returns are (2K,) float64: entry k with the learner in seat 0, K + k in seat 1.
    """

    def __init__(self, config: Config, run: Run, pools: Sequence[Sequence[Weights]]) -> None:
        self.states: list[dict[str, Any]] = []
        for index, pool in enumerate(pools):
            learner = Learner(config, Layout.load(config.layout), run.rng("init", index).torch)
            returns = torch.zeros(2 * (len(pool) + config.response.self_in_pool), dtype=torch.float64)
            self.states.append({"learner": learner.state_dict(), "iterations": 0, "returns": returns})

    def state_dict(self) -> dict[str, Any]:
        """Returns the states."""
        return {"states": self.states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts them back."""
        self.states = state["states"]


def train_response(config: Config, run: Run, pool: Sequence[Weights], workers: Workers | None = None) -> Policy:
    """Stage 2 for one population; see `train_responses`."""
    return train_responses(config, run, [pool], workers)[0]


def train_responses(
    config: Config, run: Run, pools: Sequence[Sequence[Weights]], workers: Workers | None = None
) -> list[Policy]:
    """Stage 2: a best response to each frozen pool, partners drawn by rank(1 / return)^beta.

    A run that is finished is read back. Source: MEP paper, stage 2; see the settings for what the released code did.

    Args:
        config: Settings.
        run: Where the learners, their checkpoints and metrics are kept.
        pools: The partners of each response, all of one size.
        workers: Open workers of `open_workers` to use; by default workers of its own.
    """
    responses = Responses(config, run, pools)
    chunk = config.population.updates_per_iteration if config.response.partner_per == "chunk" else 1
    if not run.finished:
        run.track(responses=responses)
        with contextlib.nullcontext(workers) if workers else open_workers(config) as crew:
            for step in run.steps(-(-int(config.response.steps) // (config.steps_per_update * chunk))):
                keys = [run.key("update", step, index) for index in range(len(pools))]
                shared = {"states": responses.states, "pools": pools}
                responses.states, parts = run_jobs(crew, update_response, config, shared, keys)
                log_all(run, "response", parts)
        returns = [state["returns"].view(2, -1).mean(0).tolist() for state in responses.states]
        weights = [state["learner"]["policy"] for state in responses.states]
        named = {f"{index}/{name}": tensor for index, row in enumerate(weights) for name, tensor in row.items()}
        run.finish({"partners": returns, "self_in_pool": config.response.self_in_pool}, named)
    return [read_policy(config, run, index) for index in range(len(pools))]


def read_policy(config: Config, run: Run, index: int) -> Policy:
    """Reads one of the policies that a finished part left under "<index>/<name>"."""
    tensors = load((run.directory / "final" / "model.safetensors").read_bytes())
    policy = Policy(Layout.load(config.layout), config.encoding, config.net)
    own = {path.partition("/")[2]: tensor for path, tensor in tensors.items() if path.startswith(f"{index}/")}
    policy.load_state_dict(own)
    return policy


def update_response(
    config: Config, env: Overcooked, shared: dict[str, Any], index: int, key: int
) -> tuple[dict[str, Any], Parts]:
    """One iteration of a best response, a `Job`.

    Args:
        config: Settings.
        env: Games.
        shared: "states" of all responses and their "pools".
        index: Which of them to update.
        key: Of its random streams.

    Returns:
        The next state, and the means of what is logged.
    """
    state, pool = shared["states"][index], shared["pools"][index]
    options, num_envs = config.response, config.ppo.num_envs
    learner = Learner(config, env.layout)
    learner.load_state_dict(state["learner"])
    partners = stack([learner.policy.state_dict(), *pool] if options.self_in_pool else pool)
    returns: Tensor = state["returns"].clone()
    if options.difficulty == "evaluation" or state["iterations"] % options.evaluate_every == 0:
        returns = partner_returns(config, learner.policy, partners, numpy_rng(key, "evaluate"))
    chances = rank_probabilities(returns.numpy(), options.beta)
    draws = num_envs if options.partner_per == "episode" else 1
    drawn = np.broadcast_to(numpy_rng(key, "partner").choice(len(chances), size=draws, p=chances), num_envs)
    partner, seats = drawn % (len(returns) // 2), drawn // (len(returns) // 2)
    chosen = {name: tensor[torch.from_numpy(partner)] for name, tensor in partners.items()}
    rows = []
    for turn in range(config.population.updates_per_iteration if options.partner_per == "chunk" else 1):
        rollout = collect(env, learner.policy, torch_rng(key, "rollout", turn), partners=chosen, seats=seats)
        context = f"best response, {learner.env_steps} environment steps"
        rng, none = torch_rng(key, "update", turn), torch.zeros(())
        rows.append(learner.update(rollout, none, rng, total_steps=options.steps, context=context))
        if options.difficulty == "running_mean":
            for pair, score in zip(drawn, rollout.sparse.sum(0).tolist(), strict=True):
                returns[pair] += (1 - options.running_decay) * (score - returns[pair])
    parts = mean(rows) | {"mean_partner": float(returns.mean()), "worst_partner": float(returns.min())}
    return {"learner": learner.state_dict(), "iterations": state["iterations"] + 1, "returns": returns}, parts


def stack(policies: Sequence[Weights]) -> dict[str, Tensor]:
    """Weights of K policies of one architecture as one, (K, ...) each."""
    return {name: torch.stack([weights[name] for weights in policies]) for name in policies[0]}


def partner_returns(config: Config, policy: Policy, partners: Weights, rng: np.random.Generator) -> Tensor:
    """Mean sparse return of the policy with each of K partners, seat 0 then seat 1: (2K,) float64."""
    games = config.response.evaluation_games
    repeated = {name: tensor.repeat_interleave(games, 0) for name, tensor in partners.items()}
    num_games = len(next(iter(repeated.values())))
    env = Overcooked(policy.layout, num_games, horizon=config.ppo.horizon)
    own, other = PolicyAgent(policy, name="best response"), PolicyAgent(policy, repeated, name="partner")
    orders = ((own, other), (other, own))
    scores = [play(env, order, episodes=num_games, rng=rng).reshape(-1, games).mean(1) for order in orders]
    return torch.from_numpy(np.concatenate(scores))
