"""MEP, top to bottom: a population trained with the population-entropy bonus, then a best response to it.

Stage 1 gives every member reward r - alpha log pibar(a|s), pibar being the mean policy of the population, whose
other members are taken as they were at the start of the iteration; so members can be updated anywhere and in any
order. Stage 2 trains one policy with early, middle and final versions of the members, those it does worst with most.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from sextet.core.config import require
from sextet.core.device import pick_device
from sextet.core.priority import rank_probabilities
from sextet.core.run import Run
from sextet.core.seeding import numpy_rng, torch_rng
from sextet.core.workers import Workers
from sextet.mep.config import Config
from sextet.mep.evaluate import play
from sextet.mep.overcooked import Layout, Overcooked
from sextet.mep.policy import NUM_ACTIONS, Policy, PolicyAgent, Weights
from sextet.mep.population import entropy_bonus, population_entropy
from sextet.mep.ppo import Learner, Rollout, collect

STAGES = ("init", "mid", "final")
CHUNK = 4096  # rows evaluated at once, so that a layer's output stays in the cache


def check(config: Config) -> None:
    """Raises what would stop the training later or be without effect: a wrong kitchen, device or number format."""
    Layout.load(config.layout)
    pick_device(config.device)
    require(config.precision in ("auto", "fp32"), "precision", config.precision, "auto or fp32 in this recipe")


def train(config: Config, run: Run) -> None:
    """Trains the population and, for method "mep", the best response, whose weights become the run's."""
    torch.set_num_threads(config.threads)
    if config.method == "compare":
        from sextet.mep.compare import compare

        compare(config, run)
        return
    population = train_population(config, run.child("population"))
    policy = population.policy(config, 0)
    if config.method == "mep":
        policy = train_response(config, run.child("response"), population.pool())
    score = self_play(config, policy, run.rng("evaluate").numpy)
    run.finish({"self_play": score, "members": population.returns}, policy.state_dict())


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
    """Stage 1. With method "sp" or alpha 0 the members are independent self-play runs.

    A run that is finished is read back. Source: MEP paper, stage 1; the released code for the order of things.

    Args:
        config: Settings.
        run: Where the members, their checkpoints and metrics are kept.
        workers: Open workers of `open_workers` to use; by default workers of its own.
    """
    options = config.population
    iterations = -(-int(options.steps) // (config.steps_per_update * options.updates_per_iteration))
    if run.finished:
        return _read(run, options.size)
    members = Members(config, run, iterations)
    run.track(members=members)
    with contextlib.nullcontext(workers) if workers else open_workers(config) as crew:
        for step in run.steps(iterations):
            keys = [run.key("update", step, index) for index in range(options.size)]
            results = update_all(crew, "member", config, {"members": members.states}, keys)
            members.advance([state for state, _ in results], [parts["return"] for _, parts in results])
            log_all(run, "member", [parts for _, parts in results])
    chosen = members.choose()
    returns = members.returns[-1]
    named = {f"{s}/{m}/{name}": w for s in STAGES for m, ws in enumerate(chosen[s]) for name, w in ws.items()}
    run.finish({"returns": returns}, named)
    return Population(weights=chosen, returns=returns)


def open_workers(config: Config) -> Workers:
    """Opens the workers that both stages use: each has games of its own."""
    return Workers.open(config.workers, Updater, config, threads=config.threads)


def update_all(
    workers: Workers, method: str, config: Config, shared: dict[str, Any], keys: Sequence[int]
) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """Publishes what is shared and makes one update for each key; returns (next state, what to log) in their order."""
    workers.publish({"config": config, **shared})
    for index, key in enumerate(keys):
        workers.submit(method, index, key, key=f"{index:06}")
    return [result.value for result in workers.gather()]


def log_all(run: Run, kind: str, rows: Sequence[dict[str, float]]) -> None:
    """Logs the mean of every number over the rows, and the return of each."""
    run.log({f"train/{name}": sum(row[name] for row in rows) / len(rows) for name in rows[0]})
    run.log({f"returns/{kind}{index}": row["return"] for index, row in enumerate(rows)})


def _read(run: Run, size: int) -> Population:
    tensors = load((run.directory / "final" / "model.safetensors").read_bytes())
    weights: dict[str, list[Any]] = {stage: [{} for _ in range(size)] for stage in STAGES}
    for path, tensor in tensors.items():
        stage, member, name = path.split("/")
        weights[stage][int(member)][name] = tensor
    return Population(weights=weights, returns=run.summary["returns"])


class Members:
    """The members in training with the snapshots among which their middle versions are chosen later."""

    def __init__(self, config: Config, run: Run, iterations: int) -> None:
        layout, options = Layout.load(config.layout), config.population
        learners = [Learner(config, layout, run.rng("init", index).torch) for index in range(options.size)]
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

    def choose(self) -> dict[str, list[Weights]]:
        """Returns the weights of all members at each of `STAGES`.

        Middle: the snapshot whose return is nearest to half of the last (FCP), with the untrained network as first; or
        after half of the iterations, with the state after one iteration as first (the released code).
        """
        size, last = len(self.states), self.returns[-1]

        def middle(member: int) -> int:
            if not self.by_return:
                return self.iterations // 2
            early = [done for done in self.snapshots if done < self.iterations]
            return min(early, key=lambda done: abs(self.returns[done][member] - last[member] / 2))

        done = {
            "init": [0 if self.by_return else 1] * size,
            "mid": [middle(member) for member in range(size)],
            "final": [self.iterations] * size,
        }
        return {stage: [self.snapshots[at][m] for m, at in enumerate(ats)] for stage, ats in done.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that changes."""
        return {"states": self.states, "returns": self.returns, "snapshots": self.snapshots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts a state back."""
        self.states, self.returns, self.snapshots = state["states"], state["returns"], state["snapshots"]


class Updater:
    """What runs in a worker: games of its own, and the settings and states as last published."""

    def __init__(self, config: Config) -> None:
        self.env = Overcooked(config.layout, config.ppo.num_envs, horizon=config.ppo.horizon)

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Takes settings and states."""
        self.shared, self.config = weights, weights["config"]

    def member(self, index: int, key: int) -> tuple[dict[str, Any], dict[str, float]]:
        """One iteration of a member of the population."""
        return update_member(self.config, self.env, self.shared["members"], index, key)

    def response(self, index: int, key: int) -> tuple[dict[str, Any], dict[str, float]]:
        """One iteration of a best response."""
        return update_response(self.config, self.env, self.shared["states"][index], self.shared["pools"][index], key)


def update_member(
    config: Config, env: Overcooked, members: Sequence[dict[str, Any]], index: int, key: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """One iteration of one member: a function of the members' states and the key alone.

    Returns:
        The member's next state, and the means of what is logged.
    """
    options, partner, seats = config.population, None, None
    learner = Learner(config, env.layout)
    learner.load_state_dict(members[index])
    others = [state["policy"] for other, state in enumerate(members) if other != index]
    if not options.both_seats:
        partner = members[index]["policy"]
        seats = np.full(env.num_envs, numpy_rng(key, "partner").integers(2))
    rows = []
    for turn in range(options.updates_per_iteration):
        rollout = collect(env, learner.policy, torch_rng(key, "rollout", turn), partners=partner, seats=seats)
        bonus, parts = torch.zeros(()), dict[str, float]()
        if config.method == "mep":
            bonus, parts = population_bonus(config, learner.policy, rollout, others)
        context = f"member {index}, {learner.env_steps} environment steps"
        rng = torch_rng(key, "update", turn)
        parts |= learner.update(rollout, options.alpha * bonus, rng, total_steps=options.steps, context=context)
        rows.append(parts)
    return learner.state_dict(), {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


@torch.inference_mode()
def population_bonus(
    config: Config, policy: Policy, rollout: Rollout, others: Sequence[Weights]
) -> tuple[Tensor, dict[str, float]]:
    """-log pibar(a|s) of the learner's actions, (T, L), and the mean population entropy of the states it met.

    The learner enters pibar once, as it was when it played. Source: MEP paper, eq. of the shaped reward.
    """
    own = rollout.log_probs.flatten(0, 1)
    log_probs = own.new_empty((len(others) + 1, *own.shape))
    log_probs[0] = own
    for at, rows in enumerate(rollout.inputs.flatten(0, 1).split(CHUNK)):
        place = slice(at * CHUNK, at * CHUNK + len(rows))
        for row, weights in enumerate(others, 1):
            log_probs[row, place] = policy(rows, weights)[:, :NUM_ACTIONS].log_softmax(-1)
    log_probs = log_probs if config.population.include_learner else log_probs[1:]
    quirks = config.population.reference_quirks
    bonus = entropy_bonus(log_probs, rollout.actions.flatten(), reference_quirks=quirks)
    entropy = float(population_entropy(log_probs).mean())
    return bonus.view(rollout.actions.shape), {"population_entropy": entropy}


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


def train_response(config: Config, run: Run, pool: Sequence[Weights]) -> Policy:
    """Stage 2 for one population; see `train_responses`."""
    return train_responses(config, run, [pool])[0]


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
                results = update_all(crew, "response", config, shared, keys)
                responses.states = [state for state, _ in results]
                log_all(run, "response", [parts for _, parts in results])
        returns = [state["returns"].view(2, -1).mean(0).tolist() for state in responses.states]
        weights = [state["learner"]["policy"] for state in responses.states]
        named = {f"{index}/{name}": tensor for index, row in enumerate(weights) for name, tensor in row.items()}
        run.finish({"partners": returns, "self_in_pool": config.response.self_in_pool}, named)
    return [_response(config, run, index) for index in range(len(pools))]


def _response(config: Config, run: Run, index: int) -> Policy:
    tensors = load((run.directory / "final" / "model.safetensors").read_bytes())
    policy = Policy(Layout.load(config.layout), config.encoding, config.net)
    own = {path.partition("/")[2]: tensor for path, tensor in tensors.items() if path.startswith(f"{index}/")}
    policy.load_state_dict(own)
    return policy


def update_response(
    config: Config, env: Overcooked, state: dict[str, Any], pool: Sequence[Weights], key: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """One iteration of a best response: a function of its state, its pool and the key alone.

    Returns:
        The next state, and the means of what is logged.
    """
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
    parts = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    parts |= {"mean_partner": float(returns.mean()), "worst_partner": float(returns.min())}
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


def self_play(config: Config, policy: Policy, rng: np.random.Generator, *, episodes: int = 100) -> float:
    """Mean sparse return of the policy with itself."""
    env = Overcooked(policy.layout, episodes, horizon=config.ppo.horizon)
    agent = PolicyAgent(policy)
    return float(play(env, (agent, agent), episodes=episodes, rng=rng).mean())
