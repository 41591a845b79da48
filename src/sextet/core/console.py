"""Progress for people: a live bar on a terminal, one plain line per interval everywhere else.

Showing progress never stops a run: after a closed pipe or a full disk the console falls silent.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from sextet.core.stats import format_number

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH_SECONDS = 0.25
QUIET_TASK_SECONDS = 1.0
HEADLINES = ("return", "reward", "loss", "map", "accuracy", "success", "entropy")


class _Task:
    def __init__(self, name: str, total: int | None, start: int) -> None:
        self.name, self.total, self.start = name, total, start
        self.step = self.stages = start
        self.began = self.first = time.monotonic()
        self.metrics: Mapping[str, Any] = {}

    def text(self, now: float) -> str:
        """Step, headline metrics, speed and time left."""
        of = f"/{self.total:,}" if self.total else ""
        parts = [f"step {self.step:,}{of}", *headline(self.metrics)]
        speed = (self.step - self.start - 1) / (now - self.first) if now > self.first else 0.0
        if speed > 0:
            parts.append(f"{format_number(speed)} steps/s" if speed >= 0.1 else f"{duration(1 / speed)}/step")
            if self.total and self.total > self.step:
                parts.append(f"about {duration((self.total - self.step) / speed)} left")
        return ", ".join(parts)


class Console:
    """Progress of a run and of its nested stages.

    Args:
        total: Number of stages (or steps) of the whole job, if known.
        quiet: Show nothing.
        stream: Where to write; the default is the process's stderr.
        interval: Seconds between plain lines when the stream is not a terminal.
    """

    def __init__(
        self,
        total: int | None = None,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        interval: float = 10.0,
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._stack = [_Task("", total, 0)]
        self._began, self._saved_at = time.monotonic(), math.nan
        self._terminal = not quiet and _is_terminal(self._stream)
        self._interval = REFRESH_SECONDS if self._terminal else interval
        self._due = math.inf if quiet or self._stream is None else 0.0
        self._live: Any = None

    def update(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Reports the steps done in the innermost task; cheap, so call it at every step.

        Args:
            step: Steps completed so far.
            metrics: Scalars by name; an empty mapping leaves the last ones shown.
        """
        task = self._stack[-1]
        task.step = step
        if metrics:
            task.metrics = metrics
        now = time.monotonic()
        if step == task.start + 1:
            task.first = now  # what comes before the first step is often preparation: speed counts from here
        if now >= self._due:
            self._due = now + self._interval
            self._show(now)

    def say(self, text: str) -> None:
        """Prints a line beside the progress, with the elapsed time."""
        if self._due < math.inf:
            hours, seconds = divmod(int(time.monotonic() - self._began), 3600)
            self._write(f"[{hours}:{seconds // 60:02}:{seconds % 60:02}] {text}")

    def saved(self) -> None:
        """Notes that a checkpoint was written now; its age is shown."""
        self._saved_at = time.monotonic()

    @contextlib.contextmanager
    def task(self, name: str, total: int | None = None, start: int = 0) -> Iterator[None]:
        """A stage that the updates inside it belong to; stages nest ("2/5 population: step 12/80, ...").

        Args:
            name: What is done.
            total: Steps, or the number of stages opened inside.
            start: Steps or stages done before, by an earlier session.
        """
        self._stack[-1].stages += 1
        task = _Task(name, total, start)
        self._stack.append(task)
        try:
            yield
            took = time.monotonic() - task.began
            if took >= QUIET_TASK_SECONDS:
                done = [f"done in {duration(took)}", *headline(task.metrics)]
                self.say(f"{self._where()}: {', '.join(done)}")
        finally:
            self._stack.pop()

    def close(self) -> None:
        """Removes the bar; the console can be used again."""
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError, ValueError):
                live.stop()

    def _where(self) -> str:
        names = []
        for outer, inner in itertools.pairwise(self._stack):
            counted = outer.total and outer.stages <= outer.total and outer.step == outer.start
            names.append(f"{outer.stages}/{outer.total} {inner.name}" if counted else inner.name)
        return " > ".join(names)

    def _show(self, now: float) -> None:
        task, where = self._stack[-1], self._where()
        age = f", saved {duration(now - self._saved_at)} ago" if self._saved_at <= now else ""
        text = (f"{where}: " if where else "") + task.text(now) + age
        if self._terminal:
            self._write(text, bar=(task.step, task.total))
        else:
            self.say(text)

    def _write(self, text: str, bar: tuple[int, int | None] | None = None) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        try:
            if self._terminal:
                self._write_terminal(text, bar)
            else:
                print(text, file=self._stream, flush=True)
        except (OSError, ValueError) as error:
            self._due, self._live = math.inf, None
            if isinstance(error, BrokenPipeError):  # or the flush at exit fails again, and loudly
                with contextlib.suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def _write_terminal(self, text: str, bar: tuple[int, int | None] | None) -> None:
        from rich.console import Console as Terminal
        from rich.live import Live

        if self._live is None:
            terminal = Terminal(file=self._stream)
            options: dict[str, Any] = {"auto_refresh": False, "transient": True}
            self._live = Live(console=terminal, redirect_stdout=_is_terminal(sys.stdout), **options)
            self._live.start()
        if bar is None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._live.update(_bar(text, *bar, width=self._live.console.width), refresh=True)


def _bar(text: str, step: int, total: int | None, *, width: int) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    line = Text(text, no_wrap=True, overflow="crop")
    if not total or width < 80:
        return line
    table = Table.grid(padding=(0, 1))
    table.add_row(ProgressBar(total=total, completed=step, width=20), line)
    return table


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        return False


def headline(metrics: Mapping[str, Any]) -> list[str]:
    """The one or two numbers worth a place on the line: returns and losses first, else the first metric."""
    names = [name for word in HEADLINES for name in metrics if word in name.rpartition("/")[2]]
    chosen = list(dict.fromkeys(names or metrics))[: 2 if names else 1]
    return [f"{name.rpartition('/')[2].replace('_', ' ')} {format_number(float(metrics[name]))}" for name in chosen]


def duration(seconds: float) -> str:
    """Text of a duration: ``0.4 s``, ``45 s``, ``1 min 10 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s".replace(".0 ", " ")
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes < 10 and rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"
