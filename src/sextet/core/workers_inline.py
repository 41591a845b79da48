"""Workers in this process: deterministic, with a virtual clock for tests of what runs at the same time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sextet.core.workers import Durations, WorkerError, Workers
from sextet.core.workers_host import Event, Host, Job


class _InlineWorkers(Workers):
    """Workers in this process. Tickets run inside gather, one at a time, so that every run is the same.

    With ``durations`` they simulate N parallel ones: a ticket starts at submit if one is idle, with the weights
    of that moment; gather returns the tickets that end first and moves the virtual clock, on which all timeouts
    are. Without, tickets start at gather in the order of their keys and take no virtual time.
    """

    def __init__(self, num: int, boot: bytes, limits: Mapping[str, Any]) -> None:
        self._durations: Durations = limits["durations"]
        self._eager, self._time = self._durations is not None, 0.0
        self._hosts: dict[int, Host] = {}
        self._running: dict[int, tuple[float, Job, Any]] = {}
        super().__init__(num, boot, limits)

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._time

    def _start(self, worker: int) -> None:
        self._hosts[worker] = Host()
        kind, _, failure = self._hosts[worker].boot(self._boot)
        if kind == "failed":
            raise WorkerError("", worker, failure)
        self._slots[worker].ready = True

    def _store(self, weights: bytes) -> bytes:
        return weights

    def _dispatch(self) -> None:
        self._pending.sort(key=lambda job: job.key)
        super()._dispatch()

    def _send(self, worker: int, job: Job, weights: Any) -> None:
        seconds = self._durations(job.key, job.method) if self._durations else 0.0
        self._running[worker] = (self._time + seconds, job, weights)

    def _wait(self, until: float) -> list[Event]:
        ends = [(end, job.key, worker) for worker, (end, job, _) in self._running.items()]
        if not ends or min(ends)[0] > until or (self._eager and until <= self._time):
            self._time = max(self._time, until if until < math.inf else 0.0)
            return []
        self._time, _, worker = min(ends)
        _, job, weights = self._running[worker]
        kind, seconds, payload = self._hosts[worker].run(job.call, weights)
        del self._running[worker]
        return [(worker, kind, self._time - self._slots[worker].since if self._eager else seconds, payload)]

    def _kill(self, worker: int, hung: bool) -> str:
        del self._running[worker], self._hosts[worker]
        return "on the virtual clock"

    def _alive(self, worker: int) -> bool:
        return worker in self._hosts

    def _end(self) -> None:
        self._hosts.clear()
        self._running.clear()


def start(num: int, boot: bytes, limits: Mapping[str, Any], address: str | None) -> Workers:
    """Makes ``num`` workers, one without a number."""
    return _InlineWorkers(num or 1, boot, limits)
