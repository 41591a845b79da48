"""The page to play Overcooked with trained agents: partners found in runs, and the routes of the protocol."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from secrets import choice
from typing import Annotated, Any, Literal

import numpy as np
import torch
from fastapi import APIRouter, Body, HTTPException, WebSocket
from fastapi.responses import FileResponse, Response
from prometheus_client import Histogram
from pydantic import BaseModel, Field

from sextet.core.errors import DataError, SextetError, UsageError
from sextet.core.files import read_json
from sextet.mep.evaluate import HORIZON, Agent
from sextet.mep.games import TICK_SECONDS, Archive, read_game, replay
from sextet.mep.human import HumanProxy
from sextet.mep.overcooked import LAYOUTS, Layout, Overcooked
from sextet.mep.policy import Policy, PolicyAgent
from sextet.mep.rooms import Nobody, Outbox, Partner, Player, Room, Rooms, Terms
from sextet.mep.study import Study
from sextet.serve import Demo, Options

MESSAGES_PER_SECOND = 200  # of one connection; a held key sends about seven
BUCKETS = (*(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05), *(0.075, 0.1, 0.15, 0.3, 1.0))

log = logging.getLogger("sextet.serve")


@dataclass
class Cast:
    """Kitchens by name and partners by id."""

    kitchens: dict[str, Layout] = field(default_factory=lambda: {name: Layout.load(name) for name in LAYOUTS})
    partners: dict[str, Partner] = field(default_factory=dict)

    def add(self, label: str, kitchen: str | None, kind: str, make: Callable[[], Agent | None]) -> None:
        """Adds a partner under an opaque id; a second of the same label gets a number."""
        taken = {partner.label for partner in self.partners.values() if partner.kitchen == kitchen}
        names = [label, *(f"{label} ({number})" for number in range(2, len(taken) + 2))]
        label = next(name for name in names if name not in taken)
        name = f"p{len(self.partners)}"
        self.partners[name] = Partner(id=name, label=label, kitchen=kitchen, kind=kind, make=make)

    def add_folder(self, folder: Path, label: str, suffix: str) -> None:
        """Adds the agent saved in a folder; raises SextetError when there is none that can play.

        `label` names one that has no label of its own; `suffix` tells runs apart.
        """
        about = read_json(folder / "config.json")
        if not isinstance(about, dict):
            raise DataError(f"{folder}/config.json: not the description of an agent")
        config = about.get("config")
        method = str(config.get("method", "agent")).upper() if isinstance(config, dict) else ""
        kind, label = str(about.get("kind", "agent")), str(about.get("label") or f"{method} {label}".strip()) + suffix
        if kind == "human_proxy":
            proxy = HumanProxy.load(folder)
            layout = Layout.load(proxy.layout)
            make: Callable[[], Agent] = partial(HumanProxy, proxy.layout, proxy.weights)  # one a game: it remembers
        else:
            policy = Policy.load(folder)
            agent, layout = PolicyAgent(policy, name=label), policy.layout
            kind, make = kind if kind == "published" else "agent", lambda: agent
        known = self.kitchens.setdefault(layout.name, layout)
        if known.grid != layout.grid or known.starts.tolist() != layout.starts.tolist():
            raise DataError(f'{folder}: its kitchen "{layout.name}" differs from another of that name')
        env = Overcooked(layout, 1)  # the first move compiles, which must not happen during a game
        trial = make()
        trial.begin(env, 0)
        trial.act(env, 0, np.random.default_rng(0))
        self.add(label, layout.name, kind, make)


def find_cast(runs: Sequence[Path]) -> Cast:
    """Returns all agents of the runs that can be loaded, with a person and nobody as further partners.

    Raises:
        UsageError: No run has an agent.
    """
    cast = Cast()
    for run in runs:
        folders = sorted((run / "agents").glob("*/")) or [run / "final"]
        for folder in folders:
            try:
                label, suffix = (run.name, "") if folder.name == "final" else (folder.name, f" ({run.name})")
                cast.add_folder(folder, label, suffix if len(runs) > 1 else "")
            except SextetError as error:
                log.warning("left out: %s", error)
    if not cast.partners:
        raise UsageError(f"no agent that can play in {', '.join(map(str, runs))}; finish it: sextet resume {runs[0]}")
    cast.add("Another person", None, "person", lambda: None)
    cast.add("Nobody (stands still)", None, "nobody", Nobody)
    for layout in cast.kitchens.values():
        Overcooked(layout, 1).step(np.full((1, 2), 4))
    return cast


def about_kitchen(layout: Layout) -> dict[str, Any]:
    """Returns what the page draws a kitchen from."""
    width = layout.width
    places = {
        name: [[cell % width, cell // width] for cell in getattr(layout, name).tolist()] for name in ("starts", "pots")
    }
    return {"name": layout.name, "width": width, "height": layout.height, "grid": list(layout.grid), **places}


class NewGame(BaseModel):
    """Body of POST /api/games."""

    kitchen: str
    partner: str
    seat: Literal[0, 1, "random"] = "random"
    seconds: Annotated[float, Field(ge=10, le=300)] | None = None
    name: Annotated[str, Field(max_length=40)] | None = None


class Invitation(BaseModel):
    """Body of POST /api/games/join."""

    invite: str
    name: Annotated[str, Field(max_length=40)] | None = None


def demo(runs: Sequence[Path], options: Options) -> Demo:
    """Returns the page of finished runs, see `sextet.serve`.

    Raises:
        SextetError: No usable agent, or a study file or folder of games that cannot be used.
    """
    torch.set_num_threads(1)
    cast = find_cast(runs)
    archive = Archive(options.games or runs[0] / "games")
    for text in archive.warnings:
        log.warning("%s", text)
    rooms = Rooms(archive, max_games=options.max_games)
    lateness = Histogram(
        "sextet_tick_lateness_seconds", "From a tick's deadline until its state is sent", buckets=BUCKETS, registry=None
    )
    study = None
    if options.study is not None:
        study = Study.load(options.study, archive.folder / "study", cast.kitchens, list(cast.partners.values()))
    router = routes(cast, rooms, lateness, study)
    return Demo(
        router=router,
        page=Path(__file__).with_name("page"),
        close=rooms.close,
        gauges={"sextet_games_playing": lambda: rooms.playing},
        collectors=(lateness,),
    )


def routes(cast: Cast, rooms: Rooms, lateness: Histogram, study: Study | None) -> APIRouter:
    """Returns the routes of the protocol; those of a study only with one."""
    router = APIRouter(prefix="/api")
    archive, replays = rooms.archive, asyncio.Lock()
    connections: set[WebSocket] = set()
    setup = {
        "title": study.plan.title if study else "Overcooked",
        "tick_seconds": TICK_SECONDS,
        "horizon": HORIZON,
        "max_games": rooms.max_games,
        "study": study is not None,
        "kitchens": [about_kitchen(layout) for layout in cast.kitchens.values()],
        # Participants must not learn who is among the partners.
        "partners": [] if study else [
            {name: getattr(partner, name) for name in ("id", "label", "kitchen", "kind")}
            for partner in cast.partners.values()
        ],
    }  # fmt: skip

    @router.get("/setup")
    async def get_setup() -> Any:
        return setup

    @router.post("/games", status_code=201)
    async def new_game(body: NewGame) -> Any:
        if study is not None:
            raise HTTPException(403, "this server runs a study; games are opened by its stages")
        layout, partner = cast.kitchens.get(body.kitchen), cast.partners.get(body.partner)
        if layout is None:
            raise HTTPException(404, f"no kitchen {body.kitchen[:40]!r}; allowed: {', '.join(cast.kitchens)}")
        if partner is None or partner.kitchen not in (None, layout.name):
            raise HTTPException(404, f"no partner {body.partner[:40]!r} for {layout.name}; see /api/setup")
        steps = HORIZON if body.seconds is None else round(body.seconds / TICK_SECONDS)
        seat = choice((0, 1)) if body.seat == "random" else body.seat
        room = rooms.open(Terms(layout=layout, partner=partner, seat=seat, steps=steps, name=_name(body.name) or "You"))
        return _ticket(room, room.players[0]) | {"invite": room.invite}

    @router.post("/games/join")
    async def join(body: Invitation) -> Any:
        found = rooms.join(body.invite, _name(body.name) or "Guest")
        if found is None:
            raise HTTPException(404, "this invitation is unknown, used or over; ask for a new one")
        return _ticket(*found)

    @router.get("/games")
    async def list_games() -> Any:
        shown = ("game", "kitchen", "partner", "seat", "score", "steps", "finished", "time")
        return {"games": [{name: getattr(header, name) for name in shown} for header in archive.newest]}

    def record(game: str) -> Path:
        path = archive.path(game)
        if path is None:
            raise HTTPException(404, f"no recorded game {game[:40]!r}")
        return path

    @router.get("/games/{game}/file")
    async def download(game: str) -> Response:
        path = record(game)
        return FileResponse(path, media_type="application/x-ndjson", filename=path.name)

    @router.get("/games/{game}/replay")
    async def get_replay(game: str) -> Response:
        path = record(game)
        try:
            async with replays:
                text = await asyncio.to_thread(_replay_text, path)
        except SextetError as error:
            log.warning("%s", error)
            raise HTTPException(409, "the record of this game is damaged or was changed") from error
        return Response(text, media_type="application/json")

    @router.websocket("/games/{game}")
    async def play(socket: WebSocket, game: str, player: str = "") -> None:
        await socket.accept()
        if len(connections) >= 2 * rooms.max_games + 16:
            await socket.close(4429, "too many connections; try again in a minute")
            return
        found = rooms.find(game, player)
        if found is None:
            await socket.close(4404, "unknown game, or wrong secret")
            return
        connections.add(socket)
        try:
            await _converse(socket, *found, lateness)
        finally:
            connections.discard(socket)

    if study is not None:
        _study_routes(router, study, rooms)
    return router


def _name(text: str | None) -> str:
    return "".join(mark for mark in text or "" if mark.isprintable()).strip()


def _ticket(room: Room, player: Player) -> dict[str, Any]:
    return {"game": room.game, "player": player.secret, "seat": player.seat}


def _replay_text(path: Path) -> str:
    game = read_game(path)
    about = {"kitchen": about_kitchen(game.header.layout()), "names": game.header.names, "score": game.header.score}
    return json.dumps(about | {"frames": replay(game)}, separators=(",", ":"))


async def _converse(socket: WebSocket, room: Room, player: Player, lateness: Histogram) -> None:
    """Carries messages between one connection and its game until either ends it."""
    loop = asyncio.get_running_loop()
    outbox = Outbox(lambda: sender.cancel())

    async def send() -> None:
        async for text, deadline in outbox:
            await socket.send_text(text)
            if deadline is not None:
                lateness.observe(loop.time() - deadline)
        await socket.close(outbox.code, outbox.reason)

    async def receive() -> None:
        second, count = 0, 0
        while (message := await socket.receive())["type"] == "websocket.receive":
            count, second = (count + 1, second) if int(loop.time()) == second else (1, int(loop.time()))
            if count > MESSAGES_PER_SECOND:
                return outbox.end(1008, "too many messages")
            try:
                room.receive(player, json.loads(message.get("text") or ""))
            except (ValueError, RecursionError) as error:
                outbox.put(json.dumps({"type": "error", "message": f"not a message of this protocol: {error}"}))
        return None

    sender, receiver = asyncio.create_task(send()), asyncio.create_task(receive())
    room.connect(player, outbox, about_kitchen(room.terms.layout))
    try:
        await asyncio.wait((sender, receiver), return_when=asyncio.FIRST_COMPLETED)
        if outbox.code != 1000 and not sender.done():  # its own end, with the reason
            await asyncio.wait((sender,), timeout=1)
    finally:
        room.disconnect(player, outbox)
        sender.cancel()
        receiver.cancel()
        await asyncio.gather(sender, receiver, return_exceptions=True)  # a closed connection is no error


def _study_routes(router: APIRouter, study: Study, rooms: Rooms) -> None:
    """Adds the routes of a study; progress is written one request at a time, outside the games' loop."""
    lock = asyncio.Lock()

    async def locked(function: Callable[..., Any], *arguments: Any) -> Any:
        async with lock:
            return await asyncio.to_thread(function, *arguments)

    @router.post("/study", status_code=201)
    async def take_part() -> Any:
        return {"participant": await locked(study.enter)}

    @router.get("/study/{participant}")
    async def stage(participant: str) -> Any:
        return (await locked(study.progress, participant)).view()

    @router.post("/study/{participant}/next")
    async def go_on(participant: str, body: Annotated[dict[str, Any] | None, Body()] = None) -> Any:
        return (await locked(study.advance, participant, (body or {}).get("ranking"))).view()

    @router.post("/study/{participant}/game", status_code=201)
    async def study_game(participant: str) -> Any:
        progress = await locked(study.progress, participant)
        room = rooms.room(study.open_games.get(participant, ""))
        if room is None or room.task.done():  # else the page was loaded again during a game

            async def ended(room: Room) -> None:
                if room.finished and room.saved:
                    await locked(study.finish, participant, room.game, progress.at)
                study.open_games.pop(participant, None)

            room = rooms.open(study.terms(participant, progress, ended))
            study.open_games[participant] = room.game
        return _ticket(room, room.players[0]) | {"invite": None}
