"""Workers: N stateful objects made by a factory, versioned weights, bounded keyed work, restart of what dies.

One interface, three backends: ``inline`` (this process, deterministic, virtual clock), ``process`` (one new
process each), ``ray`` (one Ray actor each). Work is keyed: a ticket sent again after a death gives the same
result, so nothing is lost and nothing counts twice. Everything travels by value on every backend: a result
never shares memory with a worker. Not thread-safe: one thread opens, submits and gathers.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from sextet.core.errors import SextetError, UsageError, missing_extra, nearest
from sextet.core.workers_host import Event, Job, dumps, loads

BOOT_SECONDS = 300.0
"""Longest time a factory may take before its worker counts as hanging."""

Durations = Callable[[str, str], float] | None  # (key, method) -> virtual seconds


class WorkerError(SextetError):
    """The factory or a method raised in a worker; never retried. The text ends with the remote traceback."""

    def __init__(self, key: str, worker: int, detail: str) -> None:
        what = f'ticket "{key}"' if key else "the factory"
        super().__init__(f"{what} failed in worker {worker}: {detail.splitlines()[-1]}\n{detail}")
        self.key, self.worker, self.detail = key, worker, detail


class WorkerLost(SextetError):  # noqa: N818 - the name says what happened
    """A worker died or hung more than ``max_retries`` times (exit code 3). The text ends with its last words."""

    exit_code = 3

    def __init__(self, key: str, worker: int, losses: int, detail: str) -> None:
        super().__init__(f'ticket "{key}" lost its worker {losses} times, the last was {worker}: {detail}')
        self.key, self.worker, self.detail = key, worker, detail


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ticket:
    """Work in flight: its key and the newest version of the weights when it was submitted."""

    key: str
    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A finished ticket: the ``version`` of the weights it used (0: none), its worker, the seconds it took."""

    key: str
    version: int
    worker: int
    seconds: float
    value: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerHealth:
    """State of a worker; ``busy_key``: its ticket; ``last_seen_seconds``: time since it last answered."""

    worker: int
    alive: bool
    restarts: int
    busy_key: str | None
    last_seen_seconds: float


@dataclasses.dataclass(kw_only=True)
class _Slot:
    """A worker as the scheduler sees it; ``since``: start of its ticket or of its boot."""

    since: float
    seen: float
    ready: bool = False
    version: int = 0
    job: Job | None = None
    restarts: int = 0
    losses: int = 0


def parse_spec(spec: str) -> tuple[str, int, str | None]:
    """Returns (backend, number of workers or 0 for its default, address of a Ray cluster or None).

    Raises UsageError for what is no backend, or when Ray is not installed.
    """
    form = re.fullmatch(r"(inline|process|ray)(?::([1-9]\d*))?(?:@(\S+))?", spec)
    if form is None or (form[3] and form[1] != "ray"):
        hint = nearest(re.split("[:@]", spec)[0], ("inline", "process", "ray"))
        raise UsageError(f'workers "{spec}" is not inline[:N], process[:N] or ray[:N][@ADDRESS]{hint}')
    if form[1] == "ray" and importlib.util.find_spec("ray") is None:
        raise missing_extra("ray", "ray", f'workers "{spec}"')
    return form[1], int(form[2] or 0), form[3]


class Workers:
    """N workers behind one queue; make them with :meth:`open`. Source: our design.

    ``num`` workers; ``version`` of the newest weights, 0 before the first; ``stats`` counts workers restarted,
    tickets resubmitted and results refused as stale.
    """

    # What a backend provides. Handles of weights are its own; times are on the clock `now`.
    _start: Callable[[int], None]  # starts a worker; its event "ready" or "failed" follows
    _store: Callable[[bytes], Any]  # keeps the newest weights where workers can reach them; returns a handle
    _send: Callable[[int, Job, Any], None]  # gives a worker a ticket, and new weights or None; never raises
    _wait: Callable[[float], list[Event]]  # new events; without any, waits for one, at most up to that time
    _kill: Callable[[int, bool], str]  # ends a worker (True: it hangs) and returns its last words
    _end: Callable[[], None]  # ends all workers and frees what was stored; may be called again
    _alive: Callable[[int], bool]  # whether it runs, as far as is known without asking it
    _eager = True  # an idle worker starts a ticket at submit, not only in gather

    def __init__(self, num: int, boot: bytes, limits: Mapping[str, Any]) -> None:
        self.num, self.version, self.stats = num, 0, {"restarts": 0, "resubmitted": 0, "stale": 0}
        self._boot, self._max_retries = boot, int(limits["max_retries"])
        self._max_in_flight: int = limits["max_in_flight"] or 1000
        self._timeout: float = limits["timeout_seconds"] or math.inf
        self._max_staleness = math.inf if limits["max_staleness"] is None else limits["max_staleness"]
        self._weights: Any = None
        self._jobs: dict[str, Job] = {}  # in flight: submitted and not yet returned by gather
        self._pending: list[Job] = []
        self._done: dict[str, Result] = {}
        self._errors: list[SextetError] = []
        self._refusal: SextetError | None = None  # what every further call raises
        self._slots = [_Slot(since=self.now, seen=self.now) for _ in range(num)]
        for worker in range(num):
            self._start(worker)

    @staticmethod
    def open(
        spec: str,
        factory: Callable[[Any], Any],
        config: Any,
        *,
        max_in_flight: int | None = None,
        max_retries: int = 3,
        timeout_seconds: float | None = None,
        max_staleness: int | None = None,
        threads: int = 1,
        durations: Durations = None,
    ) -> Workers:
        """Starts the workers that ``spec`` names; process and ray go on starting in the background.

        Without N: one inline worker, else as many as CPUs. Without ADDRESS (as for ``ray.init``) ray uses the
        Ray of this process, or starts a local one that ends at close.

        Args:
            spec: inline, process or ray, each with ``:N`` if wanted, ray also with ``@ADDRESS``.
            factory: top-level function of an importable module; ``factory(config)`` returns the object whose
                methods are called. Its ``load_weights(weights)``, if any, is called before a ticket.
            config: argument of the factory.
            max_in_flight: bound of tickets submitted and not yet gathered; None: 1000.
            max_retries: how often a ticket is sent again after its worker died or hung.
            timeout_seconds: limit of one ticket, then its worker is replaced; None: no limit.
            max_staleness: results of weights more versions old than this are computed again; None: no limit.
            threads: CPU threads of each worker; inline workers use those of the caller.
            durations: inline only: virtual seconds of a ticket, from its key and method.

        Raises:
            UsageError: wrong spec, option or factory, or Ray is not installed.
            WorkerError: the factory raised (inline; the other backends raise it at gather).
        """
        backend, num, address = parse_spec(spec)
        limits = {"max_in_flight": max_in_flight, "timeout_seconds": timeout_seconds, "threads": threads}
        limits |= {"max_retries": max_retries, "max_staleness": max_staleness}
        for name, value in limits.items():
            least = 0 if name in ("max_retries", "max_staleness") else 1e-9
            if value is not None and value < least:
                raise UsageError(f"{name}={value} is too small")
        if durations and backend != "inline":
            raise UsageError(f'durations are for workers "inline", not "{spec}"')
        if backend != "inline" and factory.__module__ == "__main__":
            raise UsageError(f'workers "{spec}" cannot import a factory from a script: move it into a module')
        boot = dumps((factory, config), "the factory, a top-level function, or its config")
        module = importlib.import_module(f"sextet.core.workers_{backend}")
        workers: Workers = module.start(num, boot, {**limits, "durations": durations}, address)
        return workers

    @property
    def now(self) -> float:
        """Seconds on the clock of the workers: monotonic, or virtual on the inline backend."""
        return time.monotonic()

    @property
    def free_slots(self) -> int:
        """How many tickets may be submitted before some are gathered."""
        return self._max_in_flight - len(self._jobs)

    def publish(self, weights: Mapping[str, Any]) -> int:
        """Stores a copy of ``weights``, nested dicts and lists of tensors, arrays, JSON; returns its version.

        Tensors arrive on the CPU. A worker adopts the newest version when it starts a ticket, never during one.
        """
        self._check()
        self._weights = self._store(dumps(dict(weights), "the weights"))
        self.version += 1
        return self.version

    def submit(self, method: str, *args: Any, key: str, **kwargs: Any) -> Ticket:
        """Queues ``method(*args, **kwargs)`` under ``key`` for the next idle worker.

        A ticket beyond the number of workers starts at the next submit or gather after one became idle.

        Raises:
            UsageError: the key is in flight already, no slot is free, or an argument cannot be sent.
        """
        self._check()
        if key in self._jobs:
            raise UsageError(f'ticket "{key}" is in flight already: gather it first or choose another key')
        if self.free_slots < 1:
            raise UsageError(f'no free slot for ticket "{key}": gather some of {len(self._jobs)} in flight first')
        job = Job(key=key, method=method, call=dumps((method, args, kwargs), f'arguments of ticket "{key}"'))
        self._jobs[key] = job
        self._pending.append(job)
        if self._eager:
            self._dispatch()
        return Ticket(key=key, version=self.version)

    def gather(self, at_least: int | None = None, timeout: float | None = None) -> list[Result]:
        """Waits for ``at_least`` results (None: all in flight) or ``timeout`` seconds; returns what is done.

        Sorted by key, each key once. 0 takes what is done (inline tickets run only when results are asked for).
        After an error the other tickets stay in flight for the next gather.

        Raises:
            WorkerError: a method raised, and its ticket is dropped; or the factory raised, which ends all.
            WorkerLost: a ticket lost its worker more than ``max_retries`` times and is dropped; or a worker
                could not be started as often.
        """
        self._check()
        goal = len(self._jobs) if at_least is None else min(at_least, len(self._jobs))
        deadline = math.inf if timeout is None else self.now + timeout
        self._refuse_stale()
        while len(self._done) < goal and self.now < deadline:
            self._turn(deadline)
        if self._eager:
            self._turn(self.now)
        results = [self._done[key] for key in sorted(self._done)]
        self._done.clear()
        for result in results:
            del self._jobs[result.key]
        return results

    def health(self) -> list[WorkerHealth]:
        """Returns the state of each worker as last seen, without waiting."""
        return [
            WorkerHealth(
                worker=worker,
                alive=self._alive(worker),
                restarts=slot.restarts,
                busy_key=slot.job.key if slot.job else None,
                last_seen_seconds=self.now - slot.seen,
            )
            for worker, slot in enumerate(self._slots)
        ]

    def close(self) -> None:
        """Ends the workers and drops what is in flight; may be called again."""
        self._refusal = UsageError("these workers are closed: open new ones")
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._refusal:
            raise self._refusal

    def _dispatch(self) -> None:
        for worker, slot in enumerate(self._slots):
            if self._pending and slot.ready and slot.job is None:
                slot.job, slot.since = self._pending.pop(0), self.now
                self._send(worker, slot.job, self._weights if slot.version < self.version else None)
                slot.version = self.version

    def _turn(self, deadline: float) -> None:
        """Starts what can start, handles events that come before ``deadline``, replaces what hangs."""
        self._dispatch()
        limits = [self._limit(slot) for slot in self._slots]
        for worker, kind, seconds, payload in self._wait(min(deadline, *limits)):
            slot = self._slots[worker]
            slot.seen = self.now
            if kind == "ready":
                slot.ready, slot.losses = True, 0
            elif kind == "dead":
                self._lost(worker, payload)
            elif kind == "failed":
                self._refusal = WorkerError("", worker, payload)
            elif slot.job is not None:
                key, slot.job = slot.job.key, None
                if kind == "error":
                    del self._jobs[key]
                    self._errors.append(WorkerError(key, worker, payload))
                else:
                    used, value = slot.version, loads(payload)
                    self._done[key] = Result(key=key, version=used, worker=worker, seconds=seconds, value=value)
        for worker, limit in enumerate(limits):
            if self.now >= limit and self._limit(self._slots[worker]) == limit:
                self._lost(worker, f"no answer within {limit - self._slots[worker].since:g} s", hung=True)
        self._refuse_stale()
        if self._eager:
            self._dispatch()
        self._check()
        if self._errors:
            raise self._errors.pop(0)

    def _limit(self, slot: _Slot) -> float:
        if slot.ready:
            return slot.since + self._timeout if slot.job else math.inf
        return slot.since + BOOT_SECONDS

    def _lost(self, worker: int, cause: str, *, hung: bool = False) -> None:
        """Replaces ``worker`` and puts its ticket back, unless that happened too often."""
        slot = self._slots[worker]
        cause = f"{cause}; {self._kill(worker, hung)}"
        job, slot.job, slot.ready, slot.version, slot.since = slot.job, None, False, 0, self.now
        slot.restarts += 1
        self.stats["restarts"] += 1
        self._start(worker)
        counted = job or slot  # a worker that dies idle or before it is ready counts for itself
        counted.losses += 1
        if counted.losses > self._max_retries:
            key = job.key if job else next(iter(self._jobs), "")
            self._errors.append(WorkerLost(key, worker, counted.losses, cause))
            if job:
                del self._jobs[job.key]
        elif job:
            self.stats["resubmitted"] += 1
            self._pending.insert(0, job)

    def _refuse_stale(self) -> None:
        for key, result in list(self._done.items()):
            if self.version - result.version > self._max_staleness:
                del self._done[key]
                self._pending.append(self._jobs[key])
                self.stats["stale"] += 1
                self.stats["resubmitted"] += 1
