"""The game against the golden table, against an independent implementation, and the two backends against each other."""

from __future__ import annotations

import errno
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sextet.core.errors import UsageError
from sextet.mep import kernels
from sextet.mep.overcooked import ENCODINGS, LAYOUTS, MODES, Layout, Overcooked, observation_shape

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "overcooked.json").read_text())
BACKENDS = ("numba", "numpy")
HELD = ("none", "onion", "dish", "soup")
STAY, INTERACT = 4, 5
N, S, E, W = range(4)


def lcg_actions(seed: int, steps: int) -> np.ndarray:
    """The golden action stream, (steps, 2)."""
    value, out = seed, []
    for _ in range(2 * steps):
        value = (1103515245 * value + 12345) % 2**31
        out.append(min((value >> 16) % 9, 5))
    return np.array(out).reshape(steps, 2)


def state_text(env: Overcooked, i: int) -> str:
    """The golden text of game i."""
    s, width = env.state, env.layout.width

    def at(cell: int) -> str:
        return f"{cell % width},{cell // width}"

    lying = [f"{at(c)},{'soup,3,20' if o == 3 else HELD[o]}" for c, o in enumerate(s.counter[i]) if o]
    cooking = [
        f"{at(int(c))},soup,{s.pot_onions[i, j]},{s.pot_cook[i, j]}"
        for j, c in enumerate(env.layout.pots)
        if s.pot_onions[i, j]
    ]
    players = [f"{at(int(s.pos[i, k]))},{s.orient[i, k]},{HELD[s.held[i, k]]}" for k in range(2)]
    return "|".join(players + sorted(lying + cooking))


def digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def plane_digests(env: Overcooked, encoding: str) -> list[str]:
    """Hashes of both seats of game 0; the golden ones are of (W, H, C)."""
    seen = env.observe(encoding)[0]
    return [digest(np.ascontiguousarray(planes.transpose(2, 1, 0)).tobytes()) for planes in seen]


# --- golden values


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_golden_traces_and_encodings(name: str, backend: str) -> None:
    env = Overcooked(name, 3, backend=backend)
    streams = np.stack([lcg_actions(seed, 3000) for seed in (1, 2, 3)], 1)
    assert streams[:8, 0].tolist() == GOLDEN["actions_seed_1"]
    goldens = [row for row in GOLDEN["traces"] if row["layout"] == name]
    planes = GOLDEN["encodings"][name]
    assert plane_digests(env, "planes20")[0] == planes["start"]
    sparse, shaped = np.zeros(3), np.zeros(3)
    traces = [hashlib.sha256() for _ in range(3)]
    for step, actions in enumerate(streams, 1):
        reward, bonus, done = env.step(actions)
        sparse += reward
        shaped += bonus.sum(1)
        assert done.all() == (step >= 400)
        texts = [state_text(env, i) for i in range(3)]
        for trace, text in zip(traces, texts, strict=True):
            trace.update(f"{text}\n".encode())
        if step == 400:
            assert texts[0] == GOLDEN["states_at_400_seed_1"][name]
            assert plane_digests(env, "planes20_legacy") == planes["legacy"]
            assert plane_digests(env, "planes20") == planes["fixed"]
            assert [(r["sparse_400"], r["shaped_400"]) for r in goldens] == [*zip(sparse, shaped, strict=True)]
            assert [r["state_400"] for r in goldens] == [digest(text.encode()) for text in texts]
    assert [(r["sparse_3000"], r["shaped_3000"]) for r in goldens] == [*zip(sparse, shaped, strict=True)]
    assert [r["trace"] for r in goldens] == [trace.hexdigest()[:16] for trace in traces]


# --- an independent implementation on the same streams


def oracle_text(state: Any) -> str:
    from overcooked.mdp.actions import Direction

    def item(thing: Any) -> str:
        where = f"{thing.position[0]},{thing.position[1]},{thing.name}"
        if thing.name != "soup":
            return where
        return f"{where},{len(thing.ingredients)},{max(thing._cooking_tick, 0)}"

    players = [
        f"{p.position[0]},{p.position[1]},{Direction.DIRECTION_TO_INDEX[p.orientation]},"
        f"{p.held_object.name if p.held_object else 'none'}"
        for p in state.players
    ]
    return "|".join(players + sorted(item(thing) for thing in state.objects.values()))


def planes20_from_26(planes: np.ndarray) -> np.ndarray:
    """The 20 planes say the same as the 26, in other words; (seats, 26, H, W) to (seats, 20, H, W)."""
    pots = planes[:, 10]
    out = np.zeros((2, 20, *planes.shape[2:]), np.int64)
    out[:, :13] = planes[:, [*range(13)]]
    out[:, 13:15] = planes[:, 14:16]
    out[:, 15] = planes[:, 16] + planes[:, 18] * pots
    out[:, 16] = (20 - planes[:, 20]) * (planes[:, 18] > 0) * pots
    out[:, 17] = planes[:, 21] * (1 - pots)
    out[:, 18:] = planes[:, 22:24]
    return out


def compare_with_oracle(name: str, seed: int, every: int) -> None:
    from overcooked.mdp.actions import Action
    from overcooked.mdp.overcooked_mdp import OvercookedGridworld

    theirs = "counter_circuit_o_1order" if name == "counter_circuit" else name
    mdp = OvercookedGridworld.from_layout_name(theirs, old_dynamics=True)
    state = mdp.get_standard_start_state()
    env = Overcooked(name, 1)
    for step, actions in enumerate(lcg_actions(seed, 3000)):
        if step % every == 0 or 355 <= step <= 365:  # the urgency plane rises at 361
            expected = np.stack(mdp.lossless_state_encoding(state, horizon=400)).transpose(0, 3, 2, 1)
            np.testing.assert_array_equal(env.observe("planes26")[0], expected)
            np.testing.assert_array_equal(env.observe("planes20")[0], planes20_from_26(expected))
        state, info = mdp.get_state_transition(state, [Action.INDEX_TO_ACTION[a] for a in actions])
        sparse, shaped, _ = env.step(actions[None])
        assert state_text(env, 0) == oracle_text(state), (name, seed, step)
        assert sparse[0] == sum(info["sparse_reward_by_agent"]), (name, seed, step)
        assert shaped[0].tolist() == info["shaped_reward_by_agent"], (name, seed, step)


@pytest.mark.parametrize("name", LAYOUTS)
def test_same_as_the_oracle(name: str) -> None:
    pytest.importorskip("overcooked")
    for seed in (1, 2, 3):
        compare_with_oracle(name, seed, every=25)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LAYOUTS)
def test_same_as_the_oracle_on_twenty_seeds(name: str) -> None:
    pytest.importorskip("overcooked")
    for seed in range(1, 21):
        compare_with_oracle(name, seed, every=1)


# --- rules that random play rarely shows


KITCHEN = "XXPXX\nO1 2O\nX   X\nXDXSX"


def kitchen(num_envs: int = 1, backend: str = "numpy", grid: str = KITCHEN) -> Overcooked:
    return Overcooked(Layout.parse(grid, name="kitchen"), num_envs, backend=backend)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def face(env: Overcooked, player: int, x: int, y: int, direction: int, held: int = 0) -> None:
    env.state.pos[:, player] = y * env.layout.width + x
    env.state.orient[:, player] = direction
    env.state.held[:, player] = held


def test_both_players_fill_one_pot_and_the_third_onion_starts_it(backend: str) -> None:
    env = kitchen(grid="XXXXX\nX1P2O\nX   X\nXDXSX", backend=backend)
    face(env, 0, 1, 1, E, held=1)
    face(env, 1, 3, 1, W, held=1)
    _, shaped, _ = env.step([[INTERACT, INTERACT]])
    assert shaped.tolist() == [[3, 3]] and env.state.pot_onions[0, 0] == 2 and env.state.pot_cook[0, 0] == 0
    env.state.held[:] = 1
    _, shaped, _ = env.step([[INTERACT, INTERACT]])  # player 0 comes first, player 1 finds the pot full
    assert shaped.tolist() == [[3, 0]] and env.state.held.tolist() == [[0, 1]]
    assert env.state.pot_cook[0, 0] == 1
    env.state.held[0] = [0, 2]
    for _ in range(18):
        _, shaped, _ = env.step([[INTERACT, INTERACT]])  # neither empty hands nor an early dish do anything
        assert not shaped.any()
    assert env.state.pot_cook[0, 0] == 19
    env.step([[STAY, INTERACT]])
    assert env.state.held.tolist() == [[0, 2]] and env.state.pot_cook[0, 0] == 20
    env.state.held[0] = [2, 2]
    _, shaped, _ = env.step([[INTERACT, INTERACT]])  # one soup, the first dish gets it
    assert shaped.tolist() == [[5, 0]] and env.state.held.tolist() == [[3, 2]]
    assert env.state.pot_onions[0, 0] == env.state.pot_cook[0, 0] == 0


def test_both_players_use_one_counter_in_one_step(backend: str) -> None:
    env = kitchen(grid="XPXXX\nO1X2O\nX   X\nXDXSX", backend=backend)
    face(env, 0, 1, 1, E, held=1)
    face(env, 1, 3, 1, W)
    env.step([[INTERACT, INTERACT]])  # put down and taken up at once
    assert env.state.held.tolist() == [[0, 1]] and not env.state.counter.any()
    env.step([[INTERACT, INTERACT]])  # player 0 finds nothing, then player 1 puts down
    assert env.state.held.tolist() == [[0, 0]] and env.state.counter[0, 7] == 1
    env.state.held[:] = 2
    env.step([[INTERACT, INTERACT]])  # occupied for both
    assert env.state.held.tolist() == [[2, 2]] and env.state.counter[0, 7] == 1


def test_dish_reward_needs_a_pot_in_use_and_no_spare_dish(backend: str) -> None:
    def reward(pot: int, other: int, lying: int) -> float:
        env = kitchen(backend=backend)
        face(env, 0, 1, 2, S)  # at the dishes
        face(env, 1, 3, 1, N, held=other)
        env.state.pot_onions[:] = pot
        env.state.counter[0, :lying] = 2
        _, shaped, _ = env.step([[INTERACT, STAY]])
        assert env.state.held[0, 0] == 2
        return float(shaped[0, 0])

    assert reward(pot=0, other=0, lying=0) == 0
    assert reward(pot=1, other=0, lying=0) == 3
    assert reward(pot=3, other=1, lying=0) == 3
    assert reward(pot=1, other=2, lying=0) == 0
    assert reward(pot=1, other=0, lying=1) == 0
    assert reward(pot=1, other=0, lying=2) == 0


def test_dish_reward_looks_at_pots_before_and_at_hands_during_the_step(backend: str) -> None:
    env = kitchen(backend=backend)
    face(env, 0, 2, 1, N, held=1)  # at the pot
    face(env, 1, 1, 2, S)  # at the dishes
    _, shaped, _ = env.step([[INTERACT, INTERACT]])
    assert shaped.tolist() == [[3, 0]]  # the onion of player 0 comes too late for player 1
    env = kitchen(backend=backend)
    face(env, 0, 2, 1, N, held=2)
    face(env, 1, 1, 2, S)
    env.state.pot_onions[:], env.state.pot_cook[:] = 3, 20
    _, shaped, _ = env.step([[INTERACT, INTERACT]])
    assert shaped.tolist() == [[5, 3]]  # the dish of player 0 has just become a soup


def test_movement(backend: str) -> None:
    def move(first: tuple[int, int], second: tuple[int, int], actions: list[int]) -> list[int]:
        env = kitchen(backend=backend)
        face(env, 0, *first, N)
        face(env, 1, *second, N)
        env.step([actions])
        assert [env.state.orient[0, k] for k in range(2)] == [a if a < 4 else N for a in actions]
        return env.state.pos[0].tolist()

    assert move((1, 1), (3, 1), [E, W]) == [6, 8]  # one cell wanted by both
    assert move((1, 1), (2, 1), [E, W]) == [6, 7]  # a swap
    assert move((1, 1), (2, 1), [E, E]) == [7, 8]  # following is allowed
    assert move((1, 1), (2, 1), [E, STAY]) == [6, 7]  # occupied
    assert move((1, 1), (2, 1), [W, S]) == [6, 12]  # a wall stops, and only turns
    assert move((1, 1), (2, 1), [E, N]) == [6, 7]  # the other does not get out of the way


def test_delivery_pays_the_team(backend: str) -> None:
    env = kitchen(backend=backend)
    face(env, 0, 3, 2, S, held=3)
    face(env, 1, 1, 1, N)
    sparse, shaped, _ = env.step([[INTERACT, STAY]])
    assert sparse.tolist() == [20] and not shaped.any() and not env.state.held.any()


def test_games_end_at_the_horizon_and_the_caller_resets(backend: str) -> None:
    env = Overcooked("cramped_room", 3, horizon=2, backend=backend)
    start = state_text(env, 0)
    moves = np.array([[N, S]] * 3)
    assert not env.step(moves)[2].any()
    assert env.step(moves)[2].all() and env.state.time.tolist() == [2, 2, 2]
    env.reset(np.array([True, False, True]))
    assert env.state.time.tolist() == [0, 2, 0]
    assert state_text(env, 0) == state_text(env, 2) == start
    assert env.state.pos[1].tolist() == [6, 13]
    assert env.step(moves)[2].tolist() == [False, True, False]
    env.reset()
    assert {state_text(env, i) for i in range(3)} == {start} and not env.state.time.any()


# --- encodings


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_observe_shapes_seats_and_out(encoding: str) -> None:
    env = Overcooked("counter_circuit", 4)
    for actions in np.random.default_rng(0).integers(0, 6, (60, 4, 2)):
        env.step(actions)
    both = env.observe(encoding)
    assert both.shape == (4, 2, *observation_shape(env.layout, encoding))
    assert both.dtype == (np.uint8 if encoding in MODES else np.float32)
    for seat in range(2):
        np.testing.assert_array_equal(env.observe(encoding, seat), both[:, seat])
    out = np.full_like(both, 7)
    assert env.observe(encoding, out=out) is out
    np.testing.assert_array_equal(out, both)
    kept = both.copy()
    env.step([[W, E]] * 4)
    env.observe(encoding)
    np.testing.assert_array_equal(both, kept)  # what was returned stays as it was
    with pytest.raises(UsageError, match="out is"):
        env.observe(encoding, out=out[:2])
    with pytest.raises(UsageError, match="out is"):
        env.observe(encoding, out=out.astype(np.float64))


def test_legacy_planes_hide_loose_objects_of_a_carried_kind(backend: str) -> None:
    env = kitchen(2, backend=backend)
    env.state.counter[:, [0, 1, 4]] = [1, 2, 3]
    env.state.pot_onions[:], env.state.pot_cook[:] = 3, 7
    face(env, 0, 1, 1, N, held=1)
    face(env, 1, 3, 1, N, held=3)
    env.state.held[1] = 0
    fixed, legacy = (env.observe(encoding, 0) for encoding in ("planes20", "planes20_legacy"))
    np.testing.assert_array_equal(fixed[1], legacy[1])  # nobody carries anything
    expected = fixed[0].copy()
    expected[19, 0, 0] = expected[17, 0, 4] = expected[15, 0, 2] = expected[16, 0, 2] = 0
    np.testing.assert_array_equal(legacy[0], expected)
    assert legacy[0, 19].sum() == legacy[0, 17].sum() == legacy[0, 18].sum() == 1


# --- both backends, any kitchen, any state


@st.composite
def kitchens(draw: st.DrawFn) -> Layout:
    """A random closed kitchen; one pot may be out of reach, the other is beside player 1's start."""
    width, height = draw(st.integers(5, 8)), draw(st.integers(4, 6))
    rows = [["X"] * width for _ in range(height)]
    for y in range(1, height - 1):
        for x in range(1, width - 1):
            rows[y][x] = draw(st.sampled_from("    XP"))
    rows[1][1], rows[1][2], rows[0][1], rows[1][0] = "1", "2", "P", draw(st.sampled_from("XP"))
    rows[0][0] = draw(st.sampled_from("XP"))  # corners cannot be reached
    for mark, x in zip("ODS", draw(st.permutations(range(1, width - 1))), strict=False):
        rows[height - 1][x] = mark
    return Layout.parse("\n".join("".join(row) for row in rows), name="drawn")


def scatter(env: Overcooked, rng: np.random.Generator) -> None:
    """Puts every game in a random possible state."""
    layout, state, n = env.layout, env.state, env.num_envs
    floor = np.flatnonzero(layout.terrain == 0)
    state.pos[:] = np.stack([rng.choice(floor, 2, replace=False) for _ in range(n)])
    state.orient[:] = rng.integers(0, 4, (n, 2))
    state.held[:] = rng.integers(0, 4, (n, 2))
    state.counter[:] = rng.choice(4, (n, len(layout.terrain)), p=[0.7, 0.1, 0.1, 0.1]) * (layout.terrain == 1)
    state.pot_onions[:] = rng.integers(0, 4, state.pot_onions.shape)
    state.pot_cook[:] = rng.integers(1, 21, state.pot_cook.shape) * (state.pot_onions == 3)
    state.time[:] = rng.integers(0, 60, n)


@settings(max_examples=60, deadline=None)
@given(layout=kitchens(), seed=st.integers(0, 2**32 - 1), horizon=st.integers(1, 80))
def test_backends_agree_on_any_kitchen_and_state(layout: Layout, seed: int, horizon: int) -> None:
    rng = np.random.default_rng(seed)
    envs = [Overcooked(layout, 6, horizon=horizon, backend=backend) for backend in BACKENDS]
    for step in range(25):
        if step % 10 == 0:  # edits from outside, also between two observations
            scatter(envs[0], rng)
            for source, target in zip(envs[0].state.arrays(), envs[1].state.arrays(), strict=True):
                target[:] = source
        for encoding in MODES if step % 3 == 0 else ():
            seen = [env.observe(encoding) for env in envs]
            np.testing.assert_array_equal(*seen, err_msg=encoding)
        actions = rng.choice(6, (6, 2), p=[0.12, 0.12, 0.12, 0.12, 0.02, 0.5])
        for first, second in zip(*(env.step(actions) for env in envs), strict=True):
            np.testing.assert_array_equal(first, second)
        for first, second in zip(*(env.state.arrays() for env in envs), strict=True):
            np.testing.assert_array_equal(first, second)
        assert (envs[0].state.pos[:, 0] != envs[0].state.pos[:, 1]).all()
        assert (layout.terrain[envs[0].state.pos] == 0).all()
        assert envs[0].state.pot_onions.max() <= 3 and envs[0].state.pot_cook.max() <= 20


# --- wrong use, and machines without numba or a cache folder


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([[0, 1], [6, 0]], r"actions\[1\] is \[6, 0\]; allowed are 0 to 5"),
        ([[0, -1], [0, 0]], r"actions\[0\] is \[0, -1\]"),
        ([[0, 1]], r"int64 of shape \(1, 2\); expected integers of shape \(2, 2\)"),
        ([0, 1], r"shape \(2,\)"),
        ([[0.0, 1.0], [0.0, 1.0]], "actions are float64"),
        (np.ones((2, 2), bool), "actions are bool"),
    ],
)
def test_bad_actions_change_nothing(actions: Any, message: str, backend: str) -> None:
    env = Overcooked("cramped_room", 2, backend=backend)
    env.step(np.full((2, 2), 3, np.int8))
    before = [array.copy() for array in env.state.arrays()]
    with pytest.raises(UsageError, match=message):
        env.step(actions)
    for now, then in zip(env.state.arrays(), before, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 0}, "num_envs is 0; it must be a whole number of at least 1"),
        ({"num_envs": -3}, "num_envs is -3"),
        ({"num_envs": 2.0}, "num_envs is 2.0"),
        ({"horizon": 0}, "horizon is 0"),
        ({"backend": "numbo"}, 'unknown backend "numbo" .did you mean "numba"'),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Overcooked("cramped_room", **{"num_envs": 1, **options})


def test_bad_observe_and_reset() -> None:
    env = Overcooked("cramped_room", 2)
    with pytest.raises(UsageError, match='unknown encoding "planes2" .did you mean "planes2'):
        env.observe("planes2")
    with pytest.raises(UsageError, match="seat is 2; it must be 0, 1, or None"):
        env.observe("planes20", 2)
    for mask in (np.array([True]), np.array([1, 0])):
        with pytest.raises(UsageError, match=r"bool array of shape \(2,\)"):
            env.reset(mask)


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.numba_kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    assert Overcooked("cramped_room", 1).backend == "numpy"
    with pytest.raises(UsageError, match=r'pip install "sextet\[coop\]"'):
        Overcooked("cramped_room", 1, backend="numba")


@pytest.mark.parametrize("trouble", ["no writable folder", "disk full"])
def test_without_a_place_for_compiled_code(trouble: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from numba.core import caching, config

    def no_space(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if trouble == "disk full":
        monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(caching.IndexDataCacheFile, "_save_data", no_space)
    else:
        monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    env = Overcooked("cramped_room", 1, backend="numpy")
    env._kernels = kernels.numba_kernels.__wrapped__()
    env.step([[W, E]])
    np.testing.assert_array_equal(env.state.orient, [[W, E]])
    assert env.state.time.tolist() == [1] and not list(tmp_path.rglob("*.nbc"))


def test_importing_the_game_is_light() -> None:
    code = "import sys, sextet.mep.overcooked; print({'numba', 'torch', 'gymnasium'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
