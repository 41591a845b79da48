"""Overcooked behind the interfaces of Gymnasium (vector) and PettingZoo (parallel).

Both pay the team's sparse reward plus `shaping` times the team's shaped reward, and truncate, never terminate, at
the horizon. The game is deterministic; a seed only feeds the partner and the sampling of spaces.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sextet.core.errors import UsageError, missing_extra
from sextet.mep.kernels import Array
from sextet.mep.overcooked import MODES, Layout, Overcooked, observation_shape

try:
    from gymnasium import spaces
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
    from pettingzoo import ParallelEnv
except ImportError as error:
    raise missing_extra(error.name or "gymnasium", "coop", "sextet.mep.api") from error
if TYPE_CHECKING:
    from sextet.mep.evaluate import Agent


def _observations(layout: Layout, encoding: str, *axes: int) -> spaces.Box:
    shape = (*axes, *observation_shape(layout, encoding))
    if encoding in MODES:
        return spaces.Box(0, 20, shape, np.uint8)
    return spaces.Box(-np.inf, np.inf, shape, np.float32)


class OvercookedVectorEnv(VectorEnv[Array, Array, Array]):  # type: ignore[misc]
    """N games as a Gymnasium vector environment.

    Without a partner an action is joint, (N, 2), and observations have both seats, (N, 2, ...). With `seat` and
    `partner` they are those of one player, (N,) and (N, ...). All games end together; the step after that ignores
    its actions and starts new ones, as Gymnasium does by default. `info` has "sparse" (N,) and "shaped" (N, 2).
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": []}

    def __init__(
        self,
        layout: Layout | str | Path,
        num_envs: int,
        *,
        encoding: str = "planes20",
        horizon: int = 400,
        shaping: float = 0.0,
        seat: int | None = None,
        partner: Agent | None = None,
    ) -> None:
        """Raises UsageError as `Overcooked` does, and for one of `seat` and `partner` without the other."""
        if (seat is None) != (partner is None) or seat not in (None, 0, 1):
            raise UsageError(f"seat is {seat!r}; give seat=0 or seat=1 together with partner=, or neither")
        self.game = Overcooked(layout, num_envs, horizon=horizon)
        self.num_envs, self.encoding, self.shaping = num_envs, encoding, shaping
        self.seat, self.partner, self._over = seat, partner, False
        both = seat is None
        self.single_observation_space = _observations(self.game.layout, encoding, *([2] if both else []))
        self.single_action_space = spaces.MultiDiscrete([6, 6]) if both else spaces.Discrete(6)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Starts all games; `options` are not used."""
        super().reset(seed=seed)
        self.game.reset()
        self._over = False
        if self.partner is not None and self.seat is not None:
            self.partner.begin(self.game, 1 - self.seat)
        return self.game.observe(self.encoding, self.seat), {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Raises UsageError for actions of another shape, dtype or range."""
        n = self.num_envs
        if self._over:
            sparse, shaped, done = np.zeros(n, np.float32), np.zeros((n, 2), np.float32), np.zeros(n, bool)
            seen, _ = self.reset()
        else:
            if self.partner is not None and self.seat is not None:
                actions = np.asarray(actions)
                if actions.shape != (n,):
                    raise UsageError(f"actions have shape {actions.shape}; expected ({n},)")
                other = self.partner.act(self.game, 1 - self.seat, self.np_random)
                actions = np.stack([other, actions] if self.seat else [actions, other], 1)
            sparse, shaped, done = self.game.step(actions)
            seen, self._over = self.game.observe(self.encoding, self.seat), bool(done.all())
        reward = (sparse + self.shaping * shaped.sum(1)).astype(np.float64)
        return seen, reward, np.zeros(n, bool), done, {"sparse": sparse, "shaped": shaped}


class OvercookedParallelEnv(ParallelEnv):  # type: ignore[misc]
    """One game as a PettingZoo parallel environment with agents "player_0" and "player_1"."""

    metadata = {"name": "overcooked_2019", "render_modes": []}
    possible_agents = ["player_0", "player_1"]

    def __init__(
        self,
        layout: Layout | str | Path,
        *,
        encoding: str = "planes20",
        horizon: int = 400,
        shaping: float = 0.0,
    ) -> None:
        """Raises UsageError as `Overcooked` does."""
        self.game = Overcooked(layout, 1, horizon=horizon)
        self.encoding, self.shaping = encoding, shaping
        self.agents: list[str] = []
        box = _observations(self.game.layout, encoding)
        self._spaces = {name: (box, spaces.Discrete(6)) for name in self.possible_agents}

    def observation_space(self, agent: str) -> spaces.Box:
        """Returns the space of one player's observations."""
        return self._spaces[agent][0]

    def action_space(self, agent: str) -> spaces.Discrete:
        """Returns the six actions."""
        return self._spaces[agent][1]

    def _each(self, *values: Any) -> dict[str, Any]:
        return dict(zip(self.possible_agents, values * (2 // len(values)), strict=True))

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Array], dict[str, dict[str, Any]]]:
        """Starts the game; `seed` seeds the action spaces, `options` are not used."""
        if seed is not None:
            for number, name in enumerate(self.possible_agents):
                self.action_space(name).seed(seed + number)
        self.game.reset()
        self.agents = list(self.possible_agents)
        return self._each(*self.game.observe(self.encoding)[0]), {name: {} for name in self.agents}

    def step(self, actions: dict[str, int]) -> tuple[dict[str, Any], ...]:
        """Returns observations, rewards, terminations, truncations, infos. Raises UsageError for bad actions."""
        if set(actions) != set(self.agents) or not self.agents:
            raise UsageError(f"actions are for {sorted(actions)}; playing are {self.agents or 'none: call reset'}")
        sparse, shaped, done = self.game.step(np.array([[actions[name] for name in self.possible_agents]]))
        seen = self._each(*self.game.observe(self.encoding)[0])
        infos = self._each(*({"sparse": float(sparse[0]), "shaped": float(s)} for s in shaped[0]))
        reward = float(sparse[0] + self.shaping * shaped.sum())
        self.agents = [] if done[0] else self.agents
        return seen, self._each(reward), self._each(False), self._each(bool(done[0])), infos
