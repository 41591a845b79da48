"""The comparison: every method from the same trunks, over several seeds; a seed draws its own people and cameras.

Each training is a run of its own under `parts/`, so an interrupted comparison goes on where it was.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file
from torch import nn

from sextet.core.errors import UsageError
from sextet.core.files import read_json
from sextet.core.run import Run
from sextet.core.seeding import numpy_rng
from sextet.core.stats import bootstrap_interval, paired_difference
from sextet.core.workers import Workers
from sextet.reid.data import ReIDData, load_data
from sextet.reid.evaluate import evaluate_network, features
from sextet.reid.model import build_model
from sextet.reid.settings import METHODS, Config
from sextet.reid.tables import score
from sextet.report.build import save_figure, save_table

# slowest first, so that workers end together
SLOWEST = ("rmgl", "rmgl_uniform", "rmgl_unshifted", "mgn", "mgn_globals", "wide", "pcb", "bot", "global")
COLUMNS = ("mAP", "rank-1", "mINP", "mAP, re-ranked")
OTHER = "mAP, other cameras"
OTHER_SEED = 1000  # added to a seed for people and cameras that no training of the comparison has seen


def compare(config: Config, run: Run) -> None:
    """Trains all methods and writes the table, the figure and the summary of the comparison."""
    seeds = range(config.seed, config.seed + config.num_seeds)
    methods = sorted(config.compared, key=SLOWEST.index)
    trunks = [("trunk-wide", seed) for seed in seeds if "wide" in methods] + [("trunk", seed) for seed in seeds]
    pieces = [(method, seed) for seed in seeds for method in methods] + [("untrained", seed) for seed in seeds]
    stages = [trunks, pieces] if config.optim.trunk_epochs > 0 else [pieces]
    with (
        Workers.open(
            config.workers, Trainer, (config, str(run.directory.absolute())), threads=config.threads
        ) as workers,
        run.console.task("comparison", sum(map(len, stages))),
    ):
        done = 0
        for stage in stages:
            done = do_all(run, workers, stage, done)
    results = {
        method: [read_json(part_of(run.directory, method, seed) / "summary.json")["summary"] for seed in seeds]
        for method in ("untrained", *config.compared)
    }
    summary = write_tables(config, run, results)
    for method in config.compared:  # what the page offers
        shutil.copytree(
            part_of(run.directory, method, seeds[0]) / "final", run.directory / "models" / method, dirs_exist_ok=True
        )
    for file in (part_of(run.directory, config.shown, seeds[0]) / "artifacts").glob("20-rankings.*"):
        shutil.copy(file, run.artifact(file.name))
    run.say(f"look at its rankings in the browser: sextet serve {run.directory}")
    run.finish(summary, load_file(run.directory / "models" / config.shown / "model.safetensors"))


def part_of(directory: Path, name: str, seed: int) -> Path:
    """The folder of one training."""
    return directory / "parts" / f"{name}-{seed}"


def do_all(run: Run, workers: Workers, pieces: Sequence[tuple[str, int]], done: int) -> int:
    """Does the pieces that are not finished and says how each ended; returns `done` and their number."""
    due = [piece for piece in pieces if not (part_of(run.directory, *piece) / "summary.json").exists()]
    for number, (name, seed) in enumerate(due):
        workers.submit("work", name, seed, key=f"{number:04}-{name}-{seed}")
    waiting, end = len(due), done + len(pieces)
    while waiting:
        run.poll()
        for result in workers.gather(at_least=1, timeout=1.0):
            waiting -= 1
            run.say(str(result.value))
        run.console.update(end - waiting)
    return end


class Trainer:
    """What a worker does: one training or test, in a run of its own."""

    def __init__(self, settings: tuple[Config, str]) -> None:
        self.config, self.directory = settings[0], Path(settings[1])
        torch.set_num_threads(self.config.threads)

    def work(self, name: str, seed: int) -> str:
        """Trains and tests one network, or goes on with it; returns a line for people."""
        from sextet.reid.train import adapt, fit, train_trunk, trunk_weights

        method = {"trunk": "global", "trunk-wide": "wide", "untrained": "mgn"}.get(name, name)
        config = replace(self.config, method=method, seed=seed, workers="inline", track="")  # type: ignore[arg-type]
        directory = part_of(self.directory, name, seed)
        with Run.open(
            config, recipe="mgn", directory=directory, resume=(directory / "config.json").exists(), quiet=True
        ) as part:
            data = load_data(config.data, config.size, seed=seed)
            if name.startswith("trunk"):
                train_trunk(config, part, data)
                return f"{name} of seed {seed}: {part.seconds:.0f} s"
            trunk = None
            if config.optim.trunk_epochs > 0 and name != "untrained":
                trunk = trunk_weights(part_of(self.directory, "trunk-wide" if name == "wide" else "trunk", seed))
            network = build_model(method, config.model, len(data.classes), trunk=trunk, rng=part.rng("init").torch)
            if name != "untrained":
                fit(adapt(config), part, network, data)
            scores = evaluate_network(config, part, network, data)
            if "not tested" in scores:
                raise UsageError(f"{data.name} cannot compare networks: {scores['not tested']}")
            scores |= elsewhere(config, network)
            if name in ("mgn", "rmgl"):
                scores |= by_branch(config, network, data)
            size = sum(parameter.numel() for parameter in network.parameters())
            part.finish({**scores, "parameters": size}, network.state_dict())
            return f"{METHODS.get(name, name)}, seed {seed}: mAP {scores['mAP']['mean']:.1f} %"


def elsewhere(config: Config, network: nn.Module) -> dict[str, float]:
    """Scores a network on people and cameras of another seed, where the data is drawn."""
    if config.data.format != "synthetic":
        return {}
    data = load_data(config.data, config.size, seed=config.seed + OTHER_SEED)
    return {OTHER: mean_ap(config, network, data)}


def by_branch(config: Config, network: nn.Module, data: ReIDData) -> dict[str, float]:
    """Scores the features of each branch alone ("Branch" in MGN's ablation)."""
    scores = {}
    for branch in config.model.branches.split(","):
        if config.method == "rmgl" and branch == "1":
            continue
        alone = build_model(config.method, replace(config.model, test_branch=branch), len(data.classes))
        alone.load_state_dict(network.state_dict())
        scores[f"mAP, branch {branch}"] = mean_ap(config, alone, data)
    return scores


def mean_ap(config: Config, network: nn.Module, data: ReIDData) -> float:
    """mAP in percent without re-ranking."""
    config = replace(config, evaluation=replace(config.evaluation, rerank=False))
    return number(score(config, None, data, *features(config, network, data))["mAP"])


def write_tables(config: Config, run: Run, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Writes the comparison's table and figure; returns the summary: mAP of each method and its gain over global."""
    rows, summary = [], dict[str, Any]()
    values = {
        method: {name: [number(one[name]) for one in each] for name in COLUMNS} for method, each in results.items()
    }
    for method, columns in values.items():
        label = METHODS.get(method, f"{method} network")
        gain: Any = None
        if "global" in values and method not in ("untrained", "global") and config.num_seeds > 1:
            gain = paired_difference(values["global"]["mAP"], columns["mAP"])
            summary[f"{label}, mAP over global"] = gain.as_dict()
        intervals = [bootstrap_interval(columns[name]) for name in COLUMNS]
        summary[f"{label}, mAP"] = intervals[0].as_dict()
        rows.append([label, results[method][0]["parameters"] / 1e6, *intervals, gain])
    data = load_data(config.data, config.size, seed=config.seed)
    save_table(
        run.artifact("00-comparison"),
        title=f"People not seen in training, {data.name} (%)",
        columns=["method", "parameters (M)", *COLUMNS, "mAP over global"],
        rows=[["chance", 0, *chance(config, data), None], *rows],
        note=f"Mean and 95 % interval over {config.num_seeds} seeds; each draws its own people and cameras where the "
        "data is synthetic. Differences are paired by seed. All methods start from the same trunk but the wide one, "
        "which has its own, and train equally long. Parameters include the classifiers of the training people.",
    )
    write_details(run, results)
    figure = Figure(figsize=(7, 0.45 * len(rows) + 0.8), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(reversed(rows)):
        points = values[[*results][len(rows) - 1 - place]]["mAP"]
        axes.plot(points, [place] * len(points), "o", color="#7a8aa0", alpha=0.6)
        axes.plot([row[2].mean], [place], "|", color="black", markersize=16, markeredgewidth=2)
    axes.set(yticks=range(len(rows)), yticklabels=[row[0] for row in reversed(rows)], xlabel="mAP (%)", xlim=(0, 100))
    save_figure(run.artifact("01-comparison"), figure, title="mAP of every seed, and the mean")
    return summary


def write_details(run: Run, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Writes the tables of scores on other cameras and of single branches, where there are any."""

    def over_seeds(method: str, name: str) -> Any:
        return bootstrap_interval([number(one[name]) for one in results[method]])

    rows = []
    for method, each in results.items():
        if OTHER in each[0]:
            change = bootstrap_interval([number(one[OTHER]) - number(one["mAP"]) for one in each])
            rows.append([METHODS.get(method, method), over_seeds(method, "mAP"), over_seeds(method, OTHER), change])
    if rows:
        save_table(
            run.artifact("02-other-cameras"),
            title="On people and cameras of another seed (mAP, %)",
            columns=["method", "own cameras", "other cameras", "change"],
            rows=rows,
        )
    branches = [
        [METHODS[method], name.removeprefix("mAP, "), over_seeds(method, name)]
        for method, each in results.items()
        for name in each[0]
        if name.startswith("mAP, branch") or (name == "mAP" and method in ("mgn", "rmgl"))
    ]
    if branches:
        save_table(
            run.artifact("03-branches"),
            title="Features of one branch of the trained network (mAP, %)",
            columns=["method", "features", "mAP"],
            rows=[[method, "all" if name == "mAP" else name, value] for method, name, value in branches],
        )


def number(value: Any) -> float:
    """The mean of an interval in a summary, or the number itself."""
    return float(value["mean"] if isinstance(value, Mapping) else value)


def chance(config: Config, data: ReIDData) -> list[float]:
    """Scores of features drawn at random."""
    rng = numpy_rng(config.seed, "evaluate", "chance")
    vectors = [rng.standard_normal((len(split.ids), 64)).astype(np.float32) for split in (data.query, data.gallery)]
    query, gallery = (vector / np.linalg.norm(vector, axis=1, keepdims=True) for vector in vectors)
    scores = score(config, None, data, query, gallery)
    return [number(scores[name]) for name in COLUMNS]
