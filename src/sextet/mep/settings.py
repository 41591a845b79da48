"""Settings of MEP. "Authors' code" marks values of the code that the paper's authors released, "2019" those of the
human-aware RL study it builds on; the paper's own tables are not known here. Everything else is our choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sextet.core.config import RunConfig, require
from sextet.core.errors import UsageError, unknown

LAYOUTS = ("cramped_room", "asymmetric_advantages", "coordination_ring", "forced_coordination", "counter_circuit")
METHODS = {
    "sp": "SP",
    "sp_random_starts": "SP, random starts",
    "pbt": "PBT",
    "trajedi": "TrajeDi",
    "fcp": "FCP",
    "mep": "MEP",
    "mep_uniform": "MEP, uniform partners",
}
"""Methods of a comparison and how they are called in its tables."""


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
    random_starts: float = 0.0
    """Share of the games that start in a random state of the kitchen; method sp_random_starts takes 0.5 for 0."""
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
class TrajeDiConfig:
    """The bonus of TrajeDi's population."""

    weight: float = 0.01
    """Weight of the divergence of trajectories, in units of raw reward per nat and step, like alpha; 0 is SP. Ours: in
    pilots 0.03 cost members on coordination_ring over half of their return, and 0.1 did so on cramped_room."""
    gamma: float = 0.5
    """Reach of the kernel over steps, 0 to 1 (ZSC-Eval code: 0.5)."""


@dataclass(frozen=True, kw_only=True)
class PBTConfig:
    """PBT: members that learn with each other and take over the best one's settings."""

    size: int = 3
    """Members (2019: 3)."""
    steps: float = 3.0e6
    """Environment steps of each member (2019: 5e6 to 1.1e7, see the preset paper_pbt of a kitchen)."""
    games: int = 6
    """Games in which a pair is judged (2019: 6)."""
    mutation: float = 0.33
    """Chance that a setting of a replaced member changes (2019: 0.33)."""


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Maximum-entropy population-based training and its baselines in Overcooked kitchens."""

    method: Literal["mep", "fcp", "trajedi", "pbt", "sp", "sp_random_starts", "compare"] = "mep"
    """mep, fcp, trajedi: a population, then a best response to it. pbt: the best of members that learn with each other.
    sp: self-play. sp_random_starts: self-play with games that start anywhere. compare: several methods over several
    seeds and kitchens, each with proxies of humans, with each other and in matrix games."""
    layout: str = "cramped_room"
    """Name of a 2019 kitchen or path of a layout file."""
    layouts: str = ""
    """Kitchens of a comparison, separated by commas, "all" for the five of 2019; by default `layout` alone."""
    methods: str = "sp,sp_random_starts,pbt,trajedi,fcp,mep,mep_uniform"
    """Methods of a comparison, separated by commas; mep_uniform is mep with response.beta 0 on the same populations."""
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
    trajedi: TrajeDiConfig = field(default_factory=TrajeDiConfig)
    """Method trajedi."""
    pbt: PBTConfig = field(default_factory=PBTConfig)
    """Method pbt."""

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
        for name in ("size", "steps", "games"):
            require(getattr(self.pbt, name) >= 1, f"pbt.{name}", getattr(self.pbt, name), "1 or more")
        for name, value in (
            ("population.random_starts", n.random_starts),
            ("trajedi.gamma", self.trajedi.gamma),
            ("pbt.mutation", self.pbt.mutation),
        ):
            require(0 <= value <= 1, name, value, "from 0 to 1")
        require(self.trajedi.weight >= 0, "trajedi.weight", self.trajedi.weight, "0 or more")
        for method in self.compared:
            if method not in METHODS:
                raise UsageError(unknown("method", method, METHODS))
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
    def kitchens(self) -> list[str]:
        """Kitchens of a comparison."""
        names = [name.strip() for name in (self.layouts or self.layout).split(",") if name.strip()]
        return list(LAYOUTS) if names == ["all"] else list(dict.fromkeys(names))

    @property
    def compared(self) -> list[str]:
        """Methods of a comparison."""
        return list(dict.fromkeys(name.strip() for name in self.methods.split(",") if name.strip()))

    @property
    def steps_per_update(self) -> int:
        """Environment steps of one PPO update."""
        return self.ppo.num_envs * self.ppo.horizon
