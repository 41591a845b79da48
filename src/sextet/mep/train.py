"""MEP and its baselines, top to bottom: `check`, and `train` for one method on one kitchen.

| method | stage 1 | agent |
|---|---|---|
| mep | members paid for a high population entropy (`members`) | best response, hard partners more often (`responses`) |
| fcp | members of self-play (`members`) | best response, uniform partners |
| trajedi | members whose trajectories differ (`members`, `trajedi`) | best response, uniform partners |
| pbt | members that learn with each other (`pbt`) | the best member |
| sp | self-play (`members`) | the member |
| sp_random_starts | self-play, many games starting anywhere (`members`, `starts`) | the member |
| compare | all of them over several seeds and kitchens (`compare`) | of MEP |
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from sextet.core.config import require
from sextet.core.device import pick_device
from sextet.core.errors import UsageError
from sextet.core.run import Run
from sextet.core.workers import Workers
from sextet.mep.config import Config
from sextet.mep.evaluate import play
from sextet.mep.members import Population, train_populations
from sextet.mep.overcooked import Layout, Overcooked
from sextet.mep.pbt import train_pbt
from sextet.mep.policy import Policy, PolicyAgent
from sextet.mep.responses import train_responses

RANDOM_STARTS = 0.5


def check(config: Config) -> None:
    """Raises what would stop the training later or be without effect, such as a wrong kitchen, device or setting."""
    together = config.method == "compare"
    names = [Layout.load(layout).name for layout in (config.kitchens if together else [config.layout])]
    if len(set(names)) < len(names):
        raise UsageError(f"layouts has two kitchens of one name ({', '.join(names)}); rename one of the files")
    for method in config.compared if together else [config.method]:
        adapt(replace(config, method=method.removesuffix("_uniform")))  # type: ignore[arg-type]
    pick_device(config.device)
    require(config.precision in ("auto", "fp32"), "precision", config.precision, "auto or fp32 in this recipe")


def train(config: Config, run: Run) -> None:
    """Trains one agent by `config.method`, or runs the comparison; the agent's weights become the run's."""
    torch.set_num_threads(config.threads)
    if config.method == "compare":
        from sextet.mep.compare import compare

        compare(config, run)
        return
    policies, populations = train_agents(config, run, 1)
    score = self_play(config, policies[0], run.rng("evaluate").numpy)
    members = {"members": populations[0].returns} if populations else {}
    run.finish({"self_play": score, **members}, policies[0].state_dict())


def train_agents(
    config: Config,
    run: Run,
    count: int,
    workers: Workers | None = None,
    *,
    population: str = "population",
    response: str = "response",
) -> tuple[list[Policy], list[Population]]:
    """Trains `count` independent agents by `config.method`.

    Every stage is a part of the run, so that an interrupted one goes on where it was and finished ones are read back.

    Args:
        config: Settings; the method decides which of them are used, see `adapt`.
        run: Where the parts are kept.
        count: Agents; their random streams differ.
        workers: Open workers of `jobs.open_workers` to use; by default each stage opens its own.
        population: Name of the part of stage 1.
        response: Name of the part of stage 2.

    Returns:
        The agents, and the populations behind them, where there are any.
    """
    config = adapt(config)
    if config.method == "pbt":
        return train_pbt(config, run.child(population), count, workers), []
    single = config.method in ("sp", "sp_random_starts")
    if single:  # members of self-play never see each other: each is an agent
        config = replace(config, population=replace(config.population, size=count))
    populations = train_populations(config, run.child(population), 1 if single else count, workers)
    if single:
        return [populations[0].policy(config, member) for member in range(count)], populations
    pools = [population.pool() for population in populations]
    return train_responses(config, run.child(response), pools, workers), populations


def adapt(config: Config) -> Config:
    """Returns the settings with which the stages carry out `config.method`.

    Methods other than MEP have no bonus, FCP and TrajeDi meet uniform partners and never themselves (Strouse 2021 for
    FCP; our choice for TrajeDi), and sp_random_starts starts games anywhere.
    """
    population, response = config.population, config.response
    if config.method != "mep":
        population = replace(population, alpha=0.0)
    if config.method in ("fcp", "trajedi"):
        response = replace(response, beta=0.0, self_in_pool=False)
    if config.method == "trajedi":
        require(population.both_seats, "population.both_seats", population.both_seats, "yes for trajedi")
    if config.method == "sp_random_starts" and not population.random_starts:
        population = replace(population, random_starts=RANDOM_STARTS)
    return replace(config, population=population, response=response)


def self_play(config: Config, policy: Policy, rng: np.random.Generator, *, episodes: int = 100) -> float:
    """Mean sparse return of the policy with itself."""
    env = Overcooked(policy.layout, episodes, horizon=config.ppo.horizon)
    agent = PolicyAgent(policy)
    return float(play(env, (agent, agent), episodes=episodes, rng=rng).mean())
