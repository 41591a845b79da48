"""MEP, top to bottom: a population trained with the population-entropy bonus, then a best response to it.

Stage 1 gives every member reward r - alpha log pibar(a|s), pibar being the mean policy of the population, whose
other members are taken as they were at the start of the iteration; so members can be updated anywhere and in any
order. Stage 2 trains one policy with early, middle and final versions of the members, those it does worst with most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from sextet.mep.overcooked import Layout, Overcooked
from sextet.mep.policy import NUM_ACTIONS, Policy, PolicyAgent, Weights
from sextet.mep.population import entropy_bonus, population_entropy
from sextet.mep.ppo import Learner, Rollout, collect

STAGES = ("init", "mid", "final")
CHUNK = 4096  # rows evaluated at once, so that a layer's output stays in the cache


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


def train_population(config: Config, run: Run) -> Population:
    """Stage 1. With method "sp" or alpha 0 the members are independent self-play runs.

    A run that is finished is read back. Source: MEP paper, stage 1; the released code for the order of things.
    """
    options = config.population
    iterations = -(-int(options.steps) // (config.steps_per_update * options.updates_per_iteration))
    if run.finished:
        return _read(run, options.size)
    members = Members(config, run, iterations)
    run.track(members=members)
    with Workers.open(config.workers, MemberWorker, config, threads=config.threads) as workers:
        for step in run.steps(iterations):
            workers.publish({"members": members.states})
            for index in range(options.size):
                workers.submit("update", index, run.key("update", step, index), key=f"{step}/{index}")
            results = [result.value for result in workers.gather()]
            results.sort(key=lambda result: result[0])
            members.advance([state for _, state, _ in results], [parts["return"] for *_, parts in results])
            for index, _, parts in results:
                run.log({f"member{index}/{name}": value for name, value in parts.items()})
    chosen = members.choose()
    returns = members.returns[-1]
    named = {f"{s}/{m}/{name}": w for s in STAGES for m, ws in enumerate(chosen[s]) for name, w in ws.items()}
    run.finish({"returns": returns}, named)
    return Population(weights=chosen, returns=returns)


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


class MemberWorker:
    """What runs in a worker: the games, and the members as last published."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.env = Overcooked(config.layout, config.ppo.num_envs, horizon=config.ppo.horizon)

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Takes the members' states."""
        self.members = weights["members"]

    def update(self, index: int, key: int) -> tuple[int, dict[str, Any], dict[str, float]]:
        """Returns the member's index, its next state and what to log."""
        return index, *update_member(self.config, self.env, self.members, index, key)


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
        parts |= learner.update(rollout, options.alpha * bonus, torch_rng(key, "update", turn), context=context)
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


class PartnerReturns:
    """Return with each of K partners: entry k with the learner in seat 0, K + k in seat 1."""

    def __init__(self, num_partners: int) -> None:
        self.values = torch.zeros(2 * num_partners, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        """Returns the values."""
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts them back."""
        self.values = state["values"]


def train_response(config: Config, run: Run, pool: Sequence[Weights]) -> Policy:
    """Stage 2: the best response to a frozen pool, partners drawn by rank(1 / return)^beta.

    A run that is finished is read back. Source: MEP paper, stage 2; see the settings for what the released code did.
    """
    options, ppo = config.response, config.ppo
    if run.finished:
        return Policy.load(run.directory / "final")
    learner = Learner(config, Layout.load(config.layout), run.rng("init").torch)
    num_partners = len(pool) + options.self_in_pool
    returns = PartnerReturns(num_partners)
    run.track(learner=learner, partners=returns)
    env = Overcooked(config.layout, ppo.num_envs, horizon=ppo.horizon)
    chunk = config.population.updates_per_iteration if options.partner_per == "chunk" else 1
    for step in run.steps(-(-int(options.steps) // (config.steps_per_update * chunk))):
        partners = stack([learner.policy.state_dict(), *pool] if options.self_in_pool else pool)
        if step % options.evaluate_every == 0:
            returns.values = partner_returns(config, learner.policy, partners, run.rng("evaluate", step).numpy)
        chances = rank_probabilities(returns.values.numpy(), options.beta)
        draws = ppo.num_envs if options.partner_per == "episode" else 1
        drawn = run.rng("partner", step).numpy.choice(len(chances), size=draws, p=chances)
        drawn = np.broadcast_to(drawn, ppo.num_envs)
        partner, seats = torch.from_numpy(drawn % num_partners), drawn // num_partners
        chosen = {name: tensor[partner] for name, tensor in partners.items()}
        for turn in range(chunk):
            noise = run.rng("rollout", step, turn).torch
            rollout = collect(env, learner.policy, noise, partners=chosen, seats=seats)
            context = f"best response, {learner.env_steps} environment steps"
            parts = learner.update(rollout, torch.zeros(()), run.rng("update", step, turn).torch, context=context)
            run.log({f"response/{name}": value for name, value in parts.items()})
            if options.difficulty == "running_mean":
                for pair, score in zip(drawn, rollout.sparse.sum(0).tolist(), strict=True):
                    returns.values[pair] += (1 - options.running_decay) * (score - returns.values[pair])
        run.log({"response/mean_partner": returns.values.mean(), "response/worst_partner": returns.values.min()})
    summary = {"partners": returns.values.view(2, -1).mean(0).tolist(), "self_in_pool": options.self_in_pool}
    run.finish(summary, learner.policy.state_dict())
    return learner.policy


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
