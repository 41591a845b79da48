"""Settings of MEP. "Authors' code" marks values of the code that the paper's authors released, "2019" those of the
human-aware RL study it builds on; the paper's own tables are not known here. Everything else is our choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from sextet.core.config import RunConfig, require


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """The learner shared by both stages."""

    num_envs: int = 32
    """Games played at once, each for one whole episode per update (authors' code: 30)."""
    horizon: int = 400
    """Steps of an episode (authors' code: 400)."""
    epochs: int = 2
    """Passes over the data of an update (authors' code: 5; 2019 self-play: 8)."""
    minibatches: int = 16
    """Optimiser steps per pass (authors' code: 10)."""
    learning_rate: float = 2e-3
    """Adam step size at the start (authors' code: 8e-4)."""
    learning_rate_final: float = 2e-4
    """Adam step size at the end of the stage, reached linearly (authors' code: 8e-4)."""
    adam_eps: float = 1e-5
    """Adam epsilon (authors' code: 1e-5)."""
    clip: float = 0.2
    """Clip range of the probability ratio and of the value change (authors' code: 0.05)."""
    gamma: float = 0.99
    """Discount per step (authors' code: 0.99)."""
    gae_lambda: float = 0.95
    """Decay of the advantage estimate (authors' code: 0.98)."""
    entropy_coef: float = 0.02
    """Weight of the policy's own entropy in the loss at the start; not alpha (authors' code: 0.5; 2019 SP: 0.1)."""
    entropy_coef_final: float = 0.002
    """The same at the end of the stage, reached linearly (authors' code: 0.5)."""
    value_coef: float = 0.5
    """Weight of the value loss (authors' code: 0.5)."""
    max_grad_norm: float = 0.5
    """Gradient norm above which gradients are scaled down (authors' code: 0.1)."""
    reward_scale: float = 0.1
    """Factor on every reward, after shaping and bonus (authors' code: 1)."""
    shaping_steps: float = 1.5e6
    """Environment steps over which the shaped reward fades from full to none (authors' code: 5e6)."""
    team_shaping: bool = False
    """Both players earn the shaped reward of either, as in the authors' code; else each earns its own."""
    proper_time_limits: bool = False
    """Bootstrap the value at the horizon instead of treating it as an end (authors' code: no)."""


@dataclass(frozen=True, kw_only=True)
class PopulationConfig:
    """Stage 1: the population."""

    size: int = 5
    """Members (authors' code: 5). With 1 the bonus is the member's own entropy."""
    alpha: float = 0.01
    """Weight of the population entropy, in units of raw reward (20 per soup) per nat (authors' code: 0.01); 0 is SP."""
    steps: float = 1.0e6
    """Environment steps of each member (authors' code: 1.1e7)."""
    updates_per_iteration: int = 1
    """PPO updates between two exchanges of the members' weights (authors' code: 3)."""
    both_seats: bool = True
    """Learn from both seats; else one seat learns beside a frozen copy of the member (authors' code: one)."""
    include_learner: bool = True
    """Count the learner itself in the mean policy (authors' code: yes)."""
    mid_checkpoint: Literal["by_return", "by_iteration"] = "by_return"
    """Middle partner of a member: nearest half of its final return, or after half of the iterations (authors' code)."""
    candidates: int = 32
    """Snapshots per member among which the middle partner is chosen."""
    reference_quirks: bool = False
    """Repeat the released code's bug of reading every bonus from the first game's state (only to compare)."""


@dataclass(frozen=True, kw_only=True)
class ResponseConfig:
    """Stage 2: the best response to the frozen population."""

    steps: float = 3.0e6
    """Environment steps (authors' code: 1.1e7 times the square root of the pool's size)."""
    beta: float = 3.0
    """Sharpness of the rank-based choice of partners (authors' code: 3); 0 is uniform."""
    self_in_pool: bool = True
    """Count the learner among its own partners (authors' code: yes)."""
    difficulty: Literal["running_mean", "evaluation"] = "running_mean"
    """Return that ranks partners: of training games, or of evaluation games at each iteration (authors' code)."""
    running_decay: float = 0.95
    """Share of the old value when a training game updates a running mean (HSP code: 0.95)."""
    evaluation_games: int = 6
    """Games per partner and seat in an evaluation (authors' code: 6)."""
    evaluate_every: int = 20
    """Updates between evaluations that refresh all running means, so that partners rarely met stay comparable."""
    partner_per: Literal["episode", "chunk"] = "episode"
    """Draw partner and seat for each game, or once for all games of `updates_per_iteration` updates (authors' code)."""


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Maximum-entropy population-based training on one Overcooked kitchen."""

    method: Literal["mep", "sp", "compare"] = "mep"
    """mep: both stages. sp: self-play members that never see each other, and no best response. compare: both methods
    over several seeds, matrix games included, each paired with a proxy of a human."""
    layout: str = "cramped_room"
    """Name of a 2019 kitchen or path of a layout file."""
    encoding: Literal["planes20", "planes20_legacy", "planes26", "features62", "features96"] = "planes20"
    """What players see. The authors' code has planes20_legacy, which
    hides loose objects while a player holds their kind."""
    net: Literal["mlp", "conv"] = "mlp"
    """mlp: two layers of 64. conv: the network of the 2019 and the authors' code, many times slower on a CPU."""
    device: str = "cpu"
    """Where networks run: cpu (fastest for the small ones), auto, cuda, cuda:1, mps."""
    num_seeds: int = 3
    """Training seeds of each method in a comparison."""
    num_proxies: int = 3
    """Human proxies that agents meet in a comparison; they are judged by the mean over them."""
    games: int = 100
    """Games per pair of agents and seat when they are judged (2019: 100)."""
    matrix_seeds: int = 20
    """Seeds of the matrix games in a comparison."""
    matrix_alphas: tuple[float, ...] = (0.0, 0.01, 0.05, 0.1, 0.3, 0.5, 1.0)
    """Weights of the population entropy in the matrix games; 0 is SP."""
    ppo: PPOConfig = field(default_factory=PPOConfig)
    """The learner."""
    population: PopulationConfig = field(default_factory=PopulationConfig)
    """Stage 1."""
    response: ResponseConfig = field(default_factory=ResponseConfig)
    """Stage 2."""

    def __post_init__(self) -> None:
        """Checks all fields; raises UsageError naming the first wrong one."""
        super().__post_init__()
        p, n, r = self.ppo, self.population, self.response
        for name in ("num_envs", "horizon", "epochs", "minibatches"):
            require(getattr(p, name) >= 1, f"ppo.{name}", getattr(p, name), "1 or more")
        for name in ("learning_rate", "adam_eps", "clip", "max_grad_norm", "reward_scale", "shaping_steps"):
            require(getattr(p, name) > 0, f"ppo.{name}", getattr(p, name), "above 0")
        for name in ("gamma", "gae_lambda"):
            require(0 <= getattr(p, name) <= 1, f"ppo.{name}", getattr(p, name), "from 0 to 1")
        for name in ("size", "steps", "updates_per_iteration", "candidates"):
            require(getattr(n, name) >= 1, f"population.{name}", getattr(n, name), "1 or more")
        for name in ("steps", "evaluation_games", "evaluate_every"):
            require(getattr(r, name) >= 1, f"response.{name}", getattr(r, name), "1 or more")
        for name in ("num_seeds", "num_proxies", "games", "matrix_seeds"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        alphas = self.matrix_alphas
        require(len(alphas) > 0 and min(alphas) >= 0, "matrix_alphas", alphas, "a list of weights, 0 or more each")
        require(n.alpha >= 0, "population.alpha", n.alpha, "0 or more")
        require(r.beta >= 0, "response.beta", r.beta, "0 or more")
        require(0 <= r.running_decay < 1, "response.running_decay", r.running_decay, "at least 0 and below 1")
        samples = p.num_envs * p.horizon
        require(samples % p.minibatches == 0, "ppo.minibatches", p.minibatches, f"a divisor of {samples}")

    @property
    def steps_per_update(self) -> int:
        """Environment steps of one PPO update."""
        return self.ppo.num_envs * self.ppo.horizon


def fast() -> Config:
    """Both stages on one kitchen in about 2.5 minutes on one core, 0.5 GB."""
    return Config()


def paper() -> Config:
    """The released code's values: 10 hours on one core (estimated from one iteration of each stage), 1 GB."""
    return Config(
        encoding="planes20_legacy",
        net="conv",
        ppo=PPOConfig(
            num_envs=30, epochs=5, minibatches=10, learning_rate=8e-4, learning_rate_final=8e-4, clip=0.05,
            gae_lambda=0.98, entropy_coef=0.5, entropy_coef_final=0.5, max_grad_norm=0.1, reward_scale=1.0,
            shaping_steps=5e6, team_shaping=True,
        ),
        population=PopulationConfig(
            steps=1.1e7, updates_per_iteration=3, both_seats=False, mid_checkpoint="by_iteration"
        ),
        response=ResponseConfig(steps=4.4e7, difficulty="evaluation", partner_per="chunk"),
    )  # fmt: skip


def quick() -> Config:
    """The small comparison: matrix games, then SP and MEP with human proxies; 4 minutes on two cores, 1.5 GB."""
    base = fast()
    # alpha: chosen in pilot runs on cramped_room among 0, 0.01, 0.05, 0.1 and 0.2, with clones not used here
    population = replace(base.population, size=4, steps=5e5, alpha=0.1)
    response = replace(base.response, steps=1.2e6)
    return replace(base, method="compare", num_seeds=4, workers="process:2", population=population, response=response)


def smoke() -> Config:
    """Every part of both stages in a few seconds, 0.5 GB; learns nothing."""
    return Config(
        ppo=PPOConfig(num_envs=4, horizon=40, epochs=1, minibatches=2),
        population=PopulationConfig(size=2, steps=480, candidates=4),
        response=ResponseConfig(steps=480, evaluation_games=1, evaluate_every=2),
    )


PRESETS: dict[str, Callable[[], Config]] = {"fast": fast, "paper": paper, "quick": quick, "smoke": smoke}
