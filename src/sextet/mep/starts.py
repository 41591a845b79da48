"""Games that start in the middle: a state of the kitchen drawn at random instead of the usual start.

Self-play meets few states, so a new partner takes it where it has never been. Starting games anywhere (state
augmentation) widens what a member sees without any population; a comparison needs this baseline, since failures with
new partners in Overcooked are largely ones of state coverage (OvercookedV2, arXiv 2503.17821). This form of it is ours.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sextet.mep.features import COOK_TIME
from sextet.mep.kernels import Array
from sextet.mep.overcooked import Layout, Overcooked

HELD = (0.55, 0.2, 0.15, 0.1)  # chance that a player holds nothing, an onion, a dish, a soup
ON_COUNTER = (0.95, 0.025, 0.0175, 0.0075)  # the same for what lies on a counter


def reachable(layout: Layout, seat: int) -> Array:
    """Floor cells that a player can walk to from its start, (K,) int16."""
    found, frontier = {int(layout.starts[seat])}, [int(layout.starts[seat])]
    while frontier:
        cell = frontier.pop()
        for near in (cell - layout.width, cell + layout.width, cell + 1, cell - 1):
            if layout.terrain[near] == 0 and near not in found:
                found.add(near)
                frontier.append(near)
    return np.array(sorted(found), np.int16)


def scatter(share: float, rng: np.random.Generator) -> Callable[[Overcooked], None]:
    """Returns a function that puts about `share` of the games, just reset, into random states at time 0.

    Players stand anywhere they can walk to, never on one cell, and face any way; hands, counters and pots are filled at
    random. In a kitchen where both can only stand on one cell nothing changes.
    """

    def begin(env: Overcooked) -> None:
        state, layout = env.state, env.layout
        places = [reachable(layout, seat) for seat in (0, 1)]
        pos = np.stack([rng.choice(cells, env.num_envs) for cells in places], axis=1)
        rows = np.flatnonzero((rng.random(env.num_envs) < share) & (pos[:, 0] != pos[:, 1]))
        state.pos[rows] = pos[rows]
        state.orient[rows] = rng.integers(4, size=(len(rows), 2))
        state.held[rows] = rng.choice(4, size=(len(rows), 2), p=HELD)
        counters = np.flatnonzero(layout.terrain == 1)
        state.counter[np.ix_(rows, counters)] = rng.choice(4, size=(len(rows), len(counters)), p=ON_COUNTER)
        onions = rng.integers(4, size=(len(rows), len(layout.pots)))
        state.pot_onions[rows] = onions
        state.pot_cook[rows] = np.where(onions == 3, rng.integers(COOK_TIME + 1, size=onions.shape), 0)

    return begin
