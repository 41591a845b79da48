import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from sextet.mep.features import FEATURES62, FEATURES96, features62, features96, steps_to
from sextet.mep.overcooked import LAYOUTS, Layout, Overcooked, State

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "features.json").read_text())


def lcg(seed: int) -> Iterator[int]:
    """The stream of the golden values: 15-bit numbers."""
    x = seed
    while True:
        x = (1103515245 * x + 12345) % 2**31
        yield x >> 16


def random_states(layout: Layout, n: int, seed: int) -> State:
    """States that play seldom reaches: everything anywhere, pots in every stage."""
    draw = lcg(seed)
    floor, counters = np.flatnonzero(layout.terrain == 0), np.flatnonzero(layout.terrain == 1)
    state = Overcooked(layout, n, backend="numpy").state
    for row in range(n):
        first = next(draw) % len(floor)
        state.pos[row] = floor[[first, (first + 1 + next(draw) % (len(floor) - 1)) % len(floor)]]
        state.orient[row] = next(draw) % 4, next(draw) % 4
        state.held[row] = next(draw) % 4, next(draw) % 4
        for cell in counters:
            state.counter[row, cell] = max(0, next(draw) % 12 - 8)
        for pot in range(len(layout.pots)):
            state.pot_onions[row, pot] = next(draw) % 4
            state.pot_cook[row, pot] = (next(draw) % 21) * (state.pot_onions[row, pot] == 3)
    return state


def played_states(layout: Layout, seed: int, steps: int = 400) -> State:
    """The start and every state of one game of the golden action stream, stacked in time."""
    env, draw = Overcooked(layout, 1, horizon=10**6, backend="numpy"), lcg(seed)
    seen = [[array.copy() for array in env.state.arrays()]]
    for _ in range(steps):
        first, second = (min(next(draw) % 9, 5) for _ in range(2))
        env.step(np.array([[first, second]]))
        seen.append([array.copy() for array in env.state.arrays()])
    return State(**{name: np.concatenate(parts) for name, *parts in zip(vars(env.state), *seen, strict=True)})


def digest(features: np.ndarray) -> str:
    return hashlib.sha256(features.astype("<i2").tobytes()).hexdigest()[:16]


def both_seats(encode: Any, layout: Layout, state: State) -> np.ndarray:
    return np.stack([encode(layout, state, seat) for seat in (0, 1)], axis=1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_62_features_equal_the_2019_code(name: str) -> None:
    layout, golden = Layout.load(name), GOLDEN[name]
    played = both_seats(features62, layout, played_states(layout, 1))
    assert played.dtype == np.float32 and played.shape == (401, 2, 62)
    assert [played[0].tolist(), played[400].tolist()] == golden["rows_0_and_400"]
    assert digest(played) == golden["played"]
    drawn = both_seats(features62, layout, random_states(layout, 300, 7))
    assert drawn[0].tolist() == golden["random_row_0"]
    assert digest(drawn) == golden["random"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_96_features_equal_the_overcooked_package(name: str) -> None:
    mdp_module = pytest.importorskip("overcooked.mdp.overcooked_mdp")
    planners = pytest.importorskip("overcooked.planning.planners")
    directions = [(0, -1), (0, 1), (1, 0), (-1, 0)]
    other_name = {"counter_circuit": "counter_circuit_o_1order"}.get(name, name)
    mdp = mdp_module.OvercookedGridworld.from_layout_name(other_name, old_dynamics=True)
    motion = planners.MotionPlanner(mdp, counter_goals=[])

    def min_cost_to_feature(start: Any, places: list[Any], with_argmin: bool) -> tuple[float, Any]:
        # overcooked 0.2.1 dropped the argument that its own featurisation passes, so the search over its
        # distances is repeated here.
        goals = [(place, goal) for place in places for goal in motion.motion_goals_for_pos[place]]
        valid = [(place, goal) for place, goal in goals if motion.is_valid_motion_start_goal_pair(start, goal)]
        costs = [(motion.get_gridworld_distance(start, goal) + 1, place) for place, goal in valid]
        return min(costs, key=lambda cost: cost[0], default=(np.inf, None))

    motion.min_cost_to_feature = min_cost_to_feature
    planner = type("Planner", (), {"motion_planner": motion})
    layout = Layout.load(name)
    state = random_states(layout, 200, 3)

    def thing(code: int, place: tuple[int, int], onions: int = 3, cook: int = 20) -> Any:
        if code == 3:
            tick = cook if onions == 3 else -1
            return mdp_module.SoupState.get_soup(
                place, num_onions=onions, num_tomatoes=0, cooking_tick=tick, cook_time=20
            )
        return mdp_module.ObjectState({1: "onion", 2: "dish"}[code], place)

    for row in range(200):
        players = []
        for seat in (0, 1):
            place = (int(state.pos[row, seat]) % layout.width, int(state.pos[row, seat]) // layout.width)
            held = int(state.held[row, seat])
            facing = directions[state.orient[row, seat]]
            players.append(mdp_module.PlayerState(place, facing, thing(held, place) if held else None))
        objects = {}
        for cell in np.flatnonzero(state.counter[row]):
            place = (int(cell) % layout.width, int(cell) // layout.width)
            objects[place] = thing(int(state.counter[row, cell]), place)
        for pot, cell in enumerate(layout.pots):
            if onions := int(state.pot_onions[row, pot]):
                place = (int(cell) % layout.width, int(cell) // layout.width)
                objects[place] = thing(3, place, onions, int(state.pot_cook[row, pot]))
        theirs = mdp.featurize_state(mdp_module.OvercookedState(players, objects), planner)
        one = State(**{name: array[row : row + 1] for name, array in vars(state).items()})
        for seat in (0, 1):
            ours = features96(layout, one, seat)[0]
            wrong = [FEATURES96[i] for i in np.flatnonzero(ours != theirs[seat])]
            assert not wrong, (row, seat)


def test_names_describe_the_columns() -> None:
    layout = Layout.load("cramped_room")
    state = random_states(layout, 1, 1)
    state.pos[0], state.orient[0], state.held[0] = (6, 13), (3, 0), (2, 1)
    state.pot_onions[0], state.pot_cook[0] = 3, 5
    ours = dict(zip(FEATURES62, features62(layout, state, 1)[0].tolist(), strict=True))
    assert len(FEATURES62) == len(set(FEATURES62)) == 62 and len(FEATURES96) == len(set(FEATURES96)) == 96
    assert ours["self_orientation_north"] == ours["self_holds_onion"] == ours["other_holds_dish"] == 1
    assert ours["other_orientation_west"] == ours["other_wall_west"] == 1 and ours["self_wall_west"] == 0
    assert (ours["self_closest_cooking_pot_dx"], ours["self_closest_cooking_pot_dy"]) == (-1, -2)
    assert (ours["other_minus_self_dx"], ours["other_minus_self_dy"]) == (-2, -1)
    assert (ours["player0_x"], ours["player0_y"]) == (1, 1)  # also in the vector of player 1: the 2019 quirk
    later = dict(zip(FEATURES96, features96(layout, state, 1)[0].tolist(), strict=True))
    assert (later["self_x"], later["self_y"]) == (3, 2)
    assert (later["self_pot0_cook_time"], later["self_pot0_is_cooking"], later["self_pot1_exists"]) == (
        15,
        1,
        0,
    )


def test_steps_count_turns_and_walls() -> None:
    grid = ("XXXXX", "O   X", "X X X", "XDXPX")
    steps = steps_to(grid, 18).reshape(-1, 4)  # to the pot under cell 13
    assert steps[13].tolist() == [1, 0, 1, 1]  # already facing it, or one turn away
    assert steps[8].tolist() == [1, 1, 1, 1]  # moving down turns the player as well
    assert steps[7].min() == 2 and steps[11].min() == 4
    assert steps[0].min() == 1 << 20


def test_pot_behind_a_wall_is_not_seen() -> None:
    layout = Layout.parse("XXXPX\nO1XSX\nXDX2P\nXXXXX", name="split")
    state = random_states(layout, 1, 1)
    state.pos[0], state.pot_onions[0], state.held[0] = layout.starts, 0, 0
    near, far = (dict(zip(FEATURES62, features62(layout, state, seat)[0], strict=True)) for seat in (1, 0))
    assert near["self_closest_empty_pot_dx"] == 1
    assert far["self_closest_empty_pot_dx"] == far["self_closest_empty_pot_dy"] == 0
    assert far["self_closest_onion_dx"] == -1 and near["self_closest_onion_dx"] == 0


def test_both_encoders_make_50_000_rows_a_second() -> None:
    layout = Layout.load("counter_circuit")
    state = Overcooked(layout, 1024, backend="numpy").state
    for encode in (features62, features96):
        encode(layout, state, 0)
        start = perf_counter()
        for _ in range(10):
            encode(layout, state, 1)
        assert 10 * 1024 / (perf_counter() - start) > 50_000
