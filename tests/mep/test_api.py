"""Overcooked behind Gymnasium's and PettingZoo's interfaces."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

from sextet.core.errors import UsageError
from sextet.mep.overcooked import ENCODINGS, LAYOUTS, Overcooked

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("pettingzoo")

from gymnasium.wrappers.vector import FlattenObservation, RecordEpisodeStatistics  # noqa: E402

from sextet.mep.api import OvercookedParallelEnv, OvercookedVectorEnv  # noqa: E402

with warnings.catch_warnings():  # importing PettingZoo's tests loads one of its games the way it deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from pettingzoo.test import parallel_api_test, parallel_seed_test


class RandomPartner:
    """Acts at random, and remembers what it was asked."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.actions: list[np.ndarray] = []

    def begin(self, env: Overcooked, seat: int) -> None:
        assert not env.state.time.any()
        self.begun.append(seat)

    def act(self, env: Overcooked, seat: int, rng: np.random.Generator) -> np.ndarray:
        assert seat == self.begun[-1]
        self.actions.append(rng.integers(0, 6, env.num_envs))
        return self.actions[-1]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_vector_env_keeps_the_interface(encoding: str) -> None:
    env = OvercookedVectorEnv("coordination_ring", 3, encoding=encoding, horizon=30)
    assert env.metadata["autoreset_mode"] == gymnasium.vector.AutoresetMode.NEXT_STEP
    env.action_space.seed(1)
    seen, info = env.reset(seed=1)
    assert info == {} and env.observation_space.contains(seen) and seen.dtype == env.observation_space.dtype
    assert env.single_observation_space.contains(seen[0])
    assert env.action_space.shape == (3, 2) and env.single_action_space.nvec.tolist() == [6, 6]
    for _ in range(70):
        seen, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert env.observation_space.contains(seen)
        assert (reward.shape, reward.dtype) == ((3,), np.float64)
        assert terminated.dtype == truncated.dtype == bool and not terminated.any()
        assert info["sparse"].shape == (3,) and info["shaped"].shape == (3, 2)
    env.close()


def test_vector_env_truncates_and_restarts_in_the_next_step() -> None:
    env, game = OvercookedVectorEnv("cramped_room", 2, horizon=5, shaping=0.5), Overcooked("cramped_room", 2)
    first, _ = env.reset(seed=0)
    for step in range(1, 18):
        actions = np.array([[5, 5], [step % 6, (step + 3) % 6]])
        seen, reward, terminated, truncated, info = env.step(actions)
        assert truncated.tolist() == [step % 6 == 5] * 2 and not terminated.any()
        if step % 6 == 0:  # these actions are not played
            game.reset()
            np.testing.assert_array_equal(seen, first)
            assert not reward.any() and not info["sparse"].any() and not info["shaped"].any()
        else:
            sparse, shaped, _ = game.step(actions)
            np.testing.assert_allclose(reward, sparse + 0.5 * shaped.sum(1))
            np.testing.assert_array_equal(info["shaped"], shaped)
        np.testing.assert_array_equal(seen, game.observe("planes20"))
    env.reset()
    assert not env.step(actions)[3].any() and env.game.state.time.tolist() == [1, 1]


def test_vector_env_works_with_gymnasium_wrappers() -> None:
    env = OvercookedVectorEnv("cramped_room", 2, horizon=6, shaping=1.0)
    wrapped = RecordEpisodeStatistics(FlattenObservation(env))
    wrapped.reset(seed=0)
    for action in (2, 5, 3, 0, 5, 4):  # player 1 takes an onion and puts it in the pot
        seen, _, _, _, info = wrapped.step(np.array([[4, action]] * 2))
    assert seen.shape == (2, 2 * 20 * 20)
    assert info["episode"]["r"].tolist() == [3, 3] and info["episode"]["l"].tolist() == [6, 6]


@pytest.mark.parametrize("seat", [0, 1])
def test_one_seat_with_a_partner(seat: int) -> None:
    partner, game = RandomPartner(), Overcooked("asymmetric_advantages", 4)
    env = OvercookedVectorEnv("asymmetric_advantages", 4, horizon=20, seat=seat, partner=partner)
    seen, _ = env.reset(seed=3)
    assert env.observation_space.contains(seen) and partner.begun == [1 - seat]
    assert env.action_space.shape == (4,)
    env.action_space.seed(0)
    for _ in range(19):
        mine = env.action_space.sample()
        seen, *_ = env.step(mine)
        both = [mine, partner.actions[-1]]
        game.step(np.stack(both[:: 1 if seat == 0 else -1], 1))
        np.testing.assert_array_equal(seen, game.observe("planes20", seat))
    assert env.step(env.action_space.sample())[3].all() and partner.begun == [1 - seat]
    env.step(env.action_space.sample())
    assert partner.begun == [1 - seat] * 2 and len(partner.actions) == 20  # told of the new games, not asked


def test_seeds_decide_what_the_partner_does() -> None:
    def play(seed: int | None, env: OvercookedVectorEnv) -> list[np.ndarray]:
        env.partner.actions.clear()
        env.reset(seed=seed)
        for _ in range(30):
            env.step(np.full(2, 5))
        return list(env.partner.actions)

    first, second = (
        OvercookedVectorEnv("cramped_room", 2, horizon=10, seat=0, partner=RandomPartner()) for _ in range(2)
    )
    same = play(7, first)
    np.testing.assert_array_equal(same, play(7, second))
    assert not np.array_equal(same, play(8, second))
    assert not np.array_equal(same, play(None, first))  # goes on with its generator
    np.testing.assert_array_equal(same, play(7, first))


def test_wrong_use_of_the_vector_env() -> None:
    with pytest.raises(UsageError, match="seat=1 together with partner="):
        OvercookedVectorEnv("cramped_room", 2, seat=0)
    with pytest.raises(UsageError, match="seat=1 together with partner="):
        OvercookedVectorEnv("cramped_room", 2, partner=RandomPartner())
    with pytest.raises(UsageError, match="num_envs is 0"):
        OvercookedVectorEnv("cramped_room", 0)
    with pytest.raises(UsageError, match="seat is 2"):
        OvercookedVectorEnv("cramped_room", 2, seat=2, partner=RandomPartner())
    env = OvercookedVectorEnv("cramped_room", 2, seat=0, partner=RandomPartner())
    env.reset()
    with pytest.raises(UsageError, match=r"shape \(2, 2\); expected \(2,\)"):
        env.step(np.zeros((2, 2), int))
    with pytest.raises(UsageError, match="allowed are 0 to 5"):
        env.step(np.array([0, 6]))
    with pytest.raises(UsageError, match="actions are float64"):
        env.step(np.array([0.0, 1.0]))


@pytest.mark.parametrize("encoding", ["planes20", "features62"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_parallel_env_passes_pettingzoos_own_test(name: str, encoding: str, capsys: Any) -> None:
    parallel_api_test(OvercookedParallelEnv(name, encoding=encoding, horizon=50), num_cycles=120)
    assert "Passed Parallel API test" in capsys.readouterr().out


def test_parallel_env_passes_pettingzoos_seed_test() -> None:
    parallel_seed_test(lambda: OvercookedParallelEnv("cramped_room", horizon=60), num_cycles=100)


def test_parallel_env_is_the_game() -> None:
    env, game = OvercookedParallelEnv("cramped_room", horizon=25, shaping=2.0), Overcooked("cramped_room", 1)
    seen, infos = env.reset(seed=5)
    assert env.num_agents == 2 and set(seen) == set(infos) == {"player_0", "player_1"}
    rng = np.random.default_rng(1)
    for step in range(1, 26):
        actions = rng.choice([0, 1, 2, 3, 5], 2)
        sparse, shaped, _ = game.step(actions[None])
        seen, rewards, ended, cut, infos = env.step(dict(zip(env.possible_agents, actions, strict=True)))
        for seat, agent in enumerate(env.possible_agents):
            np.testing.assert_array_equal(seen[agent], game.observe("planes20", seat)[0])
            assert rewards[agent] == sparse[0] + 2 * shaped[0].sum()
            assert infos[agent] == {"sparse": sparse[0], "shaped": shaped[0, seat]}
            assert ended[agent] is False and cut[agent] is (step == 25)
    assert env.agents == []
    with pytest.raises(UsageError, match="playing are none: call reset"):
        env.step({})
    env.reset()
    with pytest.raises(UsageError, match=r"actions are for \['player_0'\]; playing are"):
        env.step({"player_0": 1})
    with pytest.raises(UsageError, match="allowed are 0 to 5"):
        env.step({"player_0": 1, "player_1": 9})


@pytest.mark.parametrize("package", ["gymnasium", "pettingzoo"])
def test_missing_package_names_the_command(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import sextet.mep.api"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = result.stderr.strip().splitlines()[-1]
    assert "UsageError" in last and package in last and 'pip install "sextet[coop]"' in last
