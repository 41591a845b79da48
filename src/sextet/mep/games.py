"""Games that people played: their files in the schema of the 2019 human games, replay, and use for cloning.

A game is one `.jsonl` file: a header, then one row per step with the columns of the 2019 table. As there, `reward`
and `score` count 5 a soup and `reward_norm` 20, `score` includes the step's reward, and `state` is the one acted in.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sextet.core.errors import DataError, SextetError, UsageError, unknown
from sextet.core.files import atomic_write_text, read_json, read_text
from sextet.mep.human_data import ACTIONS, OBJECTS, HumanData, read_states
from sextet.mep.overcooked import LAYOUTS, Layout, Overcooked, State

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT = "sextet-game/1"
TICK_SECONDS = 0.1515  # 100 game loops of the 2019 games took 15.15 s
STAY = 4
WEB_SHARE = 4  # the web game of 2019 paid 5 a soup, the environment pays 20
NEWEST = 200
GAME_NAME = re.compile(r"g[A-Za-z0-9_-]{22}")
COLUMNS = (
    "is_leader", "is_wait", "completed", "cur_gameloop", "datetime", "reward", "round_num", "score", "time_elapsed",
    "time_left", "reward_norm", "reward_norm_total", "workerid_num", "cur_gameloop_total", "joint_action", "layout",
    "layout_name", "next_state", "round_type", "state", "run",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Header:
    """What is known of a recorded game besides its steps; the first line of its file."""

    game: str
    kitchen: str
    grid: tuple[str, ...]
    """Rows of the kitchen, the players' starts marked 1 and 2."""
    names: tuple[str, str]
    """Players by seat."""
    persons: tuple[int, ...]
    """Seats that persons held."""
    partner: str
    """Label of the partner, also where the person did not see it."""
    seat: int
    """Seat of the person who opened the game."""
    time: str
    """When it began, ISO 8601 in UTC."""
    horizon: int
    steps: int
    score: int
    """Sparse return, 20 a soup."""
    finished: bool
    tick_seconds: float = TICK_SECONDS
    participant: int = 0
    """Number of the participant of a study; 0: no study."""
    round: str = "main"
    """"main", or "warmup" in a study."""
    version: str = ""
    format: str = FORMAT

    def layout(self) -> Layout:
        """Returns the kitchen; raises DataError for a bad grid."""
        return Layout.parse("\n".join(self.grid), name=self.kitchen)


@dataclass(frozen=True, kw_only=True)
class Game:
    """A recorded game: header, T rows by column, and (T, 2) joint actions."""

    header: Header
    rows: list[dict[str, Any]]
    actions: list[list[int]]


def marked_grid(layout: Layout) -> tuple[str, ...]:
    """Returns the rows of a kitchen with the starts as 1 and 2, as a layout file has them."""
    cells = list("".join(layout.grid))
    for seat, cell in enumerate(layout.starts.tolist()):
        cells[cell] = str(seat + 1)
    return tuple("".join(cells[row : row + layout.width]) for row in range(0, len(cells), layout.width))


def state_text(layout: Layout, state: State) -> str:
    """Returns the first of the games in `state` as the 2019 tables write it."""

    def item(code: int, cell: int, onions: int = 3, cooked: int = 20) -> dict[str, Any]:
        value: dict[str, Any] = {"name": OBJECTS[code], "position": [cell % layout.width, cell // layout.width]}
        return value | {"state": ["onion", onions, cooked]} if code == 3 else value

    players: list[dict[str, Any]] = []
    for cell, facing, held in zip(state.pos[0].tolist(), state.orient[0].tolist(), state.held[0].tolist(), strict=True):
        players.append({"position": [cell % layout.width, cell // layout.width], "orientation": ACTIONS[facing]})
        if held:
            players[-1]["held_object"] = item(held, cell)
    things = [item(int(state.counter[0, cell]), cell) for cell in state.counter[0].nonzero()[0].tolist()]
    pots = zip(layout.pots.tolist(), state.pot_onions[0].tolist(), state.pot_cook[0].tolist(), strict=True)
    things += [item(3, cell, onions, cooked) for cell, onions, cooked in pots if onions]
    objects = {"{},{}".format(*thing["position"]): thing for thing in things}
    return str({"players": players, "objects": objects, "order_list": ["onion"], "pot_explosion": False})


def frame(layout: Layout, state: State, *, score: int, horizon: int, phase: str, event: str | None) -> dict[str, Any]:
    """Returns what the page draws of the first of the games in `state`: the message "state" of the protocol."""
    width, row = layout.width, [array[0].tolist() for array in state.arrays()]
    pos, orient, held, counter, onions, cooked, step = row

    def place(cell: int) -> dict[str, Any]:
        return {"x": cell % width, "y": cell // width}

    return {
        "type": "state", "step": step, "score": score, "phase": phase, "event": event,
        "time_left": round((horizon - step) * TICK_SECONDS, 1),
        "players": [place(pos[i]) | {"facing": orient[i], "held": OBJECTS[held[i]] or None} for i in (0, 1)],
        "counters": [place(cell) | {"object": OBJECTS[code]} for cell, code in enumerate(counter) if code],
        "pots": [
            place(cell) | {"onions": onions[i], "cooking": cooked[i]} for i, cell in enumerate(layout.pots.tolist())
        ],
    }  # fmt: skip


def rows(header: Header, actions: Sequence[Sequence[int]], times: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Plays `actions` (T, 2) in the environment and yields the T rows; `times` are seconds since 1970."""
    layout, score = header.layout(), 0
    env = Overcooked(layout, 1, horizon=header.horizon)
    after, grid, tick = state_text(layout, env.state), str(list(header.grid)), header.tick_seconds
    for loop, (pair, moment) in enumerate(zip(actions, times, strict=True)):
        before, reward = after, int(env.step(np.array([pair]))[0][0])
        after, score = state_text(layout, env.state), score + reward
        values = (
            True, all(action == STAY for action in pair), header.finished, loop, round(moment * 1000),
            reward // WEB_SHARE, 1, score // WEB_SHARE, round((loop + 1) * tick, 3),
            round((header.horizon - loop) * tick), reward, header.score, header.participant, header.steps,
            str([ACTIONS[action] for action in pair]), grid, header.kitchen, after, header.round, before, "run-1",
        )  # fmt: skip
        yield dict(zip(COLUMNS, values, strict=True))


def to_line(value: Any) -> str:
    """Returns one line of a record."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _header(path: Path, line: str) -> Header:
    from pydantic import TypeAdapter, ValidationError

    try:
        header = TypeAdapter(Header).validate_json(line, strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "line"
        raise DataError(f"{path}:1: not the header of a recorded game ({place}: {first['msg']})") from error
    if header.format != FORMAT:
        raise DataError(f'{path}:1: format "{header.format}"; this version reads "{FORMAT}"')
    return header


def read_game(path: Path | str) -> Game:
    """Reads a recorded game; raises DataError "path:line: what is wrong" for anything that is not one."""
    path = Path(path)
    first, *lines = read_text(path).rstrip("\n").split("\n")
    header, table, actions = _header(path, first), [], []
    names = {str(action): code for code, action in enumerate(ACTIONS)}
    pairs = {str([a, b]): [names[str(a)], names[str(b)]] for a in ACTIONS for b in ACTIONS}
    for number, line in enumerate(lines, 2):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or row.keys() != set(COLUMNS):
                raise ValueError(f"expected the columns {', '.join(COLUMNS)}")
            actions.append(pairs[row["joint_action"]])
            table.append(row | {"datetime": int(row["datetime"])})
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not a step of a game ({error})") from error
    if len(table) != header.steps:
        raise DataError(f"{path}:{len(lines) + 1}: {len(table)} steps, but the header says {header.steps}")
    return Game(header=header, rows=table, actions=actions)


def replay(game: Game) -> list[dict[str, Any]]:
    """Plays the recorded actions again and returns the frames: the start, then one after each step.

    Raises:
        DataError: A row, or the score, is not what the environment gives.
    """
    header, score, layout = game.header, 0, game.header.layout()
    again = rows(header, game.actions, [row["datetime"] / 1000 for row in game.rows])
    for number, (row, expected) in enumerate(zip(game.rows, again, strict=True), 2):
        wrong = [name for name in COLUMNS if row[name] != expected[name]]
        if wrong:
            raise DataError(f"{header.game}:{number}: {wrong[0]} is not what the environment gives; the file changed")
    env = Overcooked(layout, 1, horizon=header.horizon)

    def seen(phase: str, event: str | None = None) -> dict[str, Any]:
        return frame(layout, env.state, score=score, horizon=header.horizon, phase=phase, event=event)

    frames = [seen("playing")]
    for number, pair in enumerate(game.actions, 1):
        reward = int(env.step(np.array([pair]))[0][0])
        score += reward
        frames.append(seen("over" if number == header.steps else "playing", "delivered" if reward else None))
    if score != header.score:
        raise DataError(f"{header.game}:1: score {header.score}, but the environment gives {score}; the file changed")
    return frames


class Archive:
    """A folder of recorded games, and the headers of the newest ones; a study's games are not among these."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.warnings = folder, list[str]()
        self.newest: deque[Header] = deque(maxlen=NEWEST)
        newest = sorted(folder.glob("g*.jsonl"), key=lambda path: path.stat().st_mtime)[-NEWEST:]
        for path in newest:
            try:
                with path.open(encoding="utf-8") as file:
                    self._note(_header(path, file.readline(1 << 20)))
            except (SextetError, OSError, UnicodeDecodeError) as error:
                self.warnings.append(f"{path.name} is left out of the list: {error}")

    def _note(self, header: Header) -> None:
        if not header.participant:
            self.newest.appendleft(header)

    def write(self, header: Header, lines: Iterable[str]) -> None:
        """Writes a game; raises DataError when the disk does not take it."""
        atomic_write_text(self.folder / f"{header.game}.jsonl", "\n".join((to_line(asdict(header)), *lines)) + "\n")
        self._note(header)

    def path(self, name: str) -> Path | None:
        """Returns the file of a game outside studies, by the name that the server gave it; else None."""
        path = self.folder / f"{name}.jsonl"
        if GAME_NAME.fullmatch(name) is None or not path.is_file():
            return None
        with path.open(encoding="utf-8") as file:
            return None if _header(path, file.readline(1 << 20)).participant else path


def human_data(paths: Iterable[Path], kitchen: str) -> HumanData:
    """Returns the steps of recorded games in one of the 2019 kitchens, for `sextet.mep.human.train_proxy`.

    Games of other kitchens and warm-ups are left out; only seats of persons are marked for cloning.

    Raises:
        UsageError: Unknown kitchen. DataError: A damaged or changed file, or no step by a person.
    """
    if kitchen not in LAYOUTS:
        raise UsageError(unknown("kitchen", kitchen, LAYOUTS))
    layout, games = Layout.load(kitchen), []
    for path in paths:
        game = read_game(path)
        if game.header.kitchen == kitchen and game.header.round == "main" and game.header.persons and game.rows:
            if game.header.grid != marked_grid(layout):
                raise DataError(f"{path}:1: another grid than the kitchen {kitchen}")
            replay(game)
            games.append(game)
    if not games:
        raise DataError(f"no step by a person in {kitchen} among these games; play some with: sextet play")
    table = [row for game in games for row in game.rows]
    lengths = [len(game.rows) for game in games]

    def states(column: str, later: int) -> State:
        texts: NDArray[Any] = np.array([row[column] for row in table], object)
        return State(**read_states(layout, texts, np.array([row["cur_gameloop"] + later for row in table])))

    return HumanData(
        layout=kitchen,
        state=states("state", 0),
        next_state=states("next_state", 1),
        actions=np.concatenate([np.array(game.actions, np.uint8) for game in games]),
        rewards=np.array([row["reward_norm"] for row in table], np.float32),
        worker=np.repeat(np.arange(len(games), dtype=np.int16), lengths),
        persons=np.repeat([[seat in game.header.persons for seat in (0, 1)] for game in games], lengths, axis=0),
    )


def _ranks(folder: Path) -> Mapping[tuple[int, str, str], int]:
    """Ranks, 1 the best, by participant, kitchen and partner."""
    ranks: dict[tuple[int, str, str], int] = {}
    for path in sorted((folder / "study").glob("*.json")):
        value = read_json(path)
        try:
            for kitchen, labels in value["rankings"].items():
                ranks |= {(value["participant"], kitchen, label): rank for rank, label in enumerate(labels, 1)}
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: not the progress of a participant") from error
    return ranks


def export_games(run: Path, /, *, out: Path | None = None, kitchen: str | None = None) -> list[dict[str, Any]]:
    """Checks the games that people played with a run, and lists them; with --out also as a CSV file.

    Args:
        run: Run directory that was served, or its folder of games.
        out: File for the table.
        kitchen: Only games of this kitchen.

    Returns:
        A row per game, oldest first; "rank" is the participant's ranking of the partner in a study, 1 the best.

    Raises:
        UsageError: No recorded games there. DataError: A damaged or changed file.
    """
    folder = run / "games" if (run / "games").is_dir() else run
    games = [read_game(path) for path in sorted(folder.glob("g*.jsonl"))]
    if not games:
        raise UsageError(f"{folder} holds no recorded games; play some with: sextet serve {run}")
    ranks, table = _ranks(folder), []
    for game in sorted(games, key=lambda game: game.header.time):
        header = game.header
        if kitchen in (None, header.kitchen):
            replay(game)
            rank = None if header.round == "warmup" else ranks.get((header.participant, header.kitchen, header.partner))
            shown = ("time", "kitchen", "partner", "seat", "participant", "round", "score", "steps", "finished", "game")
            table.append({name: getattr(header, name) for name in shown} | {"rank": rank})
    if kitchen is not None and not table:
        raise UsageError(unknown("kitchen", kitchen, {game.header.kitchen for game in games}))
    if out is not None:
        text = io.StringIO()
        writer = csv.DictWriter(text, table[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
        atomic_write_text(out, text.getvalue())
    return table
