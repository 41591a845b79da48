"""The ablation: the paper's six rows (its table 1), each part added to the one before, on small tasks.

Every row trains at several learning rates, and rows are compared at the best of each. All rows of a seed start from the
same weights. They are compared at equal updates, equal generated tokens, and equal CPU seconds, which are those of
collecting and updating without tests.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from sextet.core.files import read_json
from sextet.core.metrics import read_metrics
from sextet.core.run import Run
from sextet.core.stats import Interval, bootstrap_interval, paired_difference
from sextet.core.workers import Workers
from sextet.dapo.settings import (
    Config,
    EvaluationConfig,
    ModelConfig,
    OptimConfig,
    SamplingConfig,
    TaskConfig,
    filled,
)
from sextet.report.build import save_figure, save_table

ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("naive GRPO", {}, {}),
    "filter": ("+ overlong filtering", {"overlong_filter": True}, {}),
    "higher": ("+ clip-higher", {"clip_high": 0.28, "dual_clip": 10.0}, {}),
    "punish": ("+ soft overlong punishment", {"overlong_filter": False, "overlong_punishment": 1.0}, {}),
    "token": ("+ token-level loss", {"aggregate": "token"}, {}),
    "dapo": ("+ dynamic sampling (DAPO)", {}, {"dynamic": True}),
}
"""Each row by name: how tables call it, and what it changes in the row before, of the loss and of the sampling."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A task of the ablation: its settings, the learning rates that are tried, and the measure."""

    title: str
    config: Config
    rates: tuple[float, ...]
    measure: str
    """Name of the metric, without ``eval/``."""
    rows: tuple[str, ...] = tuple(ROWS)


def benches(base: Config) -> dict[str, Bench]:
    """Returns the tasks; seeds, workers and the like are those of ``base``."""
    common = replace(
        base, method="grpo", samples_kept=0, workers="inline", save_minutes=1e6,
        evaluation=EvaluationConfig(every=5, samples=1, top_p=1.0, problems=400),
    )  # fmt: skip
    groups = SamplingConfig(prompts=32, answers=8, max_tokens=4)
    optim = OptimConfig(steps=100, minibatches=8, weight_decay=0.0)
    table = replace(common, sampling=groups, optim=optim, rollout=replace(base.rollout, slots=1024))
    chain = replace(
        table, task=TaskConfig(name="chain", held_out=256), model=ModelConfig(width=96, layers=3, warm_steps=1500),
        sampling=replace(groups, max_tokens=28, cache_tokens=6), optim=replace(optim, steps=60, minibatches=4),
        evaluation=replace(common.evaluation, every=10, samples=4),
    )  # fmt: skip
    hard = replace(table, task=TaskConfig(name="hard_table"), optim=replace(optim, steps=60))
    return {
        "table": Bench(title="recall table", config=table, rates=(1e-4, 2e-4, 5e-4), measure="p(right)"),
        "hard_table": Bench(
            title="recall table, hard keys", config=hard, rates=(2e-4,), measure="p(right), hard",
            rows=("grpo", "higher", "dapo"),
        ),
        "chain": Bench(title="running sums", config=chain, rates=(1e-4, 3e-4, 1e-3), measure="avg@4"),
        "addition": Bench(
            title="SmolLM2-135M, two-digit addition", config=addition(base), rates=(1e-5,), measure="avg@4",
            rows=("grpo", "dapo"),
        ),
    }  # fmt: skip


def addition(base: Config) -> Config:
    """SmolLM2 learns to add two numbers of two digits."""
    return replace(
        base, method="dapo", workers="inline", save_minutes=1e6, model=ModelConfig(source="smollm2"),
        task=TaskConfig(name="addition", chat=False, shots=3),
        sampling=SamplingConfig(prompts=8, answers=8, max_tokens=4),
        optim=OptimConfig(steps=10, learning_rate=1e-5, minibatches=2, weight_decay=0.0),
        rollout=replace(base.rollout, slots=128), evaluation=EvaluationConfig(every=5, top_p=1.0),
    )  # fmt: skip


def row_config(bench: Bench, row: str, rate: float, seed: int) -> Config:
    """Returns the settings of one training."""
    loss, sampling = filled(bench.config.loss, "grpo"), filled(bench.config.sampling, "grpo")
    for name, (_, of_loss, of_sampling) in ROWS.items():
        loss, sampling = replace(loss, **of_loss), replace(sampling, **of_sampling)
        if name == row:
            break
    optim = replace(bench.config.optim, learning_rate=rate)
    bench_config = replace(bench.config, method="dapo" if row == "dapo" else "grpo")
    return replace(bench_config, seed=seed, loss=loss, sampling=sampling, optim=optim)


def ablate(config: Config, run: Run) -> None:
    """Trains every row at every learning rate and seed, and writes tables and figures."""
    chosen = {name: bench for name, bench in benches(config).items() if name in config.tasks}
    seeds = range(config.seed, config.seed + config.num_seeds)
    tiny = [name for name, bench in chosen.items() if bench.config.model.source == "tiny"]
    starts = [(name, "start", 0.0, seed) for name in tiny for seed in seeds]
    pieces = [
        (name, row, rate, seed)
        for name, bench in chosen.items()
        for seed in seeds
        for row in bench.rows
        for rate in bench.rates
    ]
    with (
        Workers.open(
            config.workers, Trainer, (config, str(run.directory.absolute())), threads=config.threads
        ) as workers,
        run.console.task("ablation", len(starts) + len(pieces)),
    ):
        done = do_all(run, workers, starts, 0)
        do_all(run, workers, pieces, done)
    summary: dict[str, Any] = {}
    for number, (name, bench) in enumerate(chosen.items()):
        summary |= write_bench(run, number, name, bench, seeds)
    run.finish(summary)
    name, bench = list(chosen.items())[-1]
    shown = part_of(run.directory, (name, bench.rows[-1], bench.rates[0], config.seed))
    shutil.copytree(shown / "final", run.directory / "final", dirs_exist_ok=True)
    run.say(f"ask the model, and look at its answers, in the browser: sextet serve {run.directory}")


Work = tuple[str, str, float, int]
"""A piece: task, row (or "start"), learning rate, seed."""


def part_of(directory: Path, piece: Work) -> Path:
    """The folder of a piece."""
    name, row, rate, seed = piece
    return directory / "parts" / (f"{name}-{row}-{rate:g}-{seed}" if row != "start" else f"{name}-start-{seed}")


def do_all(run: Run, workers: Workers, pieces: Sequence[Work], done: int) -> int:
    """Does the pieces that are not finished; returns ``done`` and their number."""
    due = [piece for piece in pieces if not (part_of(run.directory, piece) / "summary.json").exists()]
    for number, piece in enumerate(due):
        workers.submit("work", piece, key=f"{number:05}")
    waiting, end = len(due), done + len(pieces)
    run.console.update(end - waiting)
    while waiting:
        run.poll()
        waiting -= len(workers.gather(at_least=1, timeout=1.0))
        run.console.update(end - waiting)
    return end


class Trainer:
    """What a worker does: one training, in a run of its own."""

    def __init__(self, settings: tuple[Config, str]) -> None:
        self.config, self.directory = settings[0], Path(settings[1])
        torch.set_num_threads(self.config.threads)

    def work(self, piece: Work) -> None:
        """Trains, or goes on with it."""
        from sextet.dapo.train import start_part, train

        name, row, rate, seed = piece
        bench = benches(self.config)[name]
        directory = part_of(self.directory, piece)
        config = row_config(bench, "grpo" if row == "start" else row, rate or 1.0, seed)
        again = (directory / "config.json").exists()
        with Run.open(config, recipe="dapo", directory=directory, resume=again, quiet=True) as part:
            if row == "start":
                start_part(config, part)
                return
            tiny = config.model.source == "tiny"
            train(config, part, start=part_of(self.directory, (name, "start", 0.0, seed)) if tiny else None)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A training: at every test, updates, generated tokens, CPU seconds and the measure in percent."""

    updates: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    measure: np.ndarray

    def at(self, axis: str, value: float) -> float:
        """Returns the measure where an axis reaches a value, between tests by a line."""
        return float(np.interp(value, getattr(self, axis), self.measure))


def read_curve(directory: Path, measure: str) -> Curve:
    """Reads a finished part."""
    rows = read_metrics(directory / "metrics.jsonl")
    points, tokens, seconds = [], 0.0, 0.0
    for row in rows:
        if f"eval/{measure}" in row:
            points.append((row["step"], tokens, seconds, row[f"eval/{measure}"]))
        tokens += row["groups/tokens"]
        seconds += row["time/cpu"]
    last = read_json(directory / "summary.json")["summary"][measure]["mean"]
    points.append((rows[-1]["step"] + 1, tokens, seconds, last))
    updates, used, spent, values = map(np.array, zip(*points, strict=True))
    return Curve(updates=updates, tokens=used, seconds=spent, measure=values)


def write_bench(run: Run, number: int, name: str, bench: Bench, seeds: Sequence[int]) -> dict[str, Any]:
    """Writes the table and the figure of a task; returns what goes into the summary."""
    curves = {
        (row, rate): [read_curve(part_of(run.directory, (name, row, rate, seed)), bench.measure) for seed in seeds]
        for row in bench.rows
        for rate in bench.rates
    }
    half = bench.config.optim.steps // 2
    # the best learning rate of a row is the one with the highest mean after half of the updates
    best = {
        row: max(bench.rates, key=lambda rate: np.mean([c.at("updates", half) for c in curves[row, rate]]))
        for row in bench.rows
    }
    chosen = {row: curves[row, best[row]] for row in bench.rows}
    tokens = min(curve.tokens[-1] for each in chosen.values() for curve in each)
    seconds = min(curve.seconds[-1] for each in chosen.values() for curve in each)
    views: dict[str, Callable[[Curve], float]] = {
        f"after {half} updates": lambda curve: curve.at("updates", half),
        f"after {bench.config.optim.steps} updates": lambda curve: float(curve.measure[-1]),
        f"after {tokens:,.0f} tokens": lambda curve: curve.at("tokens", tokens),
        f"after {seconds:.0f} CPU s": lambda curve: curve.at("seconds", seconds),
    }
    rows, summary, before = [], dict[str, Any](), ""
    for row in bench.rows:
        cells: list[Any] = [ROWS[row][0], f"{best[row]:g}"]
        for view, measure in views.items():
            values = [measure(curve) for curve in chosen[row]]
            cells.append(bootstrap_interval(values))
            if row in ("grpo", "dapo"):
                summary[f"{bench.title}, {ROWS[row][0]}, {view}"] = cells[-1].as_dict()
        step, direction = None, None
        if before and len(seeds) > 1:
            step = paired_difference(*(
                [curve.at("updates", half) for curve in chosen[one]] for one in (before, row)
            ))  # fmt: skip
            direction = read_direction(step)
        rows.append([*cells, step, direction])
        before = row
    if "dapo" in bench.rows and len(seeds) > 1:
        for view, measure in views.items():
            gain = paired_difference(*([measure(curve) for curve in chosen[one]] for one in ("grpo", "dapo")))
            summary[f"{bench.title}, DAPO over GRPO, {view}"] = gain.as_dict()
    save_table(
        run.artifact(f"{number}0-{name}"),
        title=f"{bench.title}: {bench.measure} (%)",
        columns=["row", "learning rate", *views, "over the row before", "direction"],
        rows=rows,
        note=f"Mean and 95 % interval over {len(seeds)} seeds, each row at the best of the learning rates "
        f"{', '.join(f'{rate:g}' for rate in bench.rates)} after {half} updates. Each row adds to the one before, but "
        "soft punishment takes the place of filtering. Differences are paired by seed, after the same updates.",
    )
    write_rates(run, number, name, bench, curves, half)
    draw(run, number, name, bench, chosen)
    return summary


def read_direction(step: Interval) -> str:
    """Says in a word what a difference is."""
    if step.low is None or step.high is None or step.low <= 0 <= step.high:
        return "no clear effect"
    return "better" if step.low > 0 else "worse"


def write_rates(
    run: Run, number: int, name: str, bench: Bench, curves: dict[tuple[str, float], list[Curve]], half: int
) -> None:
    """Writes all learning rates."""
    rows = [
        [
            ROWS[row][0],
            f"{rate:g}",
            bootstrap_interval([curve.measure[0] for curve in each]),
            bootstrap_interval([curve.at("updates", half) for curve in each]),
            bootstrap_interval([curve.measure[-1] for curve in each]),
        ]
        for (row, rate), each in curves.items()
    ]
    save_table(
        run.artifact(f"{number}1-{name}-rates"),
        title=f"{bench.title}: {bench.measure} (%) at every learning rate",
        columns=["row", "learning rate", "start", f"after {half} updates", "at the end"],
        rows=rows,
    )


def draw(run: Run, number: int, name: str, bench: Bench, chosen: dict[str, list[Curve]]) -> None:
    """Draws the curves over updates, tokens and CPU seconds."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for place, (axis, label) in enumerate(
        {"updates": "rollout steps", "tokens": "generated tokens", "seconds": "CPU seconds"}.items()
    ):
        axes = figure.add_subplot(1, 3, place + 1)
        for index, (row, each) in enumerate(chosen.items()):
            end = min(getattr(curve, axis)[-1] for curve in each)
            grid = np.linspace(0, end, 60)
            values = np.array([[curve.at(axis, at) for at in grid] for curve in each])
            axes.plot(grid, values.mean(0), color=f"C{index}", label=ROWS[row][0])
            axes.fill_between(grid, values.min(0), values.max(0), color=f"C{index}", alpha=0.12)
        axes.set(xlabel=label, ylabel=f"{bench.measure} (%)" if not place else None)
    figure.axes[0].legend(fontsize=7)
    save_figure(run.artifact(f"{number}2-{name}-curves"), figure, title=f"{bench.title}: means, and all seeds between")
