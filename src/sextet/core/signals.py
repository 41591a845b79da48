"""Stop signals: the first asks a run to stop at a safe point, the second ends it at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class StopSignals:
    """Counts SIGINT and SIGTERM while somebody listens; handlers are put back afterwards."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[signal.Signals, Any] = {}

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Listens inside the context; nested contexts, and those outside the main thread, change nothing."""
        if self._before or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in self._before:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, _: object) -> None:
        self.count += 1
        if self.count > 1:
            self._restore()
            signal.raise_signal(number)
