"""Self-play (SP) with the preset fast on the five kitchens of 2019, several seeds each, beside the published level.

Writes results/selfplay_levels.json. Usage: selfplay_levels.py [seeds] [workers], by default 3 and process:2.
The published level is the mean self-play return of the 2019 study's own agents (Carroll and others, 5 seeds).
"""

import json
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from sextet.core.records import environment
from sextet.core.run import Run
from sextet.core.seeding import numpy_rng
from sextet.core.stats import bootstrap_interval
from sextet.mep.config import fast
from sextet.mep.members import train_population
from sextet.mep.train import self_play

KITCHENS = {  # name: (environment steps, published self-play return)
    "cramped_room": (1.5e6, 198.8),
    "asymmetric_advantages": (3e6, 167.2),
    "coordination_ring": (3e6, 190.8),
    "forced_coordination": (3e6, 151.9),
    "counter_circuit": (3e6, 122.3),
}


def measure(layout, steps, seeds, workers, folder):
    """Trains the seeds side by side; returns their returns over 100 games, wall and CPU seconds."""
    base = fast()
    config = replace(base, layout=layout, method="sp", workers=workers)
    config = replace(config, population=replace(base.population, size=seeds, steps=steps, alpha=0.0))
    cpu = sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    started = time.perf_counter()
    with Run.open(config, recipe="mep", directory=Path(folder) / layout, quiet=True) as run:
        population = train_population(config, run)
    wall = time.perf_counter() - started
    cpu = sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) - cpu
    scores = [self_play(config, population.policy(config, seed), numpy_rng(seed, "evaluate")) for seed in range(seeds)]
    return scores, wall, cpu


def main():
    """Measures every kitchen, prints a line for each and writes the JSON file."""
    torch.set_num_threads(1)
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    workers = sys.argv[2] if len(sys.argv) > 2 else "process:2"
    results = {"machine": environment(), "seeds": seeds, "workers": workers, "games": 100, "kitchens": {}}
    with tempfile.TemporaryDirectory() as folder:
        for layout, (steps, published) in KITCHENS.items():
            scores, wall, cpu = measure(layout, steps, seeds, workers, folder)
            interval = bootstrap_interval(scores)
            results["kitchens"][layout] = {
                "environment_steps": steps,
                "published": published,
                "returns": scores,
                "interval": interval.as_dict(),
                "wall_seconds_all_seeds": round(wall, 1),
                "cpu_seconds_all_seeds": round(cpu, 1),
            }
            print(f"{layout}: {interval} (published {published}), {wall:.0f} s for {seeds} seeds", scores, flush=True)
    path = Path(__file__).with_name("results")
    path.mkdir(exist_ok=True)
    path.joinpath("selfplay_levels.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
