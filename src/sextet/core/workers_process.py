"""Workers as processes of this machine: a socket pair and a stderr file each, weights in anonymous memory.

A worker ends with its parent, however that ends: one of its threads watches the socket. SIGINT and SIGTERM, which
terminals and schedulers send to the whole group, are left to the parent, which may need its workers to save.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from queue import SimpleQueue
from typing import IO, Any

from sextet.core.workers import Workers
from sextet.core.workers_host import Event, Host, Job, thread_limits

STALL_SECONDS = 30
"""A worker that takes or gives no byte of a message for so long counts as dead."""


class _Process:
    """One worker process, the ``connection`` to it and the ``errors`` it wrote."""

    def __init__(self, threads: int) -> None:
        ours, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL_SECONDS, 0))
        self.connection = Connection(ours.detach())
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main({theirs.fileno()})"],
                env=os.environ | thread_limits(threads) | {"PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=self.errors,
            )

    def send(self, payload: bytes, weights: IO[bytes] | None) -> None:
        """Sends the bytes of a boot or a call, and the file of new weights; a worker that stalls is killed."""
        try:
            self.connection.send((payload, weights is not None))
            if weights is not None:
                send_handle(self.connection, weights.fileno(), self.popen.pid)
        except OSError:
            self.popen.kill()

    def end(self) -> str:
        """Kills the process; returns how it ended and the end of what it wrote to stderr."""
        self.popen.kill()
        code = self.popen.wait()
        self.connection.close()
        with self.errors:
            size = os.fstat(self.errors.fileno()).st_size
            said = os.pread(self.errors.fileno(), 4096, max(0, size - 4096)).decode(errors="replace").strip()
        return f"{f'signal {-code}' if code < 0 else f'exit code {code}'}; its stderr: {said or 'empty'}"


def _end(processes: dict[int, _Process], weights: list[IO[bytes]]) -> None:
    while processes:
        processes.popitem()[1].end()
    while weights:
        weights.pop().close()


class ProcessWorkers(Workers):
    """Workers in processes; see the module."""

    def __init__(self, num: int, boot: bytes, limits: Mapping[str, Any]) -> None:
        self._threads: int = limits["threads"]
        self._processes: dict[int, _Process] = {}
        self._files: list[IO[bytes]] = []
        self._end = weakref.finalize(self, _end, self._processes, self._files)
        super().__init__(num, boot, limits)

    def _start(self, worker: int) -> None:
        self._processes[worker] = _Process(self._threads)
        self._processes[worker].send(self._boot, None)

    def _store(self, weights: bytes) -> IO[bytes]:
        if hasattr(os, "memfd_create"):  # no name and not in /dev/shm: nothing can be left over, no small limit
            self._files.append(os.fdopen(os.memfd_create("sextet-weights"), "w+b"))
        else:
            self._files.append(tempfile.TemporaryFile())  # noqa: SIM115 - closed below or by _end
        self._files[-1].write(weights)
        self._files[-1].flush()
        while len(self._files) > 1:  # a worker that was sent an older version has its own handle
            self._files.pop(0).close()
        return self._files[0]

    def _send(self, worker: int, job: Job, weights: IO[bytes] | None) -> None:
        self._processes[worker].send(job.call, weights)

    def _wait(self, until: float) -> list[Event]:
        timeout = max(0.0, min(until - time.monotonic(), 1.0))
        ready = wait([process.connection for process in self._processes.values()], timeout)
        events: list[Event] = []
        for worker, process in self._processes.items():
            try:
                if process.connection in ready:
                    events.append((worker, *process.connection.recv()))
                elif process.popen.poll() is not None and not process.connection.poll():
                    raise EOFError  # a child of the dead worker still holds its socket
            except (OSError, EOFError):
                events.append((worker, "dead", 0.0, "its process ended"))
        return events

    def _kill(self, worker: int, hung: bool) -> str:
        process = self._processes.pop(worker)
        if hung:  # it writes to stderr where it is
            process.popen.send_signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(0.2)
        return process.end()

    def _alive(self, worker: int) -> bool:
        return worker in self._processes and self._processes[worker].popen.poll() is None


def start(num: int, boot: bytes, limits: Mapping[str, Any], address: str | None) -> ProcessWorkers:
    """Starts ``num`` processes (0: one for each CPU); called by :meth:`Workers.open`."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ProcessWorkers(num or max(1, cpus // limits["threads"]), boot, limits)


def main(handle: int) -> None:
    """Runs a worker process on the socket ``handle`` until the parent closes it."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    connection, inbox, host = Connection(handle), SimpleQueue[Any](), Host()
    threading.Thread(target=_listen, args=(connection, inbox), daemon=True).start()
    connection.send(host.boot(inbox.get()[0]))
    while True:
        connection.send(host.run(*inbox.get()))


def _listen(connection: Connection, inbox: SimpleQueue[Any]) -> None:
    """Takes messages while the worker works, so that the parent never waits; ends the process with the parent."""
    try:
        while True:
            payload, has_weights = connection.recv()
            weights = None
            if has_weights:
                handle = recv_handle(connection)
                weights = memoryview(mmap.mmap(handle, 0, prot=mmap.PROT_READ))
                os.close(handle)
            inbox.put((payload, weights))
    finally:
        os._exit(1)
