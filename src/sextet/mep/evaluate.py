"""Playing agents with each other: vectorised games, both seats with intervals, and the cross-play matrix.

The protocol is the one of the 2019 evaluation: 400 steps, sampled actions, and both seat orders reported
separately, because the kitchens are not symmetric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sextet.core.errors import SextetError, UsageError
from sextet.core.seeding import numpy_rng
from sextet.core.stats import Interval, bootstrap_interval
from sextet.mep.overcooked import Layout, Overcooked

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from sextet.mep.config import Config
    from sextet.mep.policy import Policy

HORIZON = 400


class Agent(Protocol):
    """Whoever can take a seat; one object may take both seats of the same games."""

    def begin(self, env: Overcooked, seat: int) -> None:
        """Forgets what it remembers of earlier games in this seat: all games of ``env`` start now."""

    def act(self, env: Overcooked, seat: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Chooses the next actions, (N,) int64 with values 0 to 5, from ``env.state`` or an observation."""


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """Sparse return of an agent with a fixed partner, per seat of the agent and averaged over both seats."""

    name: str
    seat0: Interval
    seat1: Interval
    mean: Interval


def sample_actions(logits: NDArray[Any], rng: np.random.Generator) -> NDArray[np.int64]:
    """Draws one action per row of (N, A) logits (by the Gumbel trick); minus infinity forbids an action."""
    actions: NDArray[np.int64] = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)
    return actions


def play(
    env: Overcooked, agents: tuple[Agent, Agent], *, episodes: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Plays whole games from the start, ``env.num_envs`` at a time, with ``agents`` in seats 0 and 1.

    Returns:
        (episodes,) float64 sparse team returns.

    Raises:
        UsageError: ``episodes`` is below 1.
    """
    if episodes < 1:
        raise UsageError(f"episodes is {episodes}; it must be at least 1")
    batches: list[NDArray[np.float64]] = []
    for _ in range(-(-episodes // env.num_envs)):
        env.reset()
        for seat, agent in enumerate(agents):
            agent.begin(env, seat)
        returns = np.zeros(env.num_envs)
        for _ in range(env.horizon):
            actions = [agent.act(env, seat, rng) for seat, agent in enumerate(agents)]
            returns += env.step(np.stack(actions, axis=1))[0]
        batches.append(returns)
    return np.concatenate(batches)[:episodes]


def evaluate_pairs(
    layout: Layout | str, agents: Mapping[str, Agent], proxy: Agent, *, episodes: int = 100, seed: int = 0
) -> list[PairResult]:
    """Plays every agent with ``proxy`` in both seats, ``episodes`` games of 400 steps each.

    The bounds describe the spread over games of these agents; the spread over training seeds is the caller's.
    Draws depend on ``seed``, the agent's name and the seat only, so adding an agent changes no other row.
    """
    env, rows = Overcooked(layout, episodes, horizon=HORIZON), []
    for name, agent in agents.items():
        returns = []
        for seat, pair in enumerate(((agent, proxy), (proxy, agent))):
            rng = numpy_rng(seed, "evaluate", name, seat)
            returns.append(play(env, pair, episodes=episodes, rng=rng))
        values = (*returns, (returns[0] + returns[1]) / 2)
        first, second, mean = (bootstrap_interval(value, seed=seed) for value in values)
        rows.append(PairResult(name=name, seat0=first, seat1=second, mean=mean))
    return rows


def cross_play(
    layout: Layout | str, agents: Mapping[str, Agent], *, episodes: int = 50, seed: int = 0
) -> list[list[Interval]]:
    """Plays all ordered pairs: row agent in seat 0, column agent in seat 1; the diagonal is self-play."""
    env = Overcooked(layout, episodes, horizon=HORIZON)

    def cell(first: str, second: str) -> Interval:
        rng = numpy_rng(seed, "evaluate", first, second)
        returns = play(env, (agents[first], agents[second]), episodes=episodes, rng=rng)
        return bootstrap_interval(returns, seed=seed)

    return [[cell(first, second) for second in agents] for first in agents]


def heat_map(names: Sequence[str], matrix: Sequence[Sequence[float]], title: str) -> Figure:
    """Draws a cross-play matrix of mean returns with every value written in its cell."""
    from matplotlib.figure import Figure

    means = np.array(matrix)
    size = 2.2 + 0.62 * len(names)
    figure = Figure(figsize=(size + 0.8, size), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(means, cmap="viridis", vmin=0)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(names)), names)
    axes.set(title=title, xlabel="seat 1", ylabel="seat 0")
    for (row, column), value in np.ndenumerate(means):
        ink = "black" if value > 0.6 * means.max() else "white"
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=ink)
    figure.colorbar(image, ax=axes, label="mean sparse return", shrink=0.8)
    return figure


def load(folder: Path | str) -> Policy:
    """Returns the policy in a ``final`` folder; ``sextet.load`` calls this.

    Raises:
        DataError: The folder holds no policy, or a damaged one.
    """
    from sextet.mep.policy import Policy

    return Policy.load(folder)


def evaluate(config: Config, directory: Path | str) -> dict[str, Any]:
    """Plays a finished run's policy with itself and, where the human games are at hand, with a human proxy.

    Raises:
        UsageError: The run is not finished.
    """
    from sextet.mep.human import train_proxy
    from sextet.mep.human_data import find_human_data, load_human_data
    from sextet.mep.policy import Policy, PolicyAgent

    final = Path(directory) / "final"
    if not (final / "model.safetensors").exists():
        raise UsageError(f"{directory} is not finished: sextet resume {directory}")
    policy = Policy.load(final)
    agents: dict[str, Agent] = {"agent": PolicyAgent(policy)}
    own = cross_play(policy.layout, agents, episodes=config.games, seed=config.seed)[0][0]
    result: dict[str, Any] = {"layout": policy.layout.name, "games": config.games, "self_play": own.as_dict()}
    try:
        data = load_human_data(find_human_data(), policy.layout.name, "test")
    except SextetError as error:
        return {**result, "with_human_proxy": f"not measured: {error}"}
    proxy = train_proxy(policy.layout.name, data, seed=config.seed)
    row = evaluate_pairs(policy.layout, agents, proxy, episodes=config.games, seed=config.seed)[0]
    scores = {"seat_0": row.seat0.as_dict(), "seat_1": row.seat1.as_dict(), "both_seats": row.mean.as_dict()}
    return {**result, "with_human_proxy": scores}
