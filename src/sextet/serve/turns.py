"""Model calls behind routes: a few at a time in threads, a short queue before them, and a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from fastapi import HTTPException

P = ParamSpec("P")
T = TypeVar("T")


class Turns:
    """Runs functions in threads, `at_once` of them together, while at most `queue` more wait."""

    def __init__(self, *, at_once: int = 4, queue: int = 16, seconds: float = 30.0) -> None:
        self.at_once, self.queue, self.seconds = at_once, queue, seconds
        self._threads = ThreadPoolExecutor(at_once, "turn")
        self._pending: set[Future[Any]] = set()

    async def __call__(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Returns what the function returns.

        A call that has begun cannot be stopped: after the time limit it keeps its place until it ends.

        Raises:
            HTTPException: 429 when the queue is full, 503 after `seconds` of waiting and work.
        """
        if len(self._pending) >= self.at_once + self.queue:
            raise HTTPException(429, "the server is busy; try again in a few seconds", {"Retry-After": "5"})
        future = self._threads.submit(function, *arguments, **named)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        try:
            async with asyncio.timeout(self.seconds):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            text = f"this took more than {self.seconds:.0f} seconds and was given up; try again later"
            raise HTTPException(503, text, {"Retry-After": "30"}) from None

    @property
    def gauges(self) -> Mapping[str, Callable[[], float]]:
        """How many calls run and wait, for /metrics."""
        return {
            "sextet_calls_running": lambda: min(len(self._pending), self.at_once),
            "sextet_calls_waiting": lambda: max(len(self._pending) - self.at_once, 0),
        }

    async def close(self) -> None:
        """Drops the calls that wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)
