"""The run: one directory and everything that cuts across a training, behind few verbs.

The shape of every recipe's ``train(config, run)``::

    run.track(model=model, optimiser=optimiser)     # anything with state_dict() and load_state_dict()
    for step in run.steps(config.num_steps):        # restores, reseeds, logs, saves, honours stop signals
        loss = ...
        run.log(loss=loss)
    run.finish(summary={...}, weights=model.state_dict())

A run killed at any moment and resumed gives the same weights and the same metrics file as one that was not.
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sextet.core import checkpoint
from sextet.core.config import RunConfig, check_resumable, difference, to_dict
from sextet.core.console import Console
from sextet.core.device import World
from sextet.core.errors import DataError, DivergenceError, Interrupted, UsageError
from sextet.core.files import atomic_write_text, read_json, write_json
from sextet.core.metrics import Metrics
from sextet.core.records import environment, lock_directory, write_final
from sextet.core.seeding import Rng, key, numpy_rng, reseed_default, torch_rng
from sextet.core.signals import StopSignals

if TYPE_CHECKING:
    import torch

SAVE_ATTEMPTS = 3
AGREE_EVERY = 8  # steps between the ranks' agreement on a stop signal


class Stateful(Protocol):
    """What can be tracked: state of tensors and JSON values that can be taken and put back, on all ranks together."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Puts a state back."""


class _Shared:
    """What a run and its parts have in common: console, ranks, stop signals and lock."""

    def __init__(self, console: Console, world: World) -> None:
        self.console, self.world = console, world
        self.stop = StopSignals()
        self.lock: Any = None


class Run:
    """One run directory. Made by :meth:`Run.open`; a context manager that records how it ended."""

    def __init__(self, directory: Path, config: RunConfig, recipe: str, shared: _Shared, path: tuple[str, ...]) -> None:
        self.directory, self.config, self.recipe = directory, config, recipe
        self.seed = config.seed
        self.step = 0
        self.score: float | None = None
        self._shared, self._path = shared, path
        self._tracked: dict[str, Stateful] = {}
        self._restored = False
        self._failed_saves = 0
        self._saved_at = self._started_at = time.monotonic()
        self._saving_seconds = self._seconds_before = 0.0
        directory.mkdir(parents=True, exist_ok=True)
        self._metrics = Metrics(
            directory / "metrics.jsonl",
            lambda text: self.event("warning", text=text),
            writes=shared.world.is_main,
        )

    @classmethod
    def open(
        cls,
        config: RunConfig,
        *,
        recipe: str,
        directory: Path | str,
        preset: str = "",
        preset_config: RunConfig | None = None,
        resume: bool = False,
        force: bool = False,
        quiet: bool = False,
    ) -> Run:
        """Opens a new run directory, or with ``resume`` one that exists.

        Args:
            config: The resolved configuration.
            recipe: Name of the recipe, kept in ``config.json``.
            directory: Where everything goes.
            preset: Name of the preset the configuration started from.
            preset_config: That preset, for the record of what was changed.
            resume: Continue the run in ``directory``.
            force: Resume with settings that change the result; recorded in ``events.jsonl``.
            quiet: No progress on the console.

        Raises:
            UsageError: The directory is used already, by a run or by a live process, or settings differ at resume.
        """
        directory = Path(directory)
        record = directory / "config.json"
        if record.exists() and not resume:
            raise UsageError(f"{directory} already holds a run: `sextet resume {directory}`, or choose another --name")
        if resume and not record.exists():
            raise UsageError(f"{directory} holds no run (no config.json)")
        world = World(cuda=config.device.startswith("cuda"))
        shared = _Shared(Console(quiet=quiet or not world.is_main), world)
        if world.is_main:
            shared.lock = lock_directory(directory)
        run = cls(directory, config, recipe, shared, ())
        try:
            if resume:
                run._resumed(read_json(record), force)
            elif world.is_main:
                run._record(preset, preset_config)
            if config.track and world.is_main:
                from sextet.core.followers import start_follower

                start_follower(directory, config.track)
        except BaseException:
            run.close()
            raise
        return run

    def _record(self, preset: str, preset_config: RunConfig | None) -> None:
        values = to_dict(self.config)
        changed = difference(to_dict(preset_config), values) if preset_config else {}
        write_json(self.directory / "env.json", environment())
        atomic_write_text(self.directory / "command.txt", shlex.join(sys.argv) + "\n")
        document = {"recipe": self.recipe, "preset": preset, "config": values, "changed": changed}
        write_json(self.directory / "config.json", document)

    def _resumed(self, before: dict[str, Any], force: bool) -> None:
        if before["recipe"] != self.recipe:
            raise UsageError(f'{self.directory} is a run of recipe "{before["recipe"]}", not "{self.recipe}"')
        pair = before["config"], to_dict(self.config)
        changed = difference(*pair) if force else check_resumable(type(self.config), *pair)
        self.event("resumed", changed=changed, forced=force)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.event("ended", error=f"{type(error).__name__}: {error}", step=self.step)
        self.close()

    def close(self) -> None:
        """Closes files and, for the whole run, the console and the lock."""
        self._metrics.close()
        if not self._path:
            self._shared.console.close()
            if self._shared.lock is not None:
                self._shared.lock.release()

    # --- places and random streams ---

    @property
    def console(self) -> Console:
        """The progress display shared by the run and its parts."""
        return self._shared.console

    @property
    def world(self) -> World:
        """The ranks of the run."""
        return self._shared.world

    @property
    def finished(self) -> bool:
        """Whether :meth:`finish` was reached, in this process or an earlier one."""
        return (self.directory / "summary.json").exists()

    @property
    def summary(self) -> dict[str, Any]:
        """What :meth:`finish` recorded; empty before."""
        summary: dict[str, Any] = read_json(self.directory / "summary.json")["summary"] if self.finished else {}
        return summary

    def child(self, name: str) -> Run:
        """Returns a part of this run with its own folder, steps, checkpoints and metrics under ``parts/<name>``.

        Parts let long work be done in pieces: the caller skips a part that is ``finished``.
        """
        return Run(self.directory / "parts" / name, self.config, self.recipe, self._shared, (*self._path, name))

    def artifact(self, name: str) -> Path:
        """Returns the path of a file under ``artifacts/``; its folder exists."""
        path = self.directory / "artifacts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def key(self, *path: int | str) -> int:
        """Returns the 63-bit key of a random stream of this run or part."""
        return key(self.seed, *self._path, *path)

    def rng(self, *path: int | str) -> Rng:
        """Returns numpy and torch generators of a random stream of this run or part."""
        full = (*self._path, *path)
        return Rng(numpy_rng(self.seed, *full), torch_rng(self.seed, *full))

    # --- what happened ---

    def say(self, text: str) -> None:
        """Prints a line beside the progress."""
        self.console.say(text)

    def event(self, name: str, **fields: Any) -> None:
        """Appends a row to ``events.jsonl``; never raises."""
        row = json.dumps({"event": name, "time": round(time.time(), 3), **fields}, default=str) + "\n"
        with (
            contextlib.suppress(OSError),
            (self.directory / "events.jsonl").open("a", encoding="utf-8") as handle,
        ):
            handle.write(row)

    def log(self, scalars: Mapping[str, float | torch.Tensor] | None = None, /, **named: float | torch.Tensor) -> None:
        """Adds scalars to the row of this step; names with slashes go in the mapping."""
        self._metrics.log({**(scalars or {}), **named})

    def every(self, interval: int) -> bool:
        """Returns whether this step (counted from 1) is a multiple of ``interval``; never when it is 0."""
        return interval > 0 and (self.step + 1) % interval == 0

    # --- stopping ---

    def signals(self) -> AbstractContextManager[None]:
        """Returns the context that listens to SIGINT and SIGTERM: the first asks to stop, the second ends at once.

        :meth:`steps` does this itself; wrap longer work around it in this and call :meth:`poll` there.
        """
        return self._shared.stop.listen()

    def poll(self) -> None:
        """Raises :class:`Interrupted` after a stop signal; call it in long loops outside of :meth:`steps`."""
        if self._shared.stop.count:
            root = Path(*self.directory.parts[: len(self.directory.parts) - 2 * len(self._path)])
            raise Interrupted(f"stopped by a signal; everything is saved. Continue with: sextet resume {root}")

    # --- steps, saving, restoring ---

    def track(self, **parts: Stateful) -> None:
        """Names what a checkpoint holds.

        Raises:
            TypeError: A state holds something that is neither tensor nor JSON value (found now, not at the first save).
        """
        for name, part in parts.items():
            checkpoint.split_state(part.state_dict(), {}, name)
            self._tracked[name] = part

    def restore(self) -> int:
        """Loads the newest valid checkpoint, if any, and cuts the metrics back; returns the step to do next."""
        self._restored = True
        if not self.world.is_main:
            self.world.barrier()  # rank 0 has set damaged checkpoints aside before the others look
        newest = checkpoint.load_newest(self.directory / "checkpoints", self._quarantined)
        if self.world.is_main:
            self.world.barrier()
        if newest is not None:
            parts, manifest = newest
            own = parts.pop("run")
            if parts.keys() != self._tracked.keys():
                raise DataError(
                    f"{self.directory}: the checkpoint holds {sorted(parts)}; tracked are {sorted(self._tracked)}"
                )
            for name, state in parts.items():
                self._tracked[name].load_state_dict(state)
            self.step = manifest["step"]
            self._metrics.load_state_dict(own["metrics"])
            self._seconds_before, self._saving_seconds = own["seconds"], own["saving_seconds"]
            self.event("restored", step=self.step)
        self._metrics.truncate(self.step)
        return self.step

    def _quarantined(self, step: int, reason: str) -> None:
        self.event("quarantined", step=step, reason=reason)
        self.say(f"checkpoint {step} is damaged ({reason}); set aside, trying the one before")

    def steps(self, total: int) -> Iterator[int]:
        """Yields the steps still to do, up to ``total``; around each: reseed, log, check, save, honour signals.

        Raises:
            DivergenceError: A logged loss is not finite; no checkpoint is made of it.
            DataError: Three saves in a row failed.
            Interrupted: A stop signal came; the step was finished and saved.
        """
        if not self._restored:
            self.restore()
        config, world, rank = self.config, self.world, self.world.rank
        self._saved_at = time.monotonic()
        with self.signals(), self.console.task("/".join(self._path) or self.recipe, total, start=self.step):
            while self.step < total:
                step = self.step
                agree = step % AGREE_EVERY == 0 or world.size == 1
                if agree and world.any(self._shared.stop.count > 0):
                    self._shared.stop.count = max(self._shared.stop.count, 1)
                    self.save()
                    self.poll()
                reseed_default(self.seed, *self._path, "step", step, rank)
                yield step
                self.step = step + 1
                means: dict[str, float] = {}
                if self.step % config.log_every == 0 or self.step == total:
                    means = self._metrics.row(step, world.mean if world.size > 1 else None)
                    self._check(means)
                self.console.update(self.step, means)
                if self.step < total and self._due():
                    self.save()
            self.save()
        self.poll()

    def _check(self, means: Mapping[str, float]) -> None:
        for name, value in means.items():
            if "loss" in name and not math.isfinite(value):
                raise DivergenceError(f"step {self.step}: {name} = {value}; the last checkpoint is good")

    def _due(self) -> bool:
        every = self.config.save_every
        if every and self.step % every == 0:
            return True
        due = time.monotonic() - self._saved_at >= 60 * self.config.save_minutes
        if self.world.size > 1:
            return self.step % AGREE_EVERY == 0 and self.world.any(due)
        return due

    def save(self) -> None:
        """Writes a checkpoint of the completed steps now (rank 0; the other ranks wait).

        Raises:
            DataError: This was the third failed save in a row, or a stop signal waits for it.
        """
        self._saved_at = started = time.monotonic()
        parts = {name: part.state_dict() for name, part in self._tracked.items()}  # sharded parts need every rank
        if self.world.is_main and parts:
            own = {
                "metrics": self._metrics.state_dict(),
                "seconds": self.seconds,
                "saving_seconds": self._saving_seconds,
            }
            root = self.directory / "checkpoints"
            info = {} if self.score is None else {"score": self.score}
            try:
                checkpoint.save(root, self.step, {**parts, "run": own}, info=info)
                self._failed_saves = 0
                checkpoint.retain(root, self.config.keep)
            except DataError as error:
                self._failed_saves += 1
                self.event("save failed", step=self.step, error=str(error))
                self.say(f"warning: {error}")
                if self._failed_saves >= SAVE_ATTEMPTS or self._shared.stop.count:
                    raise
            self.console.saved()
        self.world.barrier()
        self._saving_seconds += time.monotonic() - started

    @property
    def seconds(self) -> float:
        """Seconds of work in this run or part, over all its sessions."""
        return self._seconds_before + time.monotonic() - self._started_at

    def finish(self, summary: Mapping[str, Any], weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Writes ``final/`` (weights, configuration, model card) and, last, ``summary.json``."""
        if not self.world.is_main:
            return
        summary = dict(summary)
        if weights is not None:
            write_final(self.directory / "final", self.recipe, self.config, summary, weights)
        timing = {"seconds": round(self.seconds, 3), "saving_seconds": round(self._saving_seconds, 3)}
        self.event("finished", steps=self.step, **timing)
        write_json(
            self.directory / "summary.json",
            {"state": "finished", "steps": self.step, **timing, "summary": summary},
        )
