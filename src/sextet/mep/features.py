"""Hand-made feature vectors of Overcooked: the 62 numbers human proxies are trained on, and the later 96.

Both put the player's own block first, then the other player's, then ``other - own`` position and a position.
"Closest" means fewest motion-planner steps (one turns the player and moves it when the faced cell is floor)
from the player's cell and orientation to a place facing the object; the first in reading order wins a tie.
Offsets are ``(dx, dy) = object - player``, and ``(0, 0)`` when there is no such object or no way to it.

``features62`` repeats the 2019 featurisation number for number, because proxies are compared with published
ones. Its quirks, kept on purpose:

- the planner has no counters as goals, so objects lying on counters are never the closest onion or dish, and
  ``closest_soup`` is always (0, 0);
- ``closest_one_onion_pot`` and ``closest_two_onion_pot`` are always (0, 0): looked up under missing keys;
- "facing an empty counter" was written but is never part of the vector;
- the last two numbers are player 0's position in *both* players' vectors.

``features96`` repeats the vector of the later package: the same planner (``closest_empty_counter`` is always
(0, 0)) but the right own position. The description published with it lists another order than the code emits;
ours is the emitted one, and :data:`FEATURES96` names every column.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sextet.mep.overcooked import Layout, State

COOK_TIME = 20
ONIONS_PER_SOUP = 3
_FAR = 1 << 20
_ONION, _DISH, _SOUP = 1, 2, 3  # codes of State.held
_MOVES = ((0, -1), (0, 1), (1, 0), (-1, 0))  # north, south, east, west, as State.orient
_COMPASS = ("north", "south", "east", "west")


def _offsets(*names: str) -> list[str]:
    return [f"closest_{name}_{axis}" for name in names for axis in ("dx", "dy")]


def _vector(block: list[str], position: str) -> tuple[str, ...]:
    both = [f"{who}_{name}" for who in ("self", "other") for name in block]
    return (*both, "other_minus_self_dx", "other_minus_self_dy", f"{position}_x", f"{position}_y")


_FACING = [f"orientation_{name}" for name in _COMPASS]
_WALLS = [f"wall_{name}" for name in _COMPASS]
_POT62 = _offsets("empty_pot", "one_onion_pot", "two_onion_pot", "cooking_pot", "ready_pot")
_BLOCK62 = [
    *_FACING, "holds_onion", "holds_soup", "holds_dish",
    *_offsets("onion"), *_POT62, *_offsets("dish", "soup", "serving"), *_WALLS,
]  # fmt: skip
_STATUS = ("exists", "is_empty", "is_full", "is_cooking", "is_ready")
_POT96 = (*_STATUS, "onions", "tomatoes", "cook_time", "dx", "dy")
_BLOCK96 = [
    *_FACING, "holds_onion", "holds_soup", "holds_dish", "holds_tomato",
    *_offsets("onion", "tomato", "dish", "soup"), "closest_soup_onions", "closest_soup_tomatoes",
    *_offsets("serving", "empty_counter"), *[f"pot{k}_{name}" for k in (0, 1) for name in _POT96], *_WALLS,
]  # fmt: skip

FEATURES62: tuple[str, ...] = _vector(_BLOCK62, "player0")
"""Names of the 62 columns, in order: 29 of the player, 29 of the other, 2 + 2."""
FEATURES96: tuple[str, ...] = _vector(_BLOCK96, "self")
"""Names of the 96 columns, in order: 46 of the player, 46 of the other, 2 + 2."""

_AT62 = {name: column for column, name in enumerate(_BLOCK62)}
_AT96 = {name: column for column, name in enumerate(_BLOCK96)}


_Players = list[tuple[int, "NDArray[np.intp]"]]


class _Tables(NamedTuple):
    """What a layout fixes, per player state ``cell * 4 + orientation`` (S of them) and pot (P)."""

    block62: NDArray[np.float32]  # (S, 29): everything but held objects and pots
    block96: NDArray[np.float32]  # (S, 46): the same
    pot_steps: NDArray[np.int32]  # (S, P), _FAR when the pot cannot be reached
    pot_offset: NDArray[np.float32]  # (S, P, 2)
    pot_order: NDArray[np.intp]  # (S, 2): the two closest pots, P when there is none
    position: NDArray[np.float32]  # (cells, 2): x, y


def steps_to(grid: tuple[str, ...], target: int) -> NDArray[np.int32]:
    """Counts the motion-planner steps from every player state to facing the cell ``target``.

    Returns:
        (cells * 4,) int32 at ``cell * 4 + orientation``; 1,048,576 where there is no way.
    """
    width, cells = len(grid[0]), "".join(grid)

    def neighbour(cell: int, direction: int) -> int:
        x, y = cell % width + _MOVES[direction][0], cell // width + _MOVES[direction][1]
        return y * width + x if 0 <= x < width and 0 <= y < len(grid) else -1

    steps = np.full(len(cells) * 4, _FAR, dtype=np.int32)
    queue: deque[int] = deque()
    for direction in range(4):
        cell = neighbour(target, direction ^ 1)  # the cell from which ``direction`` faces the target
        if cell >= 0 and cells[cell] == " ":
            steps[cell * 4 + direction] = 0
            queue.append(cell * 4 + direction)
    while queue:  # backwards: who reaches this state with one step?
        state = queue.popleft()
        cell, direction = divmod(state, 4)
        behind, ahead = neighbour(cell, direction ^ 1), neighbour(cell, direction)
        sources = [behind] if behind >= 0 and cells[behind] == " " else []
        if ahead < 0 or cells[ahead] != " ":
            sources.append(cell)  # turning on the spot
        for source in sources:
            for before in range(source * 4, source * 4 + 4):
                if steps[before] == _FAR:
                    steps[before] = steps[state] + 1
                    queue.append(before)
    return steps


@functools.lru_cache(maxsize=64)
def _tables(grid: tuple[str, ...], pots: tuple[int, ...]) -> _Tables:
    width, cells = len(grid[0]), "".join(grid)
    states = len(cells) * 4
    cell_of = np.arange(states) // 4
    position = np.stack(np.divmod(np.arange(len(cells)), width)[::-1], axis=1).astype(np.float32)

    def distances(targets: tuple[int, ...]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        steps = np.stack([steps_to(grid, target) for target in targets], axis=1)
        offset = position[list(targets)][None] - position[cell_of][:, None]
        return steps, np.where(steps[..., None] < _FAR, offset, 0).astype(np.float32)

    closest: dict[str, NDArray[np.float32]] = {}
    for name, symbol in (("onion", "O"), ("dish", "D"), ("serving", "S")):
        steps, offset = distances(tuple(cell for cell, terrain in enumerate(cells) if terrain == symbol))
        closest[name] = offset[np.arange(states), steps.argmin(axis=1)]
    blocked = np.array([terrain != " " for terrain in cells]).reshape(len(grid), width)
    walls = np.stack([np.roll(blocked, (-dy, -dx), (0, 1)) for dx, dy in _MOVES], axis=2)

    def block(names: dict[str, int]) -> NDArray[np.float32]:
        table = np.zeros((states, len(names)), dtype=np.float32)
        table[:, :4] = np.eye(4)[np.arange(states) % 4]
        table[:, -4:] = walls.reshape(-1, 4)[cell_of]
        for name, offset in closest.items():
            at = names[f"closest_{name}_dx"]
            table[:, at : at + 2] = offset
        return table

    pot_steps, pot_offset = distances(pots)
    order = np.argsort(pot_steps, axis=1, kind="stable")[:, :2]
    order = np.where(np.take_along_axis(pot_steps, order, axis=1) < _FAR, order, len(pots))
    order = np.pad(order, ((0, 0), (0, 2 - order.shape[1])), constant_values=len(pots))
    return _Tables(block(_AT62), block(_AT96), pot_steps, pot_offset, order, position)


def _start(layout: Layout, state: State, seat: int, width: int) -> tuple[_Tables, NDArray[Any], _Players]:
    """Returns tables, zeros with the relative position filled in, and (player, its states) for each block."""
    tables = _tables(tuple(layout.grid), tuple(int(pot) for pot in layout.pots))
    cells = state.pos.astype(np.intp)
    out = np.zeros((len(cells), width), dtype=np.float32)
    out[:, -4:-2] = tables.position[cells[:, 1 - seat]] - tables.position[cells[:, seat]]
    return tables, out, [(i, cells[:, i] * 4 + state.orient[:, i]) for i in (seat, 1 - seat)]


def features62(layout: Layout, state: State, seat: int) -> NDArray[np.float32]:
    """Encodes N states for one seat as the 2019 code did (``featurize_state`` without counter goals).

    Returns:
        (N, 62) float32 in the order of :data:`FEATURES62`; see the module text for its quirks.
    """
    tables, out, players = _start(layout, state, seat, 62)
    full = state.pot_onions >= ONIONS_PER_SOUP
    ready = full & (state.pot_cook >= COOK_TIME)
    pots = (("empty", state.pot_onions == 0), ("cooking", full & ~ready), ("ready", ready))
    rows = np.arange(len(out))
    for number, (player, states) in enumerate(players):
        block, held = out[:, number * 29 : number * 29 + 29], state.held[:, player]
        block[:] = tables.block62[states]
        for column, name, code in ((4, "onion", _ONION), (5, "soup", _SOUP), (6, "dish", _DISH)):
            block[:, column] = held == code
            at = _AT62[f"closest_{name}_dx"]
            block[held == code, at : at + 2] = 0
        steps = tables.pot_steps[states]
        for name, mask in pots:
            cost = np.where(mask, steps, _FAR)
            pick = cost.argmin(axis=1)
            found = cost[rows, pick] < _FAR
            at = _AT62[f"closest_{name}_pot_dx"]
            block[:, at : at + 2] = tables.pot_offset[states, pick] * found[:, None]
    out[:, -2:] = tables.position[state.pos[:, 0]]
    return out


def features96(layout: Layout, state: State, seat: int) -> NDArray[np.float32]:
    """Encodes N states for one seat as ``featurize_state`` of the later package does (two closest pots).

    Returns:
        (N, 96) float32 in the order of :data:`FEATURES96`.
    """
    tables, out, players = _start(layout, state, seat, 96)
    onions = np.pad(state.pot_onions, ((0, 0), (0, 1)))  # one more column: the pot that does not exist
    cook = np.pad(state.pot_cook, ((0, 0), (0, 1)))
    offsets = np.pad(tables.pot_offset, ((0, 0), (0, 1), (0, 0)))
    rows = np.arange(len(out))
    for number, (player, states) in enumerate(players):
        block, held = out[:, number * 46 : number * 46 + 46], state.held[:, player]
        block[:] = tables.block96[states]
        for column, name, code in ((4, "onion", _ONION), (5, "soup", _SOUP), (6, "dish", _DISH)):
            block[:, column] = held == code
            at = _AT96[f"closest_{name}_dx"]
            block[held == code, at : at + 2] = 0
        block[:, _AT96["closest_soup_onions"]] = ONIONS_PER_SOUP * (held == _SOUP)
        for nth in (0, 1):
            pot = tables.pot_order[states, nth]
            exists, count, timer = pot < offsets.shape[1] - 1, onions[rows, pot], cook[rows, pot]
            full = count >= ONIONS_PER_SOUP
            ready = full & (timer >= COOK_TIME)
            remaining = np.where(full, COOK_TIME - np.minimum(timer, COOK_TIME), 0)
            flags = (exists, exists & (count == 0), full, full & ~ready, ready, count, 0 * count, remaining)
            at = _AT96[f"pot{nth}_exists"]
            block[:, at : at + 8] = np.stack(flags, axis=1)
            block[:, at + 8 : at + 10] = offsets[states, pot]
    out[:, -2:] = tables.position[state.pos[:, seat]]
    return out
