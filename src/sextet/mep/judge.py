"""Who plays how well with whom: games of a whole cast, spread over workers, kept so that none is played twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sextet.core.errors import UsageError
from sextet.core.files import read_json, write_json
from sextet.core.run import Run
from sextet.core.seeding import numpy_rng, torch_rng
from sextet.core.workers import Workers
from sextet.mep.config import Config
from sextet.mep.evaluate import Agent, play
from sextet.mep.human import HumanProxy
from sextet.mep.jobs import Parts, run_jobs
from sextet.mep.members import Population
from sextet.mep.overcooked import Overcooked
from sextet.mep.policy import Policy, PolicyAgent, Weights, log_policy
from sextet.mep.population import population_entropy
from sextet.mep.ppo import collect

HUMAN, PUBLISHED = "human proxy", "published 2019 agent"  # groups of the cast besides the methods
PAIRS_A_STEP = 16  # between two looks at stop signals


@dataclass(frozen=True, kw_only=True)
class Role:
    """One of the cast: a name, what it is called in tables, its seed there, and the player itself."""

    name: str
    group: str
    seed: int
    player: Policy | HumanProxy

    def spec(self) -> dict[str, Any]:
        """What a worker needs to rebuild the player."""
        if isinstance(self.player, HumanProxy):
            return {"name": self.name, "weights": self.player.weights}
        about = {"encoding": self.player.encoding, "net": self.player.net}
        return {"name": self.name, "weights": dict(self.player.state_dict()), **about}

    def save(self, folder: Path) -> None:
        """Writes the player where `sextet serve` finds it, with its name as label."""
        self.player.save(folder)
        about = read_json(folder / "config.json")
        kind = {"kind": "published"} if self.group == PUBLISHED else {}
        write_json(folder / "config.json", {**about, **kind, "label": self.name})


def rebuild(spec: Mapping[str, Any], env: Overcooked) -> Agent:
    """Makes a player of what `Role.spec` returned."""
    if "net" not in spec:
        return HumanProxy(env.layout.name, spec["weights"])
    policy = Policy(env.layout, spec["encoding"], spec["net"])
    policy.load_state_dict(spec["weights"])
    return PolicyAgent(policy, name=spec["name"])


def play_pair(
    config: Config, env: Overcooked, shared: dict[str, Any], index: int, key: int
) -> tuple[list[float], Parts]:
    """Games of two of the cast in both seat orders, a `Job`; a pair of one with itself has one order.

    Returns:
        Mean sparse return with the first in seat 0, then in seat 1; and nothing to log.
    """
    first, second, games = shared["pairs"][index]
    hall = Overcooked(env.layout, games, horizon=config.ppo.horizon)
    one, two = rebuild(shared["cast"][first], hall), rebuild(shared["cast"][second], hall)
    orders = [(one, one)] if first == second else [(one, two), (two, one)]
    scores = [play(hall, order, episodes=games, rng=numpy_rng(key, "evaluate")).mean() for order in orders]
    return [float(score) for score in scores], {}


class _Scores:
    """Results of the pairs played so far, in their order."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


Pair = tuple[int, int, int]  # indices of the two, and games in each order


def play_pairs(
    config: Config, part: Run, cast: Sequence[Role], pairs: Sequence[Pair], workers: Workers
) -> dict[tuple[int, int], float]:
    """Plays the pairs on the workers, or reads them back from a finished part.

    Returns:
        Mean sparse return by (index of the one in seat 0, index of the one in seat 1).

    Raises:
        UsageError: A finished part was played by another cast: human games or published agents came or went since.
    """
    names = [role.name for role in cast]
    if part.finished and part.summary["cast"] != names:
        changed = sorted(set(names) ^ set(part.summary["cast"]))
        raise UsageError(
            f"{part.directory}: played by another cast, which differs in {', '.join(changed)}; start a new comparison, "
            "or give back the data that this one had"
        )
    if not part.finished:
        scores = _Scores()
        part.track(scores=scores)
        specs = [role.spec() for role in cast]
        for step in part.steps(-(-len(pairs) // PAIRS_A_STEP)):
            chunk = pairs[step * PAIRS_A_STEP : (step + 1) * PAIRS_A_STEP]
            keys = [part.key("evaluate", cast[first].name, cast[second].name) for first, second, _ in chunk]
            rows, _ = run_jobs(workers, play_pair, config, {"cast": specs, "pairs": chunk}, keys)
            scores.rows += rows
        part.finish({"cast": names, "scores": scores.rows})
    table: dict[tuple[int, int], float] = {}
    for (first, second, _), row in zip(pairs, part.summary["scores"], strict=True):
        table[first, second] = row[0]
        table[second, first] = row[-1]
    return table


def schedule(cast: Sequence[Role], strangers: Sequence[int], close: Sequence[int], games: int, few: int) -> list[Pair]:
    """Which pairs meet: each with itself and with every stranger, and all of `close` with each other.

    Args:
        cast: Everyone.
        strangers: Those nobody trained with: human proxies and published agents.
        close: Those that the cross-play matrix shows.
        games: Games in each order with oneself and with strangers.
        few: Games in each order otherwise.
    """
    wanted: dict[tuple[int, int], int] = {}
    for index in range(len(cast)):
        for other in (index, *strangers):
            wanted[min(index, other), max(index, other)] = games
    for at, index in enumerate(close):
        for other in close[at:]:
            wanted.setdefault((min(index, other), max(index, other)), few)
    return [(first, second, number) for (first, second), number in sorted(wanted.items())]


def entropies(
    config: Config, env: Overcooked, shared: Sequence[Mapping[str, Sequence[Weights]]], index: int, key: int
) -> tuple[Parts, Parts]:
    """Mean population entropy, in nats, of one seed's populations on the same states, a `Job`.

    The states are those that the first member of each population meets in self-play, all populations' together.

    Returns:
        The entropy by population; and nothing to log.
    """
    members = shared[index]
    policy, inputs = Policy(env.layout, config.encoding, config.net), []
    for name, weights in members.items():
        policy.load_state_dict(dict(weights[0]))
        inputs.append(collect(env, policy, torch_rng(key, "rollout", name)).inputs.flatten(0, 1))
    states = torch.cat(inputs)
    values = {}
    for name, weights in members.items():
        every = torch.stack([log_policy(policy, states, own) for own in weights])
        values[name] = float(population_entropy(every).mean())
    return values, {}


def measure_entropies(
    config: Config, part: Run, populations: Mapping[str, Sequence[Population]], workers: Workers
) -> dict[str, list[float]]:
    """Population entropy of every method's populations on common states, by method and seed; {} without any."""
    if not populations:
        return {}
    if not part.finished:
        seeds = range(min(len(row) for row in populations.values()))
        shared = [{name: row[seed].weights["final"] for name, row in populations.items()} for seed in seeds]
        rows, _ = run_jobs(workers, entropies, config, shared, [part.key("evaluate", seed) for seed in seeds])
        part.finish({name: [row[name] for row in rows] for name in populations})
    return dict(part.summary)


def mean_over(
    scores: Mapping[tuple[int, int], float], index: int, others: Iterable[int], seat: int | None = None
) -> float:
    """Mean return of one with each of the others, in seat 0, 1 or both."""
    pairs = [[(index, other), (other, index)] for other in others]
    chosen = [scores[pair] for both in pairs for place, pair in enumerate(both) if seat in (None, place)]
    return float(np.mean(chosen))
