"""A pool of processes that judge answers, each with limits of time and memory.

A reward may hang, eat memory, raise, exit, fork or print: its answer then gets a verdict without right or wrong and the
failure's name, the process is replaced, and the other answers are judged. Source: our design; the processes are in
`verifier_host`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from sextet.core.errors import DataError, UsageError
from sextet.dapo.rewards import Verdict, check_name
from sextet.dapo.settings import TaskConfig

BOOT_SECONDS = 60.0
"""Longest time of a process to import its reward."""
MOST_CHARACTERS = 1_000_000
"""Longer answers are cut, from their beginning."""
BATCH = 256
"""Most answers that wait in a process."""
MOST_BOOTS = 3

Item = tuple[str, str, Mapping[str, Any]]


class _Process:
    """A judge with its guard: what it was given, in order, and what is still to be written to it."""

    def __init__(self, reward: str, megabytes: int) -> None:
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "sextet.dapo.verifier_host", reward, str(megabytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.stdin, self.stdout = self.popen.stdin.fileno(), self.popen.stdout.fileno()
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.stdout, False)
        self.given: deque[int] = deque()
        self.out, self.rest = memoryview(b""), b""
        self.ready, self.ended, self.spent, self.why = False, False, False, "its process was killed"
        self.deadline = time.monotonic() + BOOT_SECONDS

    def end(self) -> None:
        """Has the guard kill what there is, and waits for it."""
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()
        self.popen.terminate()
        try:
            self.popen.wait(20)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()

    def write(self) -> None:
        """Writes what the pipe takes."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            self.out = self.out[os.write(self.stdin, self.out[:65536]) :]

    def messages(self) -> list[list[Any]]:
        """Returns what has come; ``ended`` is set at the end of all, and where a reward wrote into the pipe."""
        try:
            data = os.read(self.stdout, 1 << 20)
        except BlockingIOError:
            return []
        self.ended = not data
        *lines, self.rest = (self.rest + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            messages = [None]
        if all(isinstance(message, list) and message for message in messages):
            return messages
        self.ended, self.why = True, "it wrote into the verifier's pipe"
        return []


class Verifier:
    """Judges answers by a rule of `rewards` or a user's function, in processes of its own.

    Args:
        reward: Name of a rule, or ``module:function``, called as function(text, right answer, extra).
        seconds: Time of one answer's verdict.
        megabytes: Memory of a process, on top of what importing its reward takes.
        workers: Number of processes.
        failed_reward: Score of an answer whose verdict failed.

    ``counts`` holds the number of failures of each kind: timeout, memory, error, died, nan; ``spent`` the seconds that
    verdicts took. An answer whose process dies is judged once more, in case something else had killed it.

    Raises:
        UsageError: There is no such reward, or it cannot be imported.
    """

    def __init__(
        self, reward: str, *, seconds: float = 5.0, megabytes: int = 2048, workers: int = 1,
        failed_reward: float = -1.0,
    ) -> None:  # fmt: skip
        check_name(reward)
        self.reward, self.seconds, self.megabytes, self.workers = reward, seconds, megabytes, workers
        self.failed_reward = failed_reward
        self.counts: Counter[str] = Counter()
        self.spent = 0.0
        self._pool: list[_Process] = []
        self._selector = selectors.DefaultSelector()
        self._failed_boots = 0
        self._found: dict[int, Verdict] = {}
        self._waiting: deque[int] = deque()
        self._again: set[int] = set()
        self._start()

    @classmethod
    def of(cls, reward: str, settings: TaskConfig) -> Self:
        """Returns one with the limits of the settings."""
        return cls(
            reward, seconds=settings.reward_seconds, megabytes=settings.reward_mb, workers=settings.reward_workers,
            failed_reward=settings.failed_reward,
        )  # fmt: skip

    def verdicts(self, items: Sequence[Item]) -> list[Verdict]:
        """Returns a verdict for each (answer, right answer, extra), in their order.

        Raises:
            UsageError: The reward cannot be imported any more.
            DataError: Its processes cannot be started.
        """
        started = time.monotonic()
        self._start()
        self._found, self._waiting, self._again = {}, deque(range(len(items))), set()
        share = min(BATCH, -(-len(items) // (4 * self.workers)))
        try:
            while len(self._found) < len(items):
                for process in self._pool:
                    if process.ready and not process.given and self._waiting:
                        count = min(share, len(self._waiting))
                        self._give(process, [self._waiting.popleft() for _ in range(count)], items)
                self._turn()
        except BaseException:
            self.close()  # answers on their way would be taken for those of the next call
            raise
        self.spent += time.monotonic() - started
        return [self._found[number] for number in range(len(items))]

    def close(self) -> None:
        """Ends all processes; a later call of `verdicts` starts new ones."""
        while self._pool:
            self._end(self._pool[-1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        """Starts what is missing, and waits until all are ready."""
        try:
            while len(self._pool) < self.workers:
                self._add()
            while not all(process.ready for process in self._pool):
                self._turn()
        except BaseException:
            self.close()
            raise

    def _add(self) -> None:
        process = _Process(self.reward, self.megabytes)
        self._pool.append(process)
        self._selector.register(process.stdout, selectors.EVENT_READ, process)

    def _end(self, process: _Process) -> None:
        self._selector.unregister(process.stdout)
        if process.stdin in self._selector.get_map():
            self._selector.unregister(process.stdin)
        self._pool.remove(process)
        process.end()

    def _give(self, process: _Process, numbers: Sequence[int], items: Sequence[Item]) -> None:
        lines = [
            json.dumps([number, items[number][0][-MOST_CHARACTERS:], items[number][1], dict(items[number][2])])
            for number in numbers
        ]
        process.given.extend(numbers)
        process.out = memoryview("".join(line + "\n" for line in lines).encode())
        process.deadline = time.monotonic() + self.seconds
        self._selector.register(process.stdin, selectors.EVENT_WRITE, process)

    def _turn(self) -> None:
        """Waits for something to happen, and acts on it."""
        for key, _ in self._selector.select(0.2):
            process: _Process = key.data
            if key.fd == process.stdin:
                process.write()
                if not process.out:
                    self._selector.unregister(process.stdin)
            elif process in self._pool:
                for message in process.messages():
                    self._take(process, message)
        now = time.monotonic()
        for process in list(self._pool):
            if process.popen.poll() is not None:
                for message in process.messages():  # its last words
                    self._take(process, message)
                process.ended = True
            if process.ended or process.spent:
                self._lost(process, "died", process.why)
            elif now > process.deadline and (process.given or not process.ready):
                limit = self.seconds if process.ready else BOOT_SECONDS
                self._lost(process, "timeout", f"no verdict within {limit:g} s")

    def _take(self, process: _Process, message: list[Any]) -> None:
        if message[0] == "ready":
            process.ready, self._failed_boots = True, 0
        elif message[0] == "refused":
            raise UsageError(message[1])
        elif message[0] == "died":
            process.why = message[1]
        elif process.given and process.given[0] == message[0]:
            number, score, right, note, failure = message
            process.given.popleft()
            process.deadline = time.monotonic() + self.seconds
            verdict = Verdict(score=score, right=right, note=note)
            self._found[number] = self._failure(failure, note) if failure else verdict
            if failure == "memory":  # what the reward still holds would starve the answers after it
                process.spent = True

    def _lost(self, process: _Process, failure: str, note: str) -> None:
        """Replaces a process; the answer it was at is judged again or fails, those after it are judged by others."""
        given, ready = process.given, process.ready
        self._end(process)
        if not ready:
            self._failed_boots += 1
            if self._failed_boots >= MOST_BOOTS:
                raise DataError(f'the process of the reward "{self.reward}" could not be started: {note}')
        elif given:
            if failure == "died" and not process.spent and given[0] not in self._again:
                self._again.add(given[0])
            elif not process.spent:
                self._found[given.popleft()] = self._failure(failure, note)
            self._waiting.extendleft(reversed(given))
        self._add()

    def _failure(self, failure: str, note: str) -> Verdict:
        self.counts[failure] += 1
        return Verdict(score=self.failed_reward, right=None, note=note, failure=failure)
