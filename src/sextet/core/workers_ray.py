"""Workers as Ray Core actors, on this machine or on a cluster (extra ``ray``).

Ray is told to restart nothing: an actor it restarts comes back without weights. A lost actor, however Ray calls the
loss, is replaced by one made from the factory and the newest weights. A cluster needs sextet and the module of the
factory installed on every node; each worker asks for ``threads`` CPUs.
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
from sextet.core.workers import Workers
from sextet.core.workers_host import Event, Host, Job, thread_limits

try:
    import ray
except ImportError:
    raise missing_extra("ray", "ray", 'workers "ray"') from None


class _Actor(Host):
    def start(self, path: list[str], threads: int, boot: bytes) -> tuple[str, float, Any]:
        os.environ |= thread_limits(threads)
        sys.path += [entry for entry in path if entry not in sys.path]
        return self.boot(boot)


def _end(actors: dict[int, Any], owns_ray: bool) -> None:
    while actors and ray.is_initialized():
        ray.kill(actors.popitem()[1])
    if owns_ray:
        ray.shutdown()


class RayWorkers(Workers):
    """Workers in Ray actors; see the module."""

    def __init__(self, num: int, boot: bytes, limits: Mapping[str, Any], owns_ray: bool) -> None:
        self._threads: int = limits["threads"]
        self._actors: dict[int, Any] = {}
        self._calls: dict[int, Any] = {}
        self._class: Any = ray.remote(num_cpus=self._threads, max_restarts=0)(_Actor)
        self._end = weakref.finalize(self, _end, self._actors, owns_ray)
        super().__init__(num, boot, limits)

    def _start(self, worker: int) -> None:
        self._actors[worker] = self._class.remote()
        self._calls[worker] = self._actors[worker].start.remote(sys.path, self._threads, self._boot)

    def _store(self, weights: bytes) -> Any:
        return ray.put(np.frombuffer(weights, np.uint8))

    def _send(self, worker: int, job: Job, weights: Any) -> None:
        self._calls[worker] = self._actors[worker].run.remote(job.call, weights)

    def _wait(self, until: float) -> list[Event]:
        workers = {call: worker for worker, call in self._calls.items()}
        timeout = max(0.0, min(until - time.monotonic(), 1.0))
        if not workers or not ray.wait(list(workers), timeout=timeout)[0]:
            return []
        events: list[Event] = []
        for call in ray.wait(list(workers), num_returns=len(workers), timeout=0)[0]:
            del self._calls[workers[call]]
            try:
                events.append((workers[call], *ray.get(call)))
            except ray.exceptions.RayError as error:  # the actor died or is unavailable, or its node is
                events.append((workers[call], "dead", 0.0, f"{type(error).__name__}: {error}"))
        return events

    def _kill(self, worker: int, hung: bool) -> str:
        ray.kill(self._actors.pop(worker))
        self._calls.pop(worker, None)
        return f"free in the cluster: {ray.available_resources()}" if hung else ""

    def _alive(self, worker: int) -> bool:
        return worker in self._actors


def start(num: int, boot: bytes, limits: Mapping[str, Any], address: str | None) -> RayWorkers:
    """Starts ``num`` actors (0: as many as CPUs allow) on this process's Ray, that of ``address``, or a new one."""
    owns_ray, quiet = not ray.is_initialized(), {"log_to_driver": False, "logging_level": "ERROR"}
    if owns_ray and address:
        ray.init(address=address, **quiet)
    elif owns_ray:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        cpus = max(os.cpu_count() or 1, num * limits["threads"])
        local = {"address": "local", "_node_ip_address": "127.0.0.1", "include_dashboard": False}
        ray.init(num_cpus=cpus, **local, **quiet)
    num = num or max(1, int(ray.cluster_resources().get("CPU", 1)) // limits["threads"])
    return RayWorkers(num, boot, limits, owns_ray)
