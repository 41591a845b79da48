"""Followers: a process of its own copies the metrics of a run and its parts into a tracker.

Training writes its files and nothing else, so a tracker that is slow, unreachable or broken costs it nothing. Every
step is sent once: the rows a resumed run writes again are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sextet.core.config import flatten
from sextet.core.errors import SextetError, UsageError, unknown
from sextet.core.files import read_json, write_json
from sextet.core.records import parts_of

POLL_SECONDS = 1.0
GRACE_SECONDS = 30.0  # for the tracker to take the last rows once training has ended
_started: list[subprocess.Popen[bytes]] = []  # kept, or Python warns about processes it forgets

# An adapter is made from the run's folder, the id of the tracker's run and config.json. `part` is empty or ends in
# a slash, and the names in `metrics` start with it.


class _TensorBoard:
    def __init__(self, run_dir: Path, run_id: str, record: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.id, self._event, self._summary = run_id, Event, Summary
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        self.close = self._writer.close

    def log(self, step: int, metrics: Mapping[str, float], part: str) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=values)))


class _WandB:
    def __init__(self, run_dir: Path, run_id: str, record: Mapping[str, Any]) -> None:
        import wandb

        settings = {"config": record.get("config"), "dir": str(run_dir), "name": run_dir.name}
        self._run = wandb.init(project="sextet", id=run_id, resume="allow", **settings)
        self.id, self.close, self._defined = run_id, self._run.finish, set[str]()

    def log(self, step: int, metrics: Mapping[str, float], part: str) -> None:
        axis = f"{part}step"  # W&B's own step cannot go back to 0 for the next part
        for name in metrics.keys() - self._defined:
            self._run.define_metric(name, step_metric=axis)
        self._defined.update(metrics)
        self._run.log({**metrics, axis: step})


class _MLflow:
    def __init__(self, run_dir: Path, run_id: str, record: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow, self.close = mlflow, mlflow.end_run
        mlflow.set_experiment("sextet")
        self.id = mlflow.start_run(run_id=run_id or None, run_name=run_dir.name).info.run_id
        if not run_id:
            mlflow.log_params(flatten(record.get("config", {})))

    def log(self, step: int, metrics: Mapping[str, float], part: str) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)


class _Trackio:
    def __init__(self, run_dir: Path, run_id: str, record: Mapping[str, Any]) -> None:
        import trackio

        self.id, self._trackio, self.close = run_id, trackio, trackio.finish
        trackio.init(project="sextet", name=run_id, resume="allow", config=record.get("config"))

    def log(self, step: int, metrics: Mapping[str, float], part: str) -> None:
        self._trackio.log(dict(metrics), step=step)


TRACKERS: dict[str, tuple[Callable[..., Any], str]] = {  # the adapter, and what pip installs
    "tensorboard": (_TensorBoard, '"sextet[track]"'),
    "wandb": (_WandB, "wandb"),
    "mlflow": (_MLflow, "mlflow"),
    "trackio": (_Trackio, "trackio"),
}


class _Tail:
    """Complete new rows of a growing file, without those an earlier session or reading has sent."""

    def __init__(self, path: Path, last: int) -> None:
        self._path, self.last, self._skip, self._offset = path, last, last, 0

    def rows(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yields (step, metrics); starts over when the file was cut back below what was read."""
        if not self._path.exists():
            return
        with self._path.open("rb") as handle:
            if self._offset > handle.seek(0, os.SEEK_END):
                self._offset, self._skip = 0, self.last
            handle.seek(self._offset)
            data = handle.read()
        lines, begun = data[: data.rfind(b"\n") + 1].splitlines(keepends=True), self._offset
        for line in lines:
            self._offset += len(line)
            try:
                row = json.loads(line)
                step = int(row.pop("step"))
            except (ValueError, TypeError, KeyError, AttributeError):
                if begun:  # cut back and grown again between two looks: read all of it once more
                    self._offset, self._skip = 0, self.last
                    return
                continue
            if step > self._skip:
                self.last = max(step, self.last)
                yield step, {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}


def check_tracker(tracker: str) -> None:
    """Raises UsageError for an unknown tracker, or with the pip command for one that is not installed."""
    if tracker not in TRACKERS:
        raise UsageError(unknown("tracker", tracker, TRACKERS))
    if tracker not in sys.modules and importlib.util.find_spec(tracker) is None:
        raise UsageError(f"track = {tracker} needs the package {tracker}: pip install {TRACKERS[tracker][1]}")


def follow(run_dir: Path | str, tracker: str, *, once: bool = False, alive: Callable[[], bool] = lambda: True) -> None:
    """Copies metrics until the run is finished, or, with `once`, what there is now.

    ``tracker.json`` in the run's folder keeps the id of the tracker's run and the last step sent of every part, so
    that a later session continues the same tracker run.

    Args:
        run_dir: The run.
        tracker: tensorboard, wandb, mlflow or trackio.
        once: Stop after one pass.
        alive: Whether training still runs; when it does not, what is left is sent.

    Raises:
        UsageError: An unknown tracker, or its package is missing.
    """
    check_tracker(tracker)
    run_dir = Path(run_dir)
    memory, config = run_dir / "tracker.json", run_dir / "config.json"
    state = read_json(memory) if memory.exists() else {}
    mine = state.setdefault(tracker, {"id": "" if tracker == "mlflow" else uuid.uuid4().hex[:12], "steps": {}})
    adapter = TRACKERS[tracker][0](run_dir, mine["id"], read_json(config) if config.exists() else {})
    mine["id"] = adapter.id
    write_json(memory, state)
    tails: dict[str, _Tail] = {}
    last_pass = once
    while True:
        for name, folder in parts_of(run_dir):
            part = f"{name}/" if name else ""
            tail = tails.setdefault(name, _Tail(folder / "metrics.jsonl", mine["steps"].get(name, -1)))
            for step, metrics in tail.rows():
                adapter.log(step, {part + metric: value for metric, value in metrics.items()}, part)
        sent = {name: tail.last for name, tail in tails.items()}
        if sent != mine["steps"]:
            mine["steps"] = sent
            write_json(memory, state)
        if last_pass:
            adapter.close()
            return
        last_pass = (run_dir / "summary.json").exists() or not alive()
        if not last_pass:
            time.sleep(POLL_SECONDS)


def start_follower(run_dir: Path | str, tracker: str) -> subprocess.Popen[bytes]:
    """Starts a follower of the run in a process of its own, which ends after the run or this process does.

    Raises:
        UsageError: An unknown tracker, or its package is missing.
    """
    check_tracker(tracker)
    command = [sys.executable, "-m", "sextet.core.followers", str(run_dir), tracker, str(os.getpid())]
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
    _started.append(process)
    return process


def main(run_dir: str, tracker: str, parent: str) -> None:
    """Entry of the follower's process; an error is one line in ``follower.log``."""

    def alive() -> bool:
        return os.getppid() == int(parent)

    def stop(text: str) -> None:
        with (Path(run_dir) / "follower.log").open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {tracker}: {' '.join(text.split())}\n")
        os._exit(1)  # without waiting for threads of the tracker, which may hang

    def give_up() -> None:
        while alive():
            time.sleep(POLL_SECONDS)
        time.sleep(GRACE_SECONDS)
        stop("gave up, the last rows were not taken in time")

    if hasattr(os, "nice"):
        os.nice(10)
    threading.Thread(target=give_up, daemon=True).start()
    try:
        follow(run_dir, tracker, alive=alive)
    except Exception as error:  # whatever a tracker raises ends here
        text = str(error) if isinstance(error, SextetError) else f"{type(error).__name__}: {error}"
        stop(f"stopped, training is not affected: {text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
