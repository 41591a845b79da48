"""Work on `Workers`: one job is one update of one learner, a function of what was published and of a key alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sextet.core.run import Run
from sextet.core.workers import Workers
from sextet.mep.config import Config
from sextet.mep.overcooked import Overcooked

Parts = dict[str, float]
Job = Callable[[Config, Overcooked, Any, int, int], tuple[Any, Parts]]  # (config, games, shared, index, key)


class Updater:
    """What runs in a worker: games of its own, and the settings and states as last published."""

    def __init__(self, config: Config) -> None:
        self.env = Overcooked(config.layout, config.ppo.num_envs, horizon=config.ppo.horizon)

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Takes settings and states."""
        self.config, self.shared = weights["config"], weights["shared"]

    def run(self, job: Job, index: int, key: int) -> tuple[Any, Parts]:
        """Does one job."""
        return job(self.config, self.env, self.shared, index, key)


def open_workers(config: Config) -> Workers:
    """Opens the workers that all stages use: each has games of its own."""
    return Workers.open(config.workers, Updater, config, threads=config.threads)


def run_jobs(
    workers: Workers, job: Job, config: Config, shared: Any, keys: Sequence[int]
) -> tuple[list[Any], list[Parts]]:
    """Publishes what is shared and does the job once for each key; returns the results and what to log, in order."""
    workers.publish({"config": config, "shared": shared})
    for index, key in enumerate(keys):
        workers.submit("run", job, index, key, key=f"{index:06}")
    values = [result.value for result in workers.gather()]
    return [value for value, _ in values], [parts for _, parts in values]


def log_all(run: Run, kind: str, rows: Sequence[Parts]) -> None:
    """Logs the mean of every number over the rows, and the return of each."""
    run.log({f"train/{name}": mean(rows)[name] for name in rows[0]})
    run.log({f"returns/{kind}{index}": row["return"] for index, row in enumerate(rows)})


def mean(rows: Sequence[Parts]) -> Parts:
    """Mean of every number over rows of equal names."""
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
