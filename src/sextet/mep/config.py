"""Presets of MEP and its baselines; the settings themselves, with published values beside ours, are in `settings`.

A preset without a kitchen in its name is for cramped_room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sextet.mep.settings import (
    LAYOUTS,
    METHODS,
    Config,
    PBTConfig,
    PopulationConfig,
    PPOConfig,
    ResponseConfig,
    TrajeDiConfig,
)

__all__ = [
    "LAYOUTS",
    "METHODS",
    "PRESETS",
    "Config",
    "PBTConfig",
    "PPOConfig",
    "PopulationConfig",
    "ResponseConfig",
    "TrajeDiConfig",
]

# kitchen: (environment steps, steps of shaping, step size), from the scripts of the 2019 study
PAPER_SP = {
    "cramped_room": (6e6, 2.5e6, 1e-3),
    "asymmetric_advantages": (7e6, 2.5e6, 1e-3),
    "coordination_ring": (1e7, 3.5e6, 6e-4),
    "forced_coordination": (7.5e6, 2.5e6, 8e-4),
    "counter_circuit": (8e6, 2.5e6, 8e-4),
}
PAPER_PBT = {
    "cramped_room": (8e6, 3e6, 2e-3),
    "asymmetric_advantages": (1.1e7, 5e6, 8e-4),
    "coordination_ring": (5e6, 4e6, 8e-4),
    "forced_coordination": (8e6, 7e6, 3e-3),
    "counter_circuit": (6e6, 4e6, 1e-3),
}


def fast(layout: str = "cramped_room") -> Config:
    """Both stages on one kitchen in 1.6 minutes on one core (about 3 but for cramped_room), 0.5 GB."""
    if layout == "cramped_room":
        return Config()
    population, response = PopulationConfig(steps=2e6), ResponseConfig(steps=5e6)
    return Config(layout=layout, population=population, response=response, pbt=PBTConfig(steps=5e6))


def paper(layout: str = "cramped_room") -> Config:
    """The values of the MEP authors' code, the same for every kitchen: 10 hours on one core (estimated), 1 GB."""
    return Config(
        layout=layout,
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


def paper_sp(layout: str = "cramped_room") -> Config:
    """Self-play with the values of the 2019 study's scripts: 0.5 to 1 hour on one core (estimated), 1 GB."""
    base, (steps, shaping, rate) = paper(layout), PAPER_SP[layout]
    ppo = replace(
        base.ppo, epochs=8, minibatches=6, learning_rate=rate, learning_rate_final=rate, shaping_steps=shaping,
        entropy_coef=0.1, entropy_coef_final=0.1, value_coef=1.0 if layout == "cramped_room" else 0.5,
    )  # fmt: skip
    population = replace(base.population, size=1, steps=steps, updates_per_iteration=1)
    return replace(base, method="sp", ppo=ppo, population=population)


def paper_pbt(layout: str = "cramped_room") -> Config:
    """PBT with the values of the 2019 study's scripts: 2 to 4 hours on one core (estimated), 1 GB."""
    base, (steps, shaping, rate) = paper(layout), PAPER_PBT[layout]
    ppo = replace(base.ppo, learning_rate=rate, learning_rate_final=rate, shaping_steps=shaping)
    return replace(base, method="pbt", ppo=ppo, pbt=PBTConfig(steps=steps))


def compare() -> Config:
    """Every method, 5 seeds, on cramped_room and coordination_ring, with all partners: an hour on two cores."""
    base = fast()
    return replace(
        base, method="compare", layouts="cramped_room,coordination_ring", num_seeds=5, workers="process:2"
    )  # fmt: skip


def quick(layout: str = "cramped_room") -> Config:
    """The small comparison: matrix games, then SP and MEP with human proxies; 3 minutes on two cores, 1.5 GB."""
    base = fast()
    # alpha: chosen in pilot runs on cramped_room among 0, 0.01, 0.05, 0.1 and 0.2, with clones not used here; on
    # coordination_ring 0.1 leaves members of 1e6 steps without return, so other kitchens keep the authors' value
    alpha = 0.1 if layout == "cramped_room" else base.population.alpha
    population = replace(base.population, size=4, steps=5e5, alpha=alpha)
    response = replace(base.response, steps=1.2e6)
    return replace(
        base, method="compare", layout=layout, methods="sp,mep,mep_uniform", num_seeds=4, workers="process:2",
        population=population, response=response,
    )  # fmt: skip


def smoke() -> Config:
    """Every part of both stages in a few seconds, 0.5 GB; learns nothing."""
    return Config(
        ppo=PPOConfig(num_envs=4, horizon=40, epochs=1, minibatches=2),
        population=PopulationConfig(size=2, steps=480, candidates=4),
        response=ResponseConfig(steps=480, evaluation_games=1, evaluate_every=2),
        pbt=PBTConfig(size=2, steps=960, games=2),
    )


def _of_kitchen(preset: Callable[[str], Config], layout: str) -> Callable[[], Config]:
    def chosen() -> Config:
        return preset(layout)

    chosen.__doc__ = preset.__doc__
    return chosen


PRESETS: dict[str, Callable[[], Config]] = {"compare": compare, "smoke": smoke}
for _preset in (fast, quick, paper, paper_sp, paper_pbt):
    PRESETS[_preset.__name__] = _preset
    PRESETS |= {f"{_preset.__name__}-{layout}": _of_kitchen(_preset, layout) for layout in LAYOUTS[1:]}
