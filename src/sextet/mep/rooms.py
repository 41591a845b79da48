"""Games in progress: who sits where, the clock, and what each connected person is told. No HTTP in here.

Every game has a task that steps it at fixed deadlines. Messages wait in a bounded queue per connection, so that a
slow reader costs a little memory and then its connection.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from sextet import __version__
from sextet.core.errors import SextetError
from sextet.mep.evaluate import Agent
from sextet.mep.games import STAY, TICK_SECONDS, Archive, Header, frame, marked_grid, rows, to_line
from sextet.mep.overcooked import Layout, Overcooked

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALONE_SECONDS = 120.0  # a game without any connected person ends after this
PATIENCE_SECONDS = 600.0  # a game that waits for a person ends after this; so does its invitation
LATE_READERS_SECONDS = 60.0  # a saved game can still be looked at for this long
QUEUED_MESSAGES = 64  # about 10 seconds of a game
LATE_TICKS = 7  # a clock that is further behind (the machine slept) starts anew instead of catching up
ROWS_AT_ONCE = 8  # of a record made between two turns of other games: about 0.3 ms

log = logging.getLogger("sextet.serve")


class ServerFull(SextetError):
    """As many games, or participants, as allowed."""

    status = 429


class Nobody:
    """The partner that stands still, for warm-ups; an `Agent`."""

    def begin(self, env: Overcooked, seat: int) -> None:
        """Does nothing."""

    def act(self, env: Overcooked, seat: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Stays."""
        return np.full(env.num_envs, STAY)


@dataclass(frozen=True, kw_only=True)
class Partner:
    """Whom one can play with; `kitchen` None means any. `make` gives a player for one game, None for a person."""

    id: str
    label: str
    kitchen: str | None
    kind: str
    make: Callable[[], Agent | None]


class Outbox:
    """Messages to one connection, with the deadline that each had; `code` is how the connection ends."""

    def __init__(self, drop: Callable[[], object]) -> None:
        self.code, self.reason, self._drop = 1000, "", drop
        self._queue: asyncio.Queue[tuple[str, float | None] | None] = asyncio.Queue(QUEUED_MESSAGES)

    def put(self, text: str | None, deadline: float | None = None) -> None:
        """Adds a message, None for the end; a reader that is too far behind is dropped."""
        try:
            self._queue.put_nowait(None if text is None else (text, deadline))
        except asyncio.QueueFull:
            self._drop()

    def end(self, code: int = 1000, reason: str = "") -> None:
        """Ends the connection after what is queued."""
        self.code, self.reason = code, reason
        self.put(None)

    def __aiter__(self) -> Outbox:
        return self

    async def __anext__(self) -> tuple[str, float | None]:
        item = await self._queue.get()
        if item is None:
            raise StopAsyncIteration
        return item


class Player:
    """A person in a seat."""

    def __init__(self, seat: int, name: str, *, joined: bool) -> None:
        self.seat, self.name, self.joined = seat, name, joined
        self.secret = secrets.token_urlsafe(16)
        self.outbox: Outbox | None = None
        self.ready, self.action = False, STAY

    @property
    def here(self) -> bool:
        """Whether the game can go on as far as this person is concerned."""
        return self.joined and self.ready and self.outbox is not None


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a game is opened with. `shown` is the partner's name for the person; `ended` is told of the end."""

    layout: Layout
    partner: Partner
    seat: int
    steps: int
    name: str = "You"
    shown: str = ""
    participant: int = 0
    round: str = "main"
    ended: Callable[[Room], Awaitable[None]] | None = None


class Room:
    """One game, from the first person's wait to the saved record."""

    def __init__(self, terms: Terms, clock_phase: float, save: Callable[[Room], Awaitable[bool]]) -> None:
        self.terms, self._clock_phase, self._save = terms, clock_phase, save
        self.game, self.began = "g" + secrets.token_urlsafe(16), time.time()
        self.env, self.rng = Overcooked(terms.layout, 1, horizon=terms.steps), np.random.default_rng()
        agent = terms.partner.make()
        self.players = [Player(terms.seat, terms.name, joined=True)]
        if agent is None:
            self.players.append(Player(1 - terms.seat, "Guest", joined=False))
        else:
            agent.begin(self.env, 1 - terms.seat)
        self.agent, self.invite = agent, None if agent else secrets.token_urlsafe(16)
        self.phase, self.score, self.left, self.saved = "waiting", 0, False, False
        self.event: str | None = None
        self.actions, self.times = list[tuple[int, int]](), list[float]()
        self._changed, self._alone_since = asyncio.Event(), asyncio.get_running_loop().time()
        self.task = asyncio.create_task(self._run())

    @property
    def finished(self) -> bool:
        """Whether all steps were played."""
        return len(self.actions) == self.terms.steps

    def header(self) -> Header:
        """Returns the first line of the record."""
        terms, names = self.terms, [self.terms.partner.label] * 2
        for player in self.players:
            names[player.seat] = player.name
        return Header(
            game=self.game, kitchen=terms.layout.name, grid=marked_grid(terms.layout), names=(names[0], names[1]),
            persons=tuple(sorted(player.seat for player in self.players)), partner=terms.partner.label, seat=terms.seat,
            time=datetime.fromtimestamp(self.began, UTC).isoformat(timespec="seconds"), horizon=terms.steps,
            steps=len(self.actions), score=self.score, finished=self.finished, participant=terms.participant,
            round=terms.round, version=__version__,
        )  # fmt: skip

    def join(self, name: str) -> Player:
        """Gives the free seat away; the invitation is used up."""
        guest = self.players[1]
        guest.joined, guest.name, self.invite = True, name, None
        self._changed.set()
        return guest

    def connect(self, player: Player, outbox: Outbox, kitchen: dict[str, Any]) -> None:
        """Connects a person, in place of an earlier connection of the same; the game goes on where it was."""
        if player.outbox is not None:
            player.outbox.end(4409, "connected again elsewhere")
        player.outbox, terms = outbox, self.terms
        start = {"type": "start", "kitchen": kitchen, "seat": player.seat, "steps": terms.steps}
        partner = terms.shown or next((p.name for p in self.players if p is not player), terms.partner.label)
        start |= {"partner": partner, "tick_seconds": TICK_SECONDS, "hidden": bool(terms.shown)}
        outbox.put(to_line(start))
        outbox.put(self._state())
        if self.task.done():
            self._farewell([player])
        self._changed.set()

    def disconnect(self, player: Player, outbox: Outbox) -> None:
        """Notes that a connection is gone, unless a newer one has taken its place."""
        if player.outbox is outbox:
            player.outbox, self._alone_since = None, asyncio.get_running_loop().time()
            self._changed.set()

    def receive(self, player: Player, message: Any) -> None:
        """Takes a message of the protocol; raises ValueError for anything else."""
        kind = message.get("type") if isinstance(message, dict) else None
        if kind == "action" and type(message.get("action")) is int and 0 <= message["action"] <= 5:
            player.action = message["action"]
        elif kind == "ready":
            player.ready = True
        elif kind == "leave":
            self.left = True
        else:
            raise ValueError('expected {"type": "action", "action": 0 to 5}, {"type": "ready"} or {"type": "leave"}')
        if kind != "action":
            self._changed.set()

    def tell(self, message: dict[str, Any] | str, deadline: float | None = None) -> None:
        """Sends a message to everybody connected."""
        text = message if isinstance(message, str) else to_line(message)
        for player in self.players:
            if player.outbox is not None:
                player.outbox.put(text, deadline)

    def _state(self) -> str:
        state, terms = self.env.state, self.terms
        return to_line(
            frame(terms.layout, state, score=self.score, horizon=terms.steps, phase=self.phase, event=self.event)
        )

    def _farewell(self, players: Sequence[Player]) -> None:
        over = {"type": "over", "score": self.score, "game": self.game, "saved": self.saved}
        for player in players:
            if player.outbox is not None:
                player.outbox.put(to_line(over))
                player.outbox.end()

    async def _run(self) -> None:
        try:
            await self._play()
        except Exception:  # a partner that fails ends its own game only
            log.exception("game %s ended", self.game)
            self.tell(
                {"type": "error", "message": "the partner failed, so the game ends; the server's console says how"}
            )
        self.phase, self.invite = "over", None
        self.tell(self._state())
        try:
            self.saved = await self._save(self)
            if self.terms.ended is not None:
                await self.terms.ended(self)
        except SextetError as error:
            log.warning("game %s is not saved: %s", self.game, error)
            self.tell({"type": "error", "message": "the game could not be saved on the server; its disk may be full"})
        self._farewell(self.players)

    async def _play(self) -> None:
        loop, deadline = asyncio.get_running_loop(), 0.0
        while not (self.finished or self.left):
            if not all(player.here for player in self.players):
                if not await self._wait_for_persons():
                    return
                # Games tick at different moments, spread over the tick, however their starts coincide.
                deadline = loop.time() + (self._clock_phase - loop.time()) % TICK_SECONDS
            if loop.time() > deadline + LATE_TICKS * TICK_SECONDS:
                deadline = loop.time()
            await asyncio.sleep(deadline - loop.time())
            if not self.left and all(player.here for player in self.players):
                self._tick(deadline)
            deadline += TICK_SECONDS

    async def _wait_for_persons(self) -> bool:
        patience = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        self.phase = "paused" if self.actions else "waiting"
        self.tell(self._state())
        while not (self.left or all(player.here for player in self.players)):
            connected = any(player.outbox for player in self.players)
            limit = patience if connected else min(patience, self._alone_since + ALONE_SECONDS)
            self._changed.clear()
            try:
                async with asyncio.timeout_at(limit):
                    await self._changed.wait()
            except TimeoutError:
                return False
        self.phase = "playing"
        return not self.left

    def _tick(self, deadline: float) -> None:
        pair = [STAY, STAY]
        for player in self.players:
            pair[player.seat], player.action = player.action, STAY
        if self.agent is not None:
            seat = 1 - self.terms.seat
            pair[seat] = int(self.agent.act(self.env, seat, self.rng)[0])
        reward = int(self.env.step(np.array([pair]))[0][0])
        self.actions.append((pair[0], pair[1]))
        self.times.append(time.time())
        self.score += reward
        self.event = "delivered" if reward else None
        self.tell(self._state(), deadline)


class Rooms:
    """All games in progress, at most `max_games`; those that ended are forgotten a minute after they were saved."""

    def __init__(self, archive: Archive, *, max_games: int) -> None:
        self.archive, self.max_games = archive, max_games
        self._rooms: dict[str, Room] = {}
        self._opened, self._writer = 0, asyncio.Lock()

    @property
    def playing(self) -> int:
        """Number of games that are not over."""
        return sum(not room.task.done() for room in self._rooms.values())

    def open(self, terms: Terms) -> Room:
        """Opens a game; raises ServerFull."""
        if self.playing >= self.max_games:
            raise ServerFull(f"all {self.max_games} games of this server are taken; try again in a minute")
        for game in list(self._rooms):
            if len(self._rooms) < 2 * self.max_games:
                break
            if self._rooms[game].task.done():
                del self._rooms[game]
        self._opened += 1
        golden = self._opened * 0.618034 % 1  # spreads any number of games evenly
        room = Room(terms, golden * TICK_SECONDS, self._save)
        room.task.add_done_callback(lambda _: self._forget_later(room))
        self._rooms[room.game] = room
        return room

    def _forget_later(self, room: Room) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(LATE_READERS_SECONDS, self._rooms.pop, room.game, None)

    def room(self, game: str) -> Room | None:
        """Returns a game by its name."""
        return self._rooms.get(game)

    def find(self, game: str, secret: str) -> tuple[Room, Player] | None:
        """Returns the game and the person whose secret this is."""
        if room := self._rooms.get(game):
            for player in room.players:
                if player.joined and secrets.compare_digest(player.secret.encode(), secret.encode()):
                    return room, player
        return None

    def join(self, invite: str, name: str) -> tuple[Room, Player] | None:
        """Takes the free seat that an invitation is for; None if there is no such invitation."""
        for room in self._rooms.values():
            if room.invite and secrets.compare_digest(room.invite.encode(), invite.encode()):
                return room, room.join(name)
        return None

    async def _save(self, room: Room) -> bool:
        """Writes the record of a game with at least one step; a long one is made in turns with the games."""
        if not room.actions:
            return False
        header, lines = room.header(), []
        async with self._writer:  # one at a time, so that other games wait for one turn at most
            for number, row in enumerate(rows(header, room.actions, room.times)):
                lines.append(to_line(row))
                if number % ROWS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        await asyncio.to_thread(self.archive.write, header, lines)
        return True

    async def close(self) -> None:
        """Ends all games and saves them as unfinished."""
        rooms = list(self._rooms.values())
        for room in rooms:
            room.receive(room.players[0], {"type": "leave"})
        await asyncio.gather(*(room.task for room in rooms), return_exceptions=True)
