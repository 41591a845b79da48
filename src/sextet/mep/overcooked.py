"""Overcooked with the 2019 dynamics ("On the Utility of Learning about Humans", Carroll et al. 2019), in batches.

Players are numbered by their start cell: digit 1 of the grid is player 0. Directions are 0 N, 1 S, 2 E, 3 W; the codes
of terrain, objects and actions are in `kernels`. Nothing here is random.
"""

from __future__ import annotations

import importlib.util
from collections import deque
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sextet.core.errors import DataError, UsageError, missing_extra, unknown
from sextet.core.files import read_text
from sextet.mep import kernels
from sextet.mep.kernels import Array

GRIDS = {
    "cramped_room": "XXPXX\nO  2O\nX1  X\nXDXSX",
    "asymmetric_advantages": "XXXXXXXXX\nO XSXOX S\nX   P 1 X\nX2  P   X\nXXXDXDXXX",
    "coordination_ring": "XXXPX\nX 1 P\nD2X X\nO   X\nXOSXX",
    "forced_coordination": "XXXPX\nO X1P\nO2X X\nD X X\nXXXSX",
    "counter_circuit": "XXXPPXXX\nX  2   X\nD XXXX S\nX  1   X\nXXXOOXXX",
}
LAYOUTS = tuple(GRIDS)
# Names of the same grids elsewhere: the 2019 code, newer packages.
ALIASES = {
    "simple": "cramped_room",
    "unident_s": "asymmetric_advantages",
    "random0": "forced_coordination",
    "random1": "coordination_ring",
    "random3": "counter_circuit",
    "counter_circuit_o_1order": "counter_circuit",
    "asymm_advantages": "asymmetric_advantages",
    "coord_ring": "coordination_ring",
}  # fmt: skip
TERRAIN = " XOPDS"
MODES = {"planes20": kernels.FIXED, "planes20_legacy": kernels.LEGACY, "planes26": kernels.PLANES26}
ENCODINGS = (*MODES, "features62", "features96")
MAX_CELLS = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """A kitchen: `grid` rows without the digits, `terrain` (H*W,) codes, `pots` (P,) and `starts` (2,) cells."""

    name: str
    width: int
    height: int
    grid: tuple[str, ...]
    terrain: Array
    pots: Array
    starts: Array

    @staticmethod
    def load(name_or_path: str | Path) -> Layout:
        """Returns one of `LAYOUTS` (the 2019 grids), or reads a text file given with its suffix or folder.

        `counter_circuit` is the 8x5 onion grid of 2019; overcooked-ai uses the name for a 9x5 tomato kitchen and calls
        this one `counter_circuit_o_1order`. Raises UsageError for an unknown name, DataError for a bad file.
        """
        name, path = str(name_or_path), Path(name_or_path)
        if name in GRIDS:
            return _built_in(name)
        if path.suffix or path.name != name or path.is_file():
            return Layout.parse(read_text(path, max_bytes=1 << 20), name=path.stem, source=str(path))
        if name in ALIASES:
            raise UsageError(f'unknown layout "{name}": here this kitchen is called "{ALIASES[name]}"')
        raise UsageError(
            unknown("layout", name, LAYOUTS) + ', or the path of a file such as "kitchen.layout"'
        )

    @staticmethod
    def parse(text: str, *, name: str, source: str = "") -> Layout:
        """Checks a grid; a byte-order mark, any newlines, blank lines around it and trailing spaces are accepted.

        Raises DataError "source:line:column: what is wrong".
        """
        lines = text.removeprefix("\ufeff").splitlines()
        rows = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]

        def bad(number: int, column: int, what: str) -> DataError:
            return DataError(f"{source or name}:{number}:{column + 1}: {what}")

        if not rows:
            raise bad(1, 0, "the layout is empty")
        width, height = len(rows[0][1].rstrip()), len(rows)
        starts: dict[str, int] = {}
        for y, (number, line) in enumerate(rows):
            row = line.rstrip()
            if number != rows[0][0] + y:
                raise bad(number - 1, 0, "blank line inside the grid")
            if len(row) > width or len(line) < width:
                raise bad(number, len(row), f"ragged grid: {len(row)} columns, the first row has {width}")
            for x, mark in enumerate(row.ljust(width)):
                border = x in (0, width - 1) or y in (0, height - 1)
                if mark not in TERRAIN + "12":
                    raise bad(number, x, f'unknown character "{mark}"; allowed: space X O P D S 1 2')
                if mark in "12" and border:
                    raise bad(
                        number, x, f"player {mark} stands on the border; start cells are floor inside it"
                    )
                if mark == " " and border:
                    raise bad(number, x, "open border: the outer cells must be one of X O P D S")
                if mark in starts:
                    raise bad(number, x, f'second "{mark}"; each player starts once')
                if mark in "12":
                    starts[mark] = y * width + x
        flat = "".join(line.rstrip() for _, line in rows)
        for mark, what in zip(
            "OPDS12", "onions, pot, dishes, serving, player 1, player 2".split(", "), strict=True
        ):
            if mark not in flat:
                raise bad(rows[0][0], 0, f'no "{mark}" ({what}) in the grid')
        if len(flat) > MAX_CELLS:
            raise bad(rows[0][0], 0, f"{width} x {height} cells; at most {MAX_CELLS} are allowed")
        flat = flat.replace("1", " ").replace("2", " ")
        reached, queue = set(starts.values()), deque(starts.values())
        while queue:
            cell = queue.popleft()
            for near in (cell - width, cell + width, cell + 1, cell - 1):
                if near not in reached:
                    reached.add(near)
                    queue.extend([near] if flat[near] == " " else [])
        pots = np.array([cell for cell, mark in enumerate(flat) if mark == "P"], np.int16)
        if not reached.intersection(pots.tolist()):
            y, x = divmod(int(pots[0]), width)
            raise bad(rows[y][0], x, "no pot can be reached by any player")
        terrain = np.array([TERRAIN.index(mark) for mark in flat], np.uint8)
        cells = np.array([starts["1"], starts["2"]], np.int16)
        for array in (terrain, pots, cells):
            array.setflags(write=False)
        grid = tuple(flat[y * width : (y + 1) * width] for y in range(height))
        return Layout(
            name=name, width=width, height=height, grid=grid, terrain=terrain, pots=pots, starts=cells
        )


@cache
def _built_in(name: str) -> Layout:
    return Layout.parse(GRIDS[name], name=name)


@dataclass(kw_only=True)
class State:
    """N games at one moment; plain arrays that may be edited in place."""

    pos: Array
    """(N, 2) int16 cell of each player."""
    orient: Array
    """(N, 2) uint8 direction each player faces."""
    held: Array
    """(N, 2) uint8 object in hand."""
    counter: Array
    """(N, H*W) uint8 object lying on each counter."""
    pot_onions: Array
    """(N, P) uint8, 0 to 3."""
    pot_cook: Array
    """(N, P) uint8 steps cooked, 0 to 20 (ready)."""
    time: Array
    """(N,) int32 steps since the start."""

    def arrays(self) -> kernels.Arrays:
        """Returns the arrays in the order above."""
        return (self.pos, self.orient, self.held, self.counter, self.pot_onions, self.pot_cook, self.time)


def observation_shape(layout: Layout, encoding: str) -> tuple[int, ...]:
    """Returns the shape of one player's observation: (C, H, W) for planes, (F,) for features. Raises UsageError."""
    if encoding not in ENCODINGS:
        raise UsageError(unknown("encoding", encoding, ENCODINGS))
    if encoding in MODES:
        return (kernels.NUM_PLANES[MODES[encoding]], layout.height, layout.width)
    return (int(encoding.removeprefix("features")),)


class Overcooked:
    """N games on one layout, played in lockstep; `done` comes at the horizon and the caller resets."""

    def __init__(
        self, layout: Layout | str | Path, num_envs: int, *, horizon: int = 400, backend: str = "auto"
    ) -> None:
        """Starts the games. `backend` is "numba", "numpy" or "auto" (numba if installed). Raises UsageError."""
        for name, value in (("num_envs", num_envs), ("horizon", horizon)):
            if not isinstance(value, int | np.integer) or value <= 0:
                raise UsageError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if backend not in ("auto", "numba", "numpy"):
            raise UsageError(unknown("backend", backend, ("auto", "numba", "numpy")))
        self.layout = layout if isinstance(layout, Layout) else Layout.load(layout)
        self.num_envs, self.horizon = int(num_envs), int(horizon)
        installed = importlib.util.find_spec("numba") is not None
        if backend == "numba" and not installed:
            raise missing_extra("numba", "coop", 'backend="numba"')
        use_numba = backend != "numpy" and installed
        self._kernels = kernels.numba_kernels() if use_numba else kernels.NUMPY_KERNELS
        n, cells, pots, width = self.num_envs, len(self.layout.terrain), self.layout.pots, self.layout.width
        pot_at = np.zeros(cells, np.int16)
        pot_at[pots] = np.arange(len(pots))
        self._world = (self.layout.terrain, np.array([-width, width, 1, -1], np.int16), pot_at, pots)
        byte = np.uint8
        self.state = State(
            pos=np.empty((n, 2), np.int16),
            orient=np.empty((n, 2), byte),
            held=np.empty((n, 2), byte),
            counter=np.empty((n, cells), byte),
            pot_onions=np.empty((n, len(pots)), byte),
            pot_cook=np.empty((n, len(pots)), byte),
            time=np.empty(n, np.int32),
        )  # fmt: skip
        self._canvases: dict[str, tuple[kernels.Arrays, Array]] = {}
        self.reset()

    @property
    def backend(self) -> str:
        """Name of the kernels in use, "numba" or "numpy"."""
        return self._kernels.name

    def reset(self, mask: Array | None = None) -> None:
        """Starts all games anew, or those where `mask` (N,) bool is set. Raises UsageError for another mask."""
        if mask is not None and (np.shape(mask) != (self.num_envs,) or np.asarray(mask).dtype != bool):
            raise UsageError(f"mask must be a bool array of shape ({self.num_envs},)")
        rows = slice(None) if mask is None else mask
        for array in self.state.arrays():
            array[rows] = 0
        self.state.pos[rows] = self.layout.starts

    def step(self, actions: Any) -> tuple[Array, Array, Array]:
        """Advances every game by the joint `actions`, an integer array (N, 2) with values 0 to 5.

        Returns sparse (N,) float32 team reward (20 per soup), shaped (N, 2) float32 per player (the 2019 team value is
        the sum), done (N,) bool (time limit reached). Raises UsageError and changes nothing for bad actions.
        """
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs, 2):
            raise UsageError(f"actions have shape {actions.shape}; expected ({self.num_envs}, 2)")
        if actions.dtype.kind not in "iu":
            raise UsageError(f"actions have dtype {actions.dtype}; expected integers 0 to 5")
        actions = np.ascontiguousarray(actions, np.int64)
        sparse, shaped = np.empty(self.num_envs, np.float32), np.empty((self.num_envs, 2), np.float32)
        wrong = self._kernels.step(self._world, self.state.arrays(), actions, sparse, shaped)
        if wrong >= 0:
            raise UsageError(f"actions[{wrong}] is {actions[wrong].tolist()}; allowed are 0 to 5")
        return sparse, shaped, self.state.time >= self.horizon

    def observe(
        self, encoding: str, seat: int | None = None, out: Array | None = None, *, copy: bool = True
    ) -> Array:
        """Returns what the players see, each from its own point of view.

        Args:
            encoding: "planes20" (2019 order, corrected), "planes20_legacy" (2019 exactly: loose objects vanish while
                a player carries one of their kind), "planes26" (later packages), "features62" or "features96".
            seat: One player, or None for both.
            out: Array to fill instead of a new one.
            copy: False gives a read-only view of planes, valid until the next call with this encoding.

        Returns:
            Planes uint8 (N, 2, C, H, W), features float32 (N, 2, F); without the axis of size 2 if `seat` is given.

        Raises:
            UsageError: Unknown encoding or seat, or `out` of another shape or dtype.
        """
        shape = observation_shape(self.layout, encoding)
        if seat not in (None, 0, 1):
            raise UsageError(f"seat is {seat!r}; it must be 0, 1 or None for both")
        if encoding in MODES:
            drawn, canvas = self._canvases.get(encoding) or self._canvas(encoding)
            mode = MODES[encoding]
            self._kernels.planes(
                mode,
                kernels.OBJECT_PLANES[mode],
                self._world,
                self.state.arrays(),
                self.horizon,
                drawn,
                canvas,
            )
            result = canvas.reshape(self.num_envs, 2, *shape)
            result = result if seat is None else result[:, seat]
        else:
            from sextet.mep import features

            encode = getattr(features, encoding)
            seats = [encode(self.layout, self.state, s) for s in ((0, 1) if seat is None else (seat,))]
            result = np.stack(seats, 1) if seat is None else seats[0]
        if out is not None:
            if out.shape != result.shape or out.dtype != result.dtype:
                raise UsageError(f"out is {out.dtype}{out.shape}; expected {result.dtype}{result.shape}")
            np.copyto(out, result)
            return out
        if copy:
            return result.copy() if encoding in MODES else result
        result.setflags(write=False)
        return result

    def _canvas(self, encoding: str) -> tuple[kernels.Arrays, Array]:
        """Makes the buffer of an encoding that lasts between calls: terrain drawn once, and notes of what is drawn."""
        n, cells, pots = self.num_envs, len(self.layout.terrain), len(self.layout.pots)
        canvas = np.zeros((n, 2, kernels.NUM_PLANES[MODES[encoding]], cells), np.uint8)
        for code, plane in enumerate(kernels.TERRAIN_PLANES[MODES[encoding]], 1):
            canvas[:, :, plane] = self.layout.terrain == code
        drawn = (
            np.full((n, 2, 3), -1, np.int16),
            np.zeros((n, cells), np.uint8),
            np.zeros((n, 2, pots), np.uint8),
            np.zeros(n, np.uint8),
        )
        return self._canvases.setdefault(encoding, (drawn, canvas))
