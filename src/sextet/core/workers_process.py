"""Workers as processes of this machine: a socket pair and a stderr file each, weights in anonymous shared memory.

A worker ends at once when its parent ends, however that happens: a thread of it watches the socket. SIGINT and SIGTERM,
which a terminal or a scheduler sends to the whole group, are left to the parent, which may need its workers to save.
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
import traceback
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from queue import SimpleQueue
from typing import IO, Any

from sextet.core.workers import Event, Job, Workers
from sextet.core.workers_host import Host, thread_limits

STALL_SECONDS = 30
"""A worker that takes or gives no byte of a message for so long counts as dead."""


class _Process:
    """One worker process: ``connection`` to it and the ``errors`` it wrote."""

    def __init__(self, threads: int) -> None:
        ours, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL_SECONDS, 0))
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.errors: IO[bytes] = tempfile.TemporaryFile()
        self.connection = Connection(ours.detach())
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main({theirs.fileno()})"],
                env=os.environ | thread_limits(threads) | {"PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=self.errors,
            )

    def send(self, *message: Any, weights: int | None = None) -> None:
        """Sends a message, and the file of new weights; a worker that does not take it is killed."""
        try:
            self.connection.send((*message, weights is not None))
            if weights is not None:
                send_handle(self.connection, weights, self.popen.pid)
        except OSError:
            self.popen.kill()

    def end(self) -> str:
        """Kills the process, waits for it and returns how it ended and the end of what it wrote to stderr."""
        self.popen.kill()
        code = self.popen.wait()
        self.connection.close()
        with self.errors as stream:
            stream.seek(-min(4096, stream.seek(0, os.SEEK_END)), os.SEEK_END)
            said = stream.read().decode(errors="replace").strip()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"{how}; end of its stderr: {said or 'nothing'}"


def _end(processes: dict[int, _Process], owner: int) -> None:
    """Ends all; not in a forked copy of the parent."""
    while processes and os.getpid() == owner:
        processes.popitem()[1].end()


class ProcessWorkers(Workers):
    """Workers in processes; see the module."""

    def __init__(self, num: int, boot: bytes, limits: Mapping[str, Any]) -> None:
        self._threads: int = limits["threads"]
        self._processes: dict[int, _Process] = {}
        self._end = weakref.finalize(self, _end, self._processes, os.getpid())
        super().__init__(num, boot, limits)

    def _start(self, worker: int) -> None:
        self._processes[worker] = _Process(self._threads)
        self._processes[worker].send(self._boot)

    def _store(self, weights: bytes) -> IO[bytes]:
        if hasattr(os, "memfd_create"):  # freed by the kernel with its last user; no name, so nothing can be left over
            stream: IO[bytes] = os.fdopen(os.memfd_create("sextet-weights"), "w+b")
        else:
            stream = tempfile.TemporaryFile()
        stream.write(weights)
        stream.flush()
        return stream

    def _send(self, worker: int, job: Job, weights: IO[bytes] | None) -> None:
        self._processes[worker].send(job.call, weights=weights.fileno() if weights else None)

    def _wait(self, until: float) -> list[Event]:
        workers = {process.connection: worker for worker, process in self._processes.items()}
        events: list[Event] = []
        for connection in wait(list(workers), max(0.0, min(until - time.monotonic(), 1.0))):
            assert isinstance(connection, Connection)
            worker = workers[connection]
            try:
                events.append((worker, *connection.recv()))
            except (OSError, EOFError):
                events.append((worker, "dead", 0.0, "its process ended"))
        for connection, worker in workers.items():  # a child of a dead worker may keep its socket open
            if self._processes[worker].popen.poll() is not None and not connection.poll():
                events.append((worker, "dead", 0.0, "its process ended"))
        return events

    def _kill(self, worker: int, hung: bool) -> str:
        process = self._processes.pop(worker)
        if hung:  # its stderr tells where
            process.popen.send_signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(0.2)
        return process.end()

    def _alive(self, worker: int) -> bool:
        return worker in self._processes and self._processes[worker].popen.poll() is None


def start(num: int, boot: bytes, limits: Mapping[str, Any], address: str | None) -> ProcessWorkers:
    """Starts ``num`` processes (0: one for each CPU this process may use); :meth:`Workers.open` calls it."""
    return ProcessWorkers(num or len(os.sched_getaffinity(0)), boot, limits)


def main(handle: int) -> None:
    """Runs a worker process on the socket ``handle`` until the parent closes it."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    connection = Connection(handle)
    inbox: SimpleQueue[tuple[bytes, bytes | None]] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox), daemon=True).start()
    host = Host()
    connection.send(host.boot(inbox.get()[0]))
    while True:
        connection.send(host.run(*inbox.get()))


def _listen(connection: Connection, inbox: SimpleQueue[tuple[bytes, Any]]) -> None:
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
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
