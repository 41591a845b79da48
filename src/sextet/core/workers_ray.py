"""Workers as Ray Core actors, on this machine or on a cluster (extra ``ray``).

Ray restarts no actor by itself: a restarted one would have fresh state and no weights. A lost actor, whatever Ray calls
the loss (died, unavailable, node gone), is replaced by one made from the factory and the newest weights. On a cluster,
sextet and the factory's module must be installed on every node; each worker asks for ``threads`` CPUs.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from sextet.core.errors import missing_extra
from sextet.core.workers import Event, Job, Workers
from sextet.core.workers_host import Host, thread_limits

try:
    import ray
except ImportError:
    raise missing_extra("ray", "ray", 'workers "ray"') from None


class _Actor(Host):
    def start(self, path: list[str], threads: int, boot: bytes) -> tuple[str, float, str]:
        os.environ |= thread_limits(threads)
        sys.path += [entry for entry in path if entry not in sys.path]
        return self.boot(boot)


def _end(actors: dict[int, Any], owns_ray: bool) -> None:
    if not ray.is_initialized():
        return
    for actor in actors.values():
        ray.kill(actor)
    actors.clear()
    if owns_ray:
        ray.shutdown()


class RayWorkers(Workers):
    """Workers in Ray actors; see the module."""

    def __init__(self, num: int, boot: bytes, limits: Mapping[str, Any], owns_ray: bool) -> None:
        self._threads: int = limits["threads"]
        self._actors: dict[int, Any] = {}
        self._calls: dict[int, Any] = {}
        self._class = ray.remote(num_cpus=self._threads, max_restarts=0)(_Actor)
        self._end = weakref.finalize(self, _end, self._actors, owns_ray)
        super().__init__(num, boot, limits)

    def _start(self, worker: int) -> None:
        actor = self._actors[worker] = self._class.remote()
        self._calls[worker] = actor.start.remote(sys.path, self._threads, self._boot)

    def _store(self, weights: bytes) -> Any:
        return ray.put(np.frombuffer(weights, np.uint8))

    def _send(self, worker: int, job: Job, weights: Any) -> None:
        self._calls[worker] = self._actors[worker].run.remote(job.call, weights)

    def _wait(self, until: float) -> list[Event]:
        workers = {call: worker for worker, call in self._calls.items()}
        events: list[Event] = []
        if not workers or not ray.wait(list(workers), timeout=max(0.0, min(until - time.monotonic(), 1.0)))[0]:
            return events
        for call in ray.wait(list(workers), num_returns=len(workers), timeout=0)[0]:
            worker = workers[call]
            del self._calls[worker]
            try:
                events.append((worker, *ray.get(call)))
            except ray.exceptions.RayError as error:
                events.append((worker, "dead", 0.0, f"{type(error).__name__}: {error}"))
        return events

    def _kill(self, worker: int, hung: bool) -> str:
        ray.kill(self._actors.pop(worker))
        self._calls.pop(worker, None)
        return ""

    def _alive(self, worker: int) -> bool:
        return worker in self._actors


def start(num: int, boot: bytes, limits: Mapping[str, Any], address: str | None) -> RayWorkers:
    """Starts ``num`` actors (0: as many as the CPUs allow) on the Ray of this process, of ``address``, or a new one."""
    owns_ray = not ray.is_initialized()
    if owns_ray:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address:
            ray.init(address=address, **quiet)
        else:
            cpus = max(os.cpu_count() or 1, num * limits["threads"])
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
    num = num or max(1, int(ray.cluster_resources().get("CPU", 1)) // limits["threads"])
    return RayWorkers(num, boot, limits, owns_ray)
