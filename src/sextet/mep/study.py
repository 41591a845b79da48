"""A study with people, after the platforms of the 2019 code and its successors.

A participant reads the instructions and then, kitchen by kitchen, plays a warm-up alone, every agent in every seat in
a random hidden order, and ranks the agents. Participants are numbers; nothing else is known of them. The order depends
on the study's seed and that number alone. Progress is a file per participant, so it survives a restart.
"""

from __future__ import annotations

import string
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Any, Literal

from sextet.core.config import from_dict, read_overrides, require
from sextet.core.errors import DataError, SextetError, UsageError, unknown
from sextet.core.files import read_text, write_json
from sextet.core.seeding import numpy_rng
from sextet.mep.games import GAME_NAME, TICK_SECONDS
from sextet.mep.overcooked import Layout
from sextet.mep.rooms import Partner, Room, ServerFull, Terms

if TYPE_CHECKING:
    from numpy.random import Generator

AGENTS = ("agent", "published", "human_proxy")
INSTRUCTIONS = """You and a partner cook onion soup in a small kitchen. Together, serve as many soups as you can.

Move with the arrow keys or W A S D; the space bar picks up, puts down and uses what you face. Put three onions into a \
pot. When the soup is ready, fetch it with a dish and bring it to the serving counter: 20 points for both of you.

Before each kitchen you try the keys alone. Then you play with several partners, called A, B and so on; each meets you \
with and without changed places. At the end of a kitchen you rank them by how much you liked to play with them. \
Nothing is stored but the games and your ranking. You may stop at any time."""


class Conflict(SextetError):
    """The participant's stage does not allow what was asked."""

    status = 409


class UnknownParticipant(SextetError):
    """No participant has this secret."""

    status = 404


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A study file."""

    title: str = "Overcooked study"
    seed: int = 0
    kitchens: tuple[str, ...] = ()
    """By default all that have agents."""
    partners: tuple[str, ...] = ()
    """Patterns over the labels of agents and human proxies, such as "MEP*"; by default all agents."""
    seats: Literal["both", "one"] = "both"
    """Seats in which each agent is met: both, or one drawn at random."""
    seconds: float = 60.0
    warmup_seconds: float = 30.0
    instructions: str = INSTRUCTIONS
    ranking: bool = True
    participants: int = 1000
    """At most so many."""

    def __post_init__(self) -> None:
        for name in ("seconds", "warmup_seconds"):
            require(10 <= getattr(self, name) <= 300, name, getattr(self, name), "from 10 to 300")
        require(self.seed >= 0, "seed", self.seed, "0 or more")
        require(self.participants >= 1, "participants", self.participants, "1 or more")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A step of the protocol; `letter` is the partner's name for the participant."""

    stage: str
    kitchen: str = ""
    partner: str = ""
    letter: str = ""
    seat: int = 0
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A participant's file: all stages, the present one, the game of each finished one, rankings by kitchen."""

    participant: int
    stages: tuple[Stage, ...]
    at: int = 0
    games: dict[str, str] = field(default_factory=dict)
    rankings: dict[str, list[str]] = field(default_factory=dict)

    @property
    def now(self) -> Stage:
        """The present stage."""
        return self.stages[self.at]

    @property
    def letters(self) -> dict[str, str]:
        """Partners of the present kitchen by letter."""
        here = [stage for stage in self.stages if stage.kitchen == self.now.kitchen and stage.stage == "play"]
        return {stage.letter: stage.partner for stage in sorted(here, key=lambda stage: stage.letter)}

    def view(self) -> dict[str, Any]:
        """Returns what the participant may know."""
        now, plays = self.now, [str(i) for i, stage in enumerate(self.stages) if stage.stage == "play"]
        label = f"Partner {now.letter}" if now.letter else None
        return {
            "stage": now.stage, "text": now.text, "kitchen": now.kitchen or None, "label": label, "seat": now.seat,
            "done": sum(place in self.games for place in plays), "total": len(plays),
            "complete": now.stage not in ("warmup", "play") or str(self.at) in self.games,
            "partners": list(self.letters) if now.stage == "ranking" else [],
        }  # fmt: skip


class Study:
    """The protocol of one study file over the agents that are served; `folder` holds the participants' files."""

    def __init__(self, plan: Plan, folder: Path, kitchens: Mapping[str, Layout], partners: Sequence[Partner]) -> None:
        """Raises UsageError for kitchens or partners that are not served."""
        self.plan, self.folder, self.layouts, self.partners = plan, folder, kitchens, partners
        self.open_games: dict[str, str] = {}
        agents = [partner for partner in partners if partner.kind in AGENTS]
        labels = {agent.label for agent in agents}
        for pattern in plan.partners:
            if not any(fnmatchcase(label, pattern) for label in labels):
                raise UsageError(unknown("partner", pattern, labels))
        self.cast: dict[str, list[str]] = {}
        for kitchen in plan.kitchens or dict.fromkeys(agent.kitchen or "" for agent in agents):
            if kitchen not in kitchens:
                raise UsageError(unknown("kitchen", kitchen, kitchens))
            here = [agent for agent in agents if agent.kitchen == kitchen]
            chosen = [agent.label for agent in here if any(fnmatchcase(agent.label, p) for p in plan.partners)]
            if not plan.partners:
                chosen = [agent.label for agent in here if agent.kind != "human_proxy"]
            if not chosen and plan.kitchens:
                raise UsageError(f"no partner of this study plays {kitchen}; served are: {', '.join(sorted(labels))}")
            self.cast |= {kitchen: chosen} if chosen else {}
        if not self.cast:
            raise UsageError(f"this study has no partners; served are: {', '.join(sorted(labels))}")
        try:
            numbers = [self._read(path.stem).participant for path in folder.glob("*.json")]
        except UnknownParticipant as error:
            raise DataError(f"{folder}: {error}") from error
        self._entered = max(numbers, default=0)

    @classmethod
    def load(cls, path: Path, folder: Path, kitchens: Mapping[str, Layout], partners: Sequence[Partner]) -> Study:
        """Reads a study file; raises SextetError naming each wrong field, kitchen or partner."""
        plan = from_dict(Plan, read_overrides(path), source=str(path))  # type: ignore[type-var]
        try:
            return cls(plan, folder, kitchens, partners)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error

    def stages(self, number: int) -> tuple[Stage, ...]:
        """Returns all stages of a participant: a function of the study and the number."""
        rng, plan = numpy_rng(self.plan.seed, "partner", "study", number), self.plan
        stages = [Stage(stage="instructions", text=plan.instructions)]
        kitchens = list(self.cast)
        for kitchen in (kitchens[place] for place in rng.permutation(len(kitchens))):
            text = f"Warm-up: try the keys, alone, for {plan.warmup_seconds:.0f} seconds. Nothing is counted."
            stages.append(Stage(stage="warmup", kitchen=kitchen, text=text, seat=int(rng.integers(2))))
            stages += self._plays(kitchen, rng)
            if plan.ranking:
                text = "Rank your partners in this kitchen: first the one you liked most to play with."
                stages.append(Stage(stage="ranking", kitchen=kitchen, text=text))
        return (*stages, Stage(stage="done", text="Thank you! That was all; you can close this page."))

    def _plays(self, kitchen: str, rng: Generator) -> list[Stage]:
        labels, plays = self.cast[kitchen], []
        for index, place in enumerate(rng.permutation(len(labels)).tolist()):
            letter = string.ascii_uppercase[index % 26] + (str(index // 26) if index >= 26 else "")
            for seat in (0, 1) if self.plan.seats == "both" else (int(rng.integers(2)),):
                text = f"Play {self.plan.seconds:.0f} seconds with partner {letter}."
                plays.append(
                    Stage(stage="play", kitchen=kitchen, partner=labels[place], letter=letter, seat=seat, text=text)
                )
        return [plays[place] for place in rng.permutation(len(plays))]

    def _read(self, secret: str) -> Progress:
        from pydantic import TypeAdapter, ValidationError

        path = self.folder / f"{secret}.json"
        if GAME_NAME.fullmatch(f"g{secret}") is None or not path.is_file():
            raise UnknownParticipant("no such participant; begin the study anew")
        try:
            return TypeAdapter(Progress).validate_json(read_text(path), strict=True)
        except ValidationError as error:
            raise DataError(f"{path}: not the progress of a participant ({error.errors()[0]['msg']})") from error

    def _write(self, secret: str, progress: Progress) -> Progress:
        write_json(self.folder / f"{secret}.json", asdict(progress))
        return progress

    def enter(self) -> str:
        """Adds a participant and returns its secret; raises ServerFull, or DataError when the disk is full."""
        if self._entered >= self.plan.participants:
            raise ServerFull(f"this study has its {self.plan.participants} participants")
        number, secret = self._entered + 1, token_urlsafe(16)
        self._write(secret, Progress(participant=number, stages=self.stages(number)))
        self._entered = number
        return secret

    def progress(self, secret: str) -> Progress:
        """Returns how far a participant is; raises UnknownParticipant."""
        return self._read(secret)

    def advance(self, secret: str, ranking: Any = None) -> Progress:
        """Moves a participant on; raises Conflict while the stage is not complete."""
        progress = self._read(secret)
        now, letters, rankings = progress.now, progress.letters, dict(progress.rankings)
        if now.stage == "done":
            raise Conflict("the study is over")
        if now.stage in ("warmup", "play") and str(progress.at) not in progress.games:
            raise Conflict("play the game of this stage to its end first")
        if now.stage == "ranking":
            if not isinstance(ranking, list) or sorted(map(str, ranking)) != sorted(letters):
                raise Conflict(f"rank every partner once, the best first: {', '.join(letters)}")
            rankings[now.kitchen] = [letters[letter] for letter in ranking]
        return self._write(secret, replace(progress, at=progress.at + 1, rankings=rankings))

    def finish(self, secret: str, game: str, place: int) -> None:
        """Notes that the game of stage `place` was played to its end."""
        progress = self._read(secret)
        self._write(secret, replace(progress, games={**progress.games, str(place): game}))

    def terms(self, secret: str, progress: Progress, ended: Callable[[Room], Awaitable[None]]) -> Terms:
        """Returns the game of the present stage; raises Conflict if it has none, or has been played."""
        now, warmup = progress.now, progress.now.stage == "warmup"
        if now.stage not in ("warmup", "play") or str(progress.at) in progress.games:
            raise Conflict("this stage has no game to play; go on to the next")
        for partner in self.partners:
            if partner.kind == "nobody" if warmup else (partner.label, partner.kitchen) == (now.partner, now.kitchen):
                seconds = self.plan.warmup_seconds if warmup else self.plan.seconds
                return Terms(
                    layout=self.layouts[now.kitchen], partner=partner, seat=now.seat,
                    steps=round(seconds / TICK_SECONDS), name=f"Participant {progress.participant}",
                    shown="Nobody" if warmup else f"Partner {now.letter}", participant=progress.participant,
                    round="warmup" if warmup else "main", ended=ended,
                )  # fmt: skip
        raise Conflict("the partner of this stage is not served any more; tell the experimenter")
