"""Cost of the core: import, help, an idle step, a metrics row, a save. Writes results/core_overhead.json."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from sextet.core import checkpoint
from sextet.core.config import RunConfig
from sextet.core.metrics import Metrics
from sextet.core.records import environment
from sextet.core.run import Run

REPEATS = 7


def seconds(command):
    """Wall seconds of a whole process."""
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def spread(values):
    """Median, least and largest of several measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def steps(folder):
    """Microseconds of a step that does nothing but log one scalar, and of one that does not even log."""
    run = Run.open(RunConfig(save_minutes=1e6), recipe="none", directory=folder, quiet=True)
    run.track(model=torch.nn.Linear(1, 1))
    silent, logged = [], []
    started = time.perf_counter()
    for step in run.steps(2000 * REPEATS):
        if step % 2000 == 999:
            silent.append((time.perf_counter() - started) * 1e3)
            started = time.perf_counter()
        if step % 2000 == 1999:
            logged.append((time.perf_counter() - started) * 1e3)
            started = time.perf_counter()
        if step % 2000 >= 1000:
            run.log(loss=1.0)
    run.close()
    return spread(silent), spread(logged)


def rows(folder):
    """Microseconds of a metrics row of twelve scalars."""
    metrics = Metrics(Path(folder) / "metrics.jsonl", print)
    values = {f"train/value_{index}": index / 7 for index in range(12)}
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for step in range(1000):
            metrics.log(values)
            metrics.row(step)
        times.append((time.perf_counter() - started) * 1e3)
    return spread(times)


def saves(folder):
    """Seconds to save and to load a model of 24 million parameters with its Adam state (292 MB)."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1742, 1742) for _ in range(8)))
    optimiser = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1742)).sum().backward()
    optimiser.step()
    save, load = [], []
    for step in range(3):
        started = time.perf_counter()
        path = checkpoint.save(Path(folder), step, {"model": model.state_dict(), "optimiser": optimiser.state_dict()})
        save.append(time.perf_counter() - started)
        started = time.perf_counter()
        checkpoint.load(path)
        load.append(time.perf_counter() - started)
    return spread(save), spread(load)


def main():
    """Measures everything, prints it and writes the JSON file."""
    torch.set_num_threads(1)
    bare = [seconds([sys.executable, "-c", "pass"]) for _ in range(REPEATS)]
    imported = [seconds([sys.executable, "-c", "import sextet"]) for _ in range(REPEATS)]
    helped = [seconds([sys.executable, "-m", "sextet", "train", "mep", "--help"]) for _ in range(REPEATS)]
    with tempfile.TemporaryDirectory() as folder:
        silent, logged = steps(Path(folder) / "run")
        row = rows(folder)
        save, load = saves(Path(folder) / "checkpoints")
    result = {
        "machine": environment(),
        "import_seconds": spread([value - min(bare) for value in imported]),
        "help_seconds": spread(helped),
        "silent_step_microseconds": silent,
        "logged_step_microseconds": logged,
        "metrics_row_microseconds": row,
        "save_292_mb_seconds": save,
        "load_292_mb_seconds": load,
        "save_share_of_run_at_ten_minutes": save["median"] / 600,
    }
    text = json.dumps(result, indent=1)
    print(text)
    Path(__file__).with_name("results").mkdir(exist_ok=True)
    Path(__file__).with_name("results").joinpath("core_overhead.json").write_text(text + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
