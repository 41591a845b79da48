"""Inner loops of Overcooked: one step of the 2019 dynamics, and the plane encodings.

Each routine exists twice with one signature, a loop for numba and a version on whole numpy arrays for when
numba is missing; both agree exactly. Shapes: N games, H*W cells (cell = y * W + x), P pots. Shared arguments:
`world` = (terrain (H*W,), delta (4,) cell offset of each direction, pot_at (H*W,) number of the pot on a cell,
pots (P,) cells); `state` = the arrays of `overcooked.State`. Codes: terrain 0 floor, 1 counter, 2 onions, 3 pot,
4 dishes, 5 serving; objects 0 none, 1 onion, 2 dish, 3 soup; actions 0 to 3 move N S E W, 4 stay, 5 interact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

ONIONS_PER_SOUP, COOK_TIME, DELIVERY = 3, 20, 20
ONION_IN_POT, DISH_PICKED_UP, SOUP_PICKED_UP = 3, 3, 5  # shaped rewards of the 2019 code
URGENT = 40  # planes26 raises its last plane when fewer steps than this remain
FIXED, LEGACY, PLANES26 = 0, 1, 2  # modes of the plane encodings
NUM_PLANES = (20, 20, 26)
UNITS = 64  # of each hidden layer of a perceptron
TERRAIN_PLANES = ((11, 12, 10, 13, 14), (11, 12, 10, 13, 14), (11, 12, 10, 14, 15))  # of terrain codes 1..5
# How an object outside a pot is drawn, by its code: (plane, value, second plane that gets 1 before).
OBJECT_PLANES = np.array(
    [[[17, 0, 17], [19, 1, 19], [18, 1, 18], [17, 1, 17]]] * 2
    + [[[18, 0, 18], [23, 1, 23], [22, 1, 22], [18, 3, 21]]]
)  # fmt: skip
Array = np.ndarray[Any, Any]
Arrays = tuple[Array, ...]


class Kernels(NamedTuple):
    """The routines of one backend."""

    name: str
    step: Callable[[Arrays, Arrays, Array, Array, Array], int]
    planes: Callable[[int, Arrays, Arrays, int, Arrays, Array], None]
    select: Callable[[Array, Array, Array, Array, Array], None]
    perceptrons: Callable[[Array, tuple[Arrays, ...], Array], None]


@cache
def numba_kernels() -> Kernels:
    """Makes the loops compile at their first call; the machine code is kept on disk where possible.

    Raises ImportError without numba.
    """
    import numba

    def jit(loop: Callable[..., Any]) -> Callable[..., Any]:
        try:
            compiled = numba.njit(cache=True, nogil=True)(loop)
        except RuntimeError:  # numba found no writable cache folder
            compiled = numba.njit(nogil=True)(loop)

        def call(*args: Any) -> Any:
            try:
                return compiled(*args)
            except OSError:  # a full disk: compiled, only not kept
                return compiled(*args)

        return call

    return Kernels("numba", jit(step_loop), jit(planes_loop), jit(select_loop), jit(perceptrons_loop))


def best_kernels() -> Kernels:
    """Those of numba, or of numpy where numba is missing."""
    try:
        return numba_kernels()
    except ImportError:
        return NUMPY_KERNELS


def step_loop(world: Arrays, state: Arrays, actions: Array, sparse: Array, shaped: Array) -> int:
    """Advances all games in place; writes `sparse` (N,) and `shaped` (N, 2) float32.

    `actions` is (N, 2) int64. Returns -1, or the first game with an action outside 0..5; nothing changes then.
    """
    terrain, delta, pot_at, pots = world
    pos, orient, held, counter, pot_onions, pot_cook, time = state
    for i in range(len(actions)):
        if not (0 <= actions[i, 0] <= 5 and 0 <= actions[i, 1] <= 5):
            return i
    for i in range(len(actions)):
        sparse[i], shaped[i, 0], shaped[i, 1] = 0, 0, 0
        started = 0  # pots in use before anybody acts: the dish reward looks at these
        for j in range(len(pots)):
            started += pot_onions[i, j] > 0
        for k in range(2):
            if actions[i, k] != 5:
                continue
            cell = pos[i, k] + delta[orient[i, k]]
            kind, hand = terrain[cell], held[i, k]
            if kind == 1 and (hand == 0) != (counter[i, cell] == 0):
                held[i, k], counter[i, cell] = counter[i, cell], hand
            elif kind == 2 and hand == 0:
                held[i, k] = 1
            elif kind == 3:
                j = pot_at[cell]
                if hand == 1 and pot_onions[i, j] < ONIONS_PER_SOUP:
                    pot_onions[i, j], pot_cook[i, j] = pot_onions[i, j] + 1, 0
                    held[i, k], shaped[i, k] = 0, ONION_IN_POT
                elif hand == 2 and pot_onions[i, j] == ONIONS_PER_SOUP and pot_cook[i, j] >= COOK_TIME:
                    pot_onions[i, j], pot_cook[i, j] = 0, 0
                    held[i, k], shaped[i, k] = 3, SOUP_PICKED_UP
            elif kind == 4 and hand == 0:
                held[i, k] = 2
                lying = False
                for c in range(len(terrain)):
                    lying |= counter[i, c] == 2
                if not lying and started > (held[i, 1 - k] == 2):
                    shaped[i, k] = DISH_PICKED_UP
            elif kind == 5 and hand == 3:
                held[i, k] = 0
                sparse[i] += DELIVERY
        old0, old1 = pos[i, 0], pos[i, 1]
        for k in range(2):
            if actions[i, k] < 4:
                orient[i, k] = actions[i, k]
                if terrain[pos[i, k] + delta[orient[i, k]]] == 0:
                    pos[i, k] += delta[orient[i, k]]
        if pos[i, 0] == pos[i, 1] or (pos[i, 0] == old1 and pos[i, 1] == old0):
            pos[i, 0], pos[i, 1] = old0, old1
        for j in range(len(pots)):
            if pot_onions[i, j] == ONIONS_PER_SOUP and pot_cook[i, j] < COOK_TIME:
                pot_cook[i, j] += 1
        time[i] += 1
    return -1


def step_numpy(world: Arrays, state: Arrays, actions: Array, sparse: Array, shaped: Array) -> int:
    """`step_loop` on whole arrays."""
    terrain, delta, pot_at, _ = world
    pos, orient, held, counter, pot_onions, pot_cook, time = state
    wrong = ((actions < 0) | (actions > 5)).any(1)
    if wrong.any():
        return int(wrong.argmax())
    sparse[:], shaped[:] = 0, 0
    started = (pot_onions > 0).sum(1)
    for k in range(2):
        row = np.flatnonzero(actions[:, k] == 5)
        cell = pos[row, k] + delta[orient[row, k]]
        kind, hand, lying, pot = terrain[cell], held[row, k], counter[row, cell], pot_at[cell]
        onions, cook = pot_onions[row, pot], pot_cook[row, pot]  # only meaningful where kind == 3
        swap = (kind == 1) & ((hand == 0) != (lying == 0))
        add = (kind == 3) & (hand == 1) & (onions < ONIONS_PER_SOUP)
        take = (kind == 3) & (hand == 2) & (onions == ONIONS_PER_SOUP) & (cook >= COOK_TIME)
        dish, serve = (kind == 4) & (hand == 0), (kind == 5) & (hand == 3)
        useful = dish & (started[row] > (held[row, 1 - k] == 2)) & ~(counter[row] == 2).any(1)
        cases = [swap, (kind == 2) & (hand == 0), add, take, dish, serve]
        held[row, k] = np.select(cases, [lying, *np.array([1, 0, 3, 2, 0], np.uint8)], hand)
        shaped[row, k] = np.select([add, take, useful], [ONION_IN_POT, SOUP_PICKED_UP, DISH_PICKED_UP], 0)
        sparse[row] += DELIVERY * serve
        counter[row[swap], cell[swap]] = hand[swap]
        pot_onions[row[add], pot[add]] += 1
        pot_onions[row[take], pot[take]] = 0
        pot_cook[row[add | take], pot[add | take]] = 0
    moves = actions < 4
    orient[moves] = actions[moves]
    target = pos + delta[actions % 4] * moves
    target = np.where(terrain[target] == 0, target, pos)
    free = (target[:, 0] != target[:, 1]) & (target != pos[:, ::-1]).any(1)
    pos[free] = target[free]
    pot_cook += (pot_onions == ONIONS_PER_SOUP) & (pot_cook < COOK_TIME)
    time += 1
    return -1


def planes_loop(mode: int, world: Arrays, state: Arrays, horizon: int, drawn: Arrays, out: Array) -> None:
    """Brings `out` (N, 2 seats, C, H*W) uint8 from what was drawn last time to the present state.

    Only cells that differ are written. `drawn` = (players (N, 2, 3) int16: cell or -1, direction, object held;
    cells (N, H*W), pots (N, 2, P), urgent (N,) uint8) is compared with the state itself, so outside edits of it
    are followed too.
    """
    table, pots = OBJECT_PLANES[mode], world[3]
    pos, orient, held, counter, pot_onions, pot_cook, time = state
    players, cells, drawn_pots, drawn_urgent = drawn
    for i in range(len(pos)):
        for k in range(2):
            cell, facing, code = players[i, k, 0], players[i, k, 1], players[i, k, 2]
            if cell >= 0 and (cell != pos[i, k] or facing != orient[i, k] or code != held[i, k]):
                players[i, k, 0] = -1
                for seat in range(2):
                    plane = k ^ seat
                    out[i, seat, plane, cell] = 0
                    out[i, seat, 2 + 4 * plane + facing, cell] = 0
                    if code > 0:
                        out[i, seat, table[code, 0], cell] = 0
                        out[i, seat, table[code, 2], cell] = 0
        for k in range(2):
            if players[i, k, 0] < 0:
                cell, facing, code = pos[i, k], orient[i, k], held[i, k]
                players[i, k, 0], players[i, k, 1], players[i, k, 2] = cell, facing, code
                for seat in range(2):
                    plane = k ^ seat
                    out[i, seat, plane, cell] = 1
                    out[i, seat, 2 + 4 * plane + facing, cell] = 1
                    if code > 0:
                        out[i, seat, table[code, 2], cell] = 1
                        out[i, seat, table[code, 0], cell] = table[code, 1]
        # The 2019 encoder forgets objects lying about while somebody carries one of their kind.
        hide0 = held[i, 0] if mode == LEGACY else 0
        hide1 = held[i, 1] if mode == LEGACY else 0
        differs = 0
        for c in range(counter.shape[1]):
            shown = counter[i, c]
            if shown in (hide0, hide1):
                shown = 0
            differs |= shown ^ cells[i, c]
        for c in range(counter.shape[1] if differs else 0):
            code, before = counter[i, c], cells[i, c]
            if code in (hide0, hide1):
                code = 0
            if code != before:
                cells[i, c] = code
                out[i, :, table[before, 0], c] = 0
                out[i, :, table[before, 2], c] = 0
                out[i, :, table[code, 2], c] = 1
                out[i, :, table[code, 0], c] = table[code, 1]
        for j in range(len(pots)):
            onions, cook = pot_onions[i, j], pot_cook[i, j]
            if hide0 == 3 or hide1 == 3:
                onions, cook = 0, 0
            if onions != drawn_pots[i, 0, j] or cook != drawn_pots[i, 1, j]:
                drawn_pots[i, 0, j], drawn_pots[i, 1, j] = onions, cook
                if mode != PLANES26:
                    out[i, :, 15, pots[j]] = onions
                    out[i, :, 16, pots[j]] = cook
                else:
                    out[i, :, 16, pots[j]] = onions if cook == 0 else 0
                    out[i, :, 18, pots[j]] = onions if cook > 0 else 0
                    out[i, :, 20, pots[j]] = COOK_TIME - cook if cook > 0 else 0
                    out[i, :, 21, pots[j]] = cook >= COOK_TIME
        urgent = mode == PLANES26 and horizon - time[i] < URGENT
        if urgent != drawn_urgent[i]:
            drawn_urgent[i] = urgent
            out[i, :, 25] = urgent


def planes_numpy(mode: int, world: Arrays, state: Arrays, horizon: int, drawn: Arrays, out: Array) -> None:
    """`planes_loop` on whole arrays; draws every moving plane afresh and does not need `drawn`."""
    table, pots, rows = OBJECT_PLANES[mode], world[3], np.arange(len(out))
    pos, orient, held, counter, onions, cook, time = state
    objects = counter.copy()
    if mode == LEGACY:
        objects *= (counter != held[:, :1]) & (counter != held[:, 1:])
        visible = ~(held == 3).any(1, keepdims=True)
        onions, cook = onions * visible, cook * visible
    out[:, :, :10] = 0
    for k in range(2):
        objects[rows, pos[:, k]] = held[:, k]
        for seat in range(2):
            out[rows, seat, k ^ seat, pos[:, k]] = 1
            out[rows, seat, 2 + 4 * (k ^ seat) + orient[:, k], pos[:, k]] = 1
    for code in (1, 2, 3):
        out[:, :, table[code, 2]] = (objects == code)[:, None]
        out[:, :, table[code, 0]] = (table[code, 1] * (objects == code))[:, None]
    if mode != PLANES26:
        out[:, :, 15, pots], out[:, :, 16, pots] = onions[:, None], cook[:, None]
    else:
        cooking = cook > 0
        out[:, :, 16, pots], out[:, :, 18, pots] = (onions * ~cooking)[:, None], (onions * cooking)[:, None]
        out[:, :, 20, pots], out[:, :, 21, pots] = (
            ((COOK_TIME - cook) * cooking)[:, None],
            (cook >= COOK_TIME)[:, None],
        )
        out[:, :, 25] = (horizon - time < URGENT)[:, None, None]


def select_loop(canvas: Array, rows: Array, columns: Array, scale: Array, out: Array) -> None:
    """Writes chosen rows and columns of `canvas` uint8, scaled column by column, to `out` (rows, columns) float32."""
    for i in range(len(rows)):
        seen, to = canvas[rows[i]], out[i]
        for j in range(len(columns)):
            to[j] = scale[j] * seen[columns[j]]


def select_numpy(canvas: Array, rows: Array, columns: Array, scale: Array, out: Array) -> None:
    """`select_loop` on whole arrays."""
    np.multiply(canvas[rows[:, None], columns], scale, out=out)


def perceptrons_loop(inputs: Array, layers: tuple[Arrays, ...], out: Array) -> None:
    """Runs another perceptron of three layers on every row: `inputs` (B, I) to `out` (B, O) float32.

    `layers` has weights (B, inputs, outputs) and biases (B, outputs) of each. What is multiplied by zero is not read:
    most inputs and half of the hidden units are zero, and reading weights is what takes the time.
    """
    (weight0, bias0), (weight1, bias1), (weight2, bias2) = layers
    first, second = np.empty(UNITS, np.float32), np.empty(UNITS, np.float32)
    for i in range(len(inputs)):
        for k in range(UNITS):  # a constant, else it takes five times as long
            first[k], second[k] = bias0[i, k], bias1[i, k]
        for k in range(out.shape[1]):
            out[i, k] = bias2[i, k]
        for j in range(inputs.shape[1]):
            x = inputs[i, j]
            if x != 0:
                for k in range(UNITS):
                    first[k] += x * weight0[i, j, k]
        for j in range(UNITS):
            x = first[j]
            if not x <= 0:  # passes on what is not a number
                for k in range(UNITS):
                    second[k] += x * weight1[i, j, k]
        for j in range(UNITS):
            x = second[j]
            if not x <= 0:
                for k in range(out.shape[1]):
                    out[i, k] += x * weight2[i, j, k]


def perceptrons_numpy(inputs: Array, layers: tuple[Arrays, ...], out: Array) -> None:
    """`perceptrons_loop` on whole arrays."""
    hidden = inputs
    for weight, bias in layers[:-1]:
        hidden = np.maximum((hidden[:, None] @ weight)[:, 0] + bias, 0)
    out[:] = (hidden[:, None] @ layers[-1][0])[:, 0] + layers[-1][1]


NUMPY_KERNELS = Kernels("numpy", step_numpy, planes_numpy, select_numpy, perceptrons_numpy)
