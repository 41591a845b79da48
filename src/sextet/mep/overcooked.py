"""Overcooked as in the 2019 code (Carroll et al., "On the Utility of Learning about Humans"), many games at a time.

Nothing is random. Digit 1 of a grid is the start of player 0. Directions are 0 N, 1 S, 2 E, 3 W; the codes of
terrain, objects and actions are given in `kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sextet.core.errors import DataError, UsageError, missing_extra, unknown
from sextet.core.files import read_text
from sextet.mep import kernels
from sextet.mep.kernels import Array, Arrays

GRIDS = {
    "cramped_room": "XXPXX\nO  2O\nX1  X\nXDXSX",
    "asymmetric_advantages": "XXXXXXXXX\nO XSXOX S\nX   P 1 X\nX2  P   X\nXXXDXDXXX",
    "coordination_ring": "XXXPX\nX 1 P\nD2X X\nO   X\nXOSXX",
    "forced_coordination": "XXXPX\nO X1P\nO2X X\nD X X\nXXXSX",
    "counter_circuit": "XXXPPXXX\nX  2   X\nD XXXX S\nX  1   X\nXXXOOXXX",
}
LAYOUTS = tuple(GRIDS)
ALIASES = {  # names of the same grids in the 2019 code and in later packages
    "simple": "cramped_room", "unident_s": "asymmetric_advantages", "random1": "coordination_ring",
    "random0": "forced_coordination", "random3": "counter_circuit",
    "counter_circuit_o_1order": "counter_circuit",
}  # fmt: skip
TERRAIN, MAX_CELLS = " XOPDS", 4096
MODES = {"planes20": kernels.FIXED, "planes20_legacy": kernels.LEGACY, "planes26": kernels.PLANES26}
ENCODINGS = (*MODES, "features62", "features96")


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """A kitchen; a cell is y * width + x."""

    name: str
    width: int
    height: int
    grid: tuple[str, ...]  # rows, the digits replaced by spaces
    terrain: Array  # (H*W,) uint8 codes
    pots: Array  # (P,) int16 cells
    starts: Array  # (2,) int16 cells

    @staticmethod
    def load(name_or_path: str | Path) -> Layout:
        """Returns one of `LAYOUTS`, or reads a text file named with a suffix or a folder.

        `counter_circuit` is the 8x5 onion grid of 2019; later packages give this name to a 9x5 tomato grid and
        call this one `counter_circuit_o_1order`. Raises UsageError for an unknown name, DataError for a bad file.
        """
        name, path = str(name_or_path), Path(name_or_path)
        if name in GRIDS:
            return _built_in(name)
        if path.suffix or path.name != name or path.is_file():
            return Layout.parse(read_text(path, max_bytes=1 << 20), name=path.stem, source=name)
        if name in ALIASES:
            raise UsageError(f'unknown layout "{name}": this kitchen is called "{ALIASES[name]}" here')
        raise UsageError(unknown("layout", name, LAYOUTS) + ', or a file such as "kitchen.layout"')

    @staticmethod
    def parse(text: str, *, name: str, source: str = "") -> Layout:
        """Checks a grid; any newlines, a byte-order mark, trailing spaces and outer blank lines are accepted.

        Raises DataError "source:line:column: what is wrong", counted from 1.
        """
        lines = text.removeprefix("\ufeff").rstrip().splitlines()
        first = next((number for number, line in enumerate(lines) if line.strip()), 0)
        rows, starts = lines[first:], dict[str, int]()

        def wrong(y: int, x: int, what: str) -> DataError:
            return DataError(f"{source or name}:{first + y + 1}:{x + 1}: {what}")

        if not rows:
            raise wrong(0, 0, "the layout is empty")
        width, height = len(rows[0].rstrip()), len(rows)
        for y, line in enumerate(rows):
            row = line.rstrip()
            if len(row) > width or len(line) < width:
                raise wrong(y, len(row), f"ragged grid: {len(row)} columns, the first row has {width}")
            for x, mark in enumerate(row.ljust(width)):
                border = x in (0, width - 1) or y in (0, height - 1)
                if mark not in TERRAIN + "12":
                    raise wrong(y, x, f'unknown character "{mark}"; allowed: space X O P D S 1 2')
                if mark == " " and border:
                    raise wrong(y, x, "open border; the outer cells must be X O P D or S")
                if mark in "12" and border:
                    raise wrong(y, x, f"player {mark} on the border; start cells are floor inside")
                if mark in starts:
                    raise wrong(y, x, f'second "{mark}"; each player starts once')
                if mark in "12":
                    starts[mark] = y * width + x
        flat = "".join(line.rstrip() for line in rows)
        for mark, what in zip("OPDS12", ("onions", "pot", "dishes", "serving", *["player"] * 2), strict=True):
            if mark not in flat:
                raise wrong(0, 0, f'no "{mark}" ({what}) in the grid')
        if len(flat) > MAX_CELLS:
            raise wrong(0, 0, f"{width} x {height} cells; at most {MAX_CELLS} are allowed")
        flat = flat.replace("1", " ").replace("2", " ")
        reached, frontier = set(starts.values()), list(starts.values())
        while frontier:
            cell = frontier.pop()
            near = {cell - width, cell + width, cell + 1, cell - 1} - reached
            reached |= near
            frontier += [cell for cell in near if flat[cell] == " "]
        pots = [cell for cell, mark in enumerate(flat) if mark == "P"]
        if not reached.intersection(pots):
            raise wrong(*divmod(pots[0], width), "no pot can be reached by any player")
        arrays: dict[str, Array] = {
            "terrain": np.array([TERRAIN.index(mark) for mark in flat], np.uint8),
            "pots": np.array(pots, np.int16),
            "starts": np.array([starts["1"], starts["2"]], np.int16),
        }
        for array in arrays.values():
            array.setflags(write=False)
        grid = tuple(flat[row : row + width] for row in range(0, len(flat), width))
        return Layout(name=name, width=width, height=height, grid=grid, **arrays)


@cache
def _built_in(name: str) -> Layout:
    return Layout.parse(GRIDS[name], name=name)


@dataclass(kw_only=True)
class State:
    """N games at one moment, in plain arrays that may be edited in place."""

    pos: Array  # (N, 2) int16 cell of each player
    orient: Array  # (N, 2) uint8 direction each player faces
    held: Array  # (N, 2) uint8 object in hand
    counter: Array  # (N, H*W) uint8 object lying on a counter
    pot_onions: Array  # (N, P) uint8, 0 to 3
    pot_cook: Array  # (N, P) uint8 steps cooked, 20 is ready
    time: Array  # (N,) int32 steps since the start

    def arrays(self) -> Arrays:
        """Returns the arrays in the order above."""
        return (self.pos, self.orient, self.held, self.counter, self.pot_onions, self.pot_cook, self.time)


def observation_shape(layout: Layout, encoding: str) -> tuple[int, ...]:
    """Returns one player's shape, (C, H, W) for planes or (F,) for features. Raises UsageError."""
    if encoding in MODES:
        return (kernels.NUM_PLANES[MODES[encoding]], layout.height, layout.width)
    if encoding not in ENCODINGS:
        raise UsageError(unknown("encoding", encoding, ENCODINGS))
    return (int(encoding.removeprefix("features")),)


class Overcooked:
    """N games on one layout in lockstep; the caller resets when they are done."""

    def __init__(
        self, layout: Layout | str | Path, num_envs: int, *, horizon: int = 400, backend: str = "auto"
    ) -> None:
        """Starts the games; backend "auto" is "numba" if it imports, else "numpy". Raises UsageError."""
        for name, value in (("num_envs", num_envs), ("horizon", horizon)):
            if not isinstance(value, int | np.integer) or value <= 0:
                raise UsageError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if backend not in ("auto", "numba", "numpy"):
            raise UsageError(unknown("backend", backend, ("auto", "numba", "numpy")))
        self._kernels = kernels.NUMPY_KERNELS
        if backend != "numpy":
            try:
                self._kernels = kernels.numba_kernels()
            except ImportError as error:
                if backend == "numba":
                    raise missing_extra("numba", "coop", 'backend="numba"') from error
        self.backend = self._kernels.name
        self.layout = layout = layout if isinstance(layout, Layout) else Layout.load(layout)
        self.num_envs, self.horizon = n, _ = int(num_envs), int(horizon)
        cells, pots, byte = len(layout.terrain), len(layout.pots), np.uint8
        pot_at = np.zeros(cells, np.int16)
        pot_at[layout.pots] = np.arange(pots)
        delta = np.array([-layout.width, layout.width, 1, -1], np.int16)
        self._world = (layout.terrain, delta, pot_at, layout.pots)
        self.state = State(
            pos=np.empty((n, 2), np.int16), orient=np.empty((n, 2), byte), held=np.empty((n, 2), byte),
            counter=np.empty((n, cells), byte), pot_onions=np.empty((n, pots), byte),
            pot_cook=np.empty((n, pots), byte), time=np.empty(n, np.int32),
        )  # fmt: skip
        self._canvases: dict[str, tuple[Arrays, Array]] = {}
        self.reset()

    def reset(self, mask: Array | None = None) -> None:
        """Starts all games anew, or those where `mask` (N,) bool is set. Raises UsageError for a bad mask."""
        if mask is not None and (np.shape(mask) != (self.num_envs,) or np.asarray(mask).dtype != bool):
            raise UsageError(f"mask must be a bool array of shape ({self.num_envs},)")
        rows = slice(None) if mask is None else mask
        for array in self.state.arrays():
            array[rows] = 0
        self.state.pos[rows] = self.layout.starts

    def step(self, actions: Any) -> tuple[Array, Array, Array]:
        """Advances every game by the joint `actions`, integers (N, 2) from 0 to 5.

        Returns sparse (N,) float32, the team's 20 per soup; shaped (N, 2) float32 per player (the 2019 code has
        their sum); done (N,) bool, time is up. Raises UsageError for bad actions; nothing changes then.
        """
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs, 2) or actions.dtype.kind not in "iu":
            given = f"{actions.dtype} of shape {actions.shape}"
            raise UsageError(f"actions are {given}; expected integers of shape ({self.num_envs}, 2)")
        actions = np.ascontiguousarray(actions, np.int64)
        sparse, shaped = np.empty(self.num_envs, np.float32), np.empty((self.num_envs, 2), np.float32)
        bad = self._kernels.step(self._world, self.state.arrays(), actions, sparse, shaped)
        if bad >= 0:
            raise UsageError(f"actions[{bad}] is {actions[bad].tolist()}; allowed are 0 to 5")
        return sparse, shaped, self.state.time >= self.horizon

    def observe(self, encoding: str, seat: int | None = None, out: Array | None = None) -> Array:
        """Returns what the players see, each from its own side, in `out` if given.

        "planes20" is the 2019 encoding put right, "planes20_legacy" the original (objects lying about vanish
        while a player carries one of their kind), "planes26" that of later packages; "features62" and
        "features96" are the vectors. Planes are uint8 (N, 2, C, H, W), features float32 (N, 2, F); with `seat`,
        without axis 1. Raises UsageError for an unknown encoding or seat, or an `out` of another shape or dtype.
        """
        shape = observation_shape(self.layout, encoding)
        if seat not in (None, 0, 1):
            raise UsageError(f"seat is {seat!r}; it must be 0, 1, or None for both")
        if encoding in MODES:
            result = self._draw(encoding).reshape(self.num_envs, 2, *shape)
            result = result if seat is None else result[:, seat]
        else:
            from sextet.mep import features

            encode = getattr(features, encoding)
            seen = [encode(self.layout, self.state, s) for s in ((0, 1) if seat is None else (seat,))]
            result = np.stack(seen, 1) if seat is None else seen[0]
        if out is None:
            return result.copy() if encoding in MODES else result  # planes are drawn on a lasting canvas
        if out.shape != result.shape or out.dtype != result.dtype:
            raise UsageError(f"out is {out.dtype}{out.shape}; expected {result.dtype}{result.shape}")
        np.copyto(out, result)
        return out

    def observe_columns(self, encoding: str, rows: Array, columns: Array, scale: Array, out: Array) -> None:
        """Writes chosen numbers of a plane encoding, scaled, as a network takes them.

        For 32 games it takes a quarter of the time of `observe` with tensor operations after it.

        Args:
            encoding: One with planes.
            rows: (R,) int64 players, 2 * game + seat.
            columns: (F,) int64 places in a player's flat observation.
            scale: (F,) float32 factor of each.
            out: (R, F) float32.
        """
        canvas = self._draw(encoding).reshape(2 * self.num_envs, -1)
        self._kernels.select(canvas, rows, columns, scale, out)

    def _draw(self, encoding: str) -> Array:
        """Brings the lasting planes of an encoding to the present state; returns them, (N, 2, C, H*W) uint8."""
        drawn, canvas = self._canvases.get(encoding) or self._canvas(encoding)
        self._kernels.planes(MODES[encoding], self._world, self.state.arrays(), self.horizon, drawn, canvas)
        return canvas

    def _canvas(self, encoding: str) -> tuple[Arrays, Array]:
        """Makes the lasting planes of an encoding, with the terrain on them, and notes of what is drawn."""
        n, cells, pots = self.num_envs, len(self.layout.terrain), len(self.layout.pots)
        canvas = np.zeros((n, 2, kernels.NUM_PLANES[MODES[encoding]], cells), np.uint8)
        for code, plane in enumerate(kernels.TERRAIN_PLANES[MODES[encoding]], 1):
            canvas[:, :, plane] = self.layout.terrain == code
        players = np.full((n, 2, 3), -1, np.int16)
        drawn: Arrays = (players, *(np.zeros(shape, np.uint8) for shape in ((n, cells), (n, 2, pots), (n,))))
        return self._canvases.setdefault(encoding, (drawn, canvas))
