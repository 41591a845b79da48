"""Metrics: one JSON row per logged step, cut back at resume, so that a resumed run leaves the same file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sextet.core.errors import DataError, DivergenceError

if TYPE_CHECKING:
    import torch


def check_finite(context: str, **values: float | torch.Tensor) -> None:
    """Raises :class:`DivergenceError` naming the first value that is not finite; call it before ``optimiser.step()``.

    Args:
        context: Where this is, for the message: "member 3, update 12".
        **values: Numbers or tensors of any shape; all tensors are checked with one fused flag.
    """
    tensors = {name: value for name, value in values.items() if not isinstance(value, (int, float))}
    if tensors:
        import torch

        flag = torch.stack([tensor.detach().isfinite().all() for tensor in tensors.values()])
        if not bool(flag.all()):
            bad = list(tensors)[int((~flag).nonzero()[0, 0])]
            raise DivergenceError(f"{context}: {bad} is not finite; nothing was applied, the last checkpoint is good")
    for name, value in values.items():
        if name not in tensors and not math.isfinite(value):
            raise DivergenceError(f"{context}: {name} = {value}; nothing was applied, the last checkpoint is good")


class Metrics:
    """Means of logged scalars, written as rows ``{"step": 7, "train/loss": 0.5}`` to ``metrics.jsonl``.

    A row holds the mean of every scalar logged since the last row; half-finished means are part of the state, so the
    rows do not depend on where a run was interrupted. Tensors are fetched only when a row is due. A full disk loses
    rows, with one warning, and never stops the run. Of several ranks only one ``writes``.
    """

    def __init__(self, path: Path, warn: Callable[[str], None], *, writes: bool = True) -> None:
        self.path, self._writes = path, writes
        self._warn = warn
        self._warned = False
        self._pending: dict[str, list[Any]] = {}
        self._handle = path.open("ab", buffering=0)
        self._size = self._handle.tell()

    def log(self, scalars: dict[str, float | torch.Tensor]) -> None:
        """Adds scalars to the means of the current row."""
        pending = self._pending
        for name, value in scalars.items():
            if not isinstance(value, (int, float)):
                value = value.detach() if hasattr(value, "detach") else float(value)
            if name in pending:
                pending[name].append(value)
            else:
                pending[name] = [value]

    def row(self, step: int, reduce: Callable[[dict[str, float]], dict[str, float]] | None = None) -> dict[str, float]:
        """Closes the row of ``step``: writes and returns the means; ``reduce`` averages them over ranks."""
        if not self._pending:
            return {}
        means = {name: sum(float(v) for v in values) / len(values) for name, values in self._pending.items()}
        self._pending = {}
        if reduce is not None:
            means = reduce(means)
        self.write({"step": step, **means})
        return means

    def write(self, row: dict[str, Any]) -> None:
        """Appends one row."""
        if not self._writes:
            return
        data = (json.dumps(row) + "\n").encode()
        try:
            written = self._handle.write(data)
            if written != len(data):
                raise OSError("disk full")
            self._size += len(data)
        except OSError as error:
            self._handle.truncate(self._size)
            if not self._warned:
                self._warned = True
                self._warn(f"{self.path.name}: rows are being lost ({error.strerror or error})")

    def state_dict(self) -> dict[str, Any]:
        """Returns the half-finished row."""
        return {name: [float(value) for value in values] for name, values in self._pending.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the half-finished row."""
        self._pending = {name: list(values) for name, values in state.items()}

    def truncate(self, step: int) -> None:
        """Drops every row of step >= ``step`` and a torn last line."""
        if not self._writes:
            return
        keep = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            row = _parse(line)
            if row is None or row["step"] >= step:
                break
            keep += len(line)
        self._handle.truncate(keep)
        self._size = keep

    def close(self) -> None:
        """Closes the file."""
        self._handle.close()


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Reads the rows of a ``metrics.jsonl``; a torn last line, as a kill can leave, is ignored.

    Raises:
        DataError: A row before the last is not a metrics row (the line is named).
    """
    path = Path(path)
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise DataError(f"{path}:{number}: not a metrics row")
    return rows
