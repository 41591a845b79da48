"""DAPO on the recall table (preset fast) with one thing changed, several seeds, paired with plain DAPO by seed.

- curriculum: prompts by their expected spread; how many groups are generated for one that is trained on?
- asynchronous: generation runs up to 4 steps ahead, with truncated importance sampling; what does it cost in quality?

Writes results/dapo_variants.json. Usage: dapo_variants.py [seeds], by default 5.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sextet.core.files import read_json, write_json
from sextet.core.metrics import read_metrics
from sextet.core.records import environment
from sextet.core.run import Run
from sextet.core.stats import bootstrap_interval, paired_difference
from sextet.dapo.config import fast, resolve
from sextet.dapo.train import start_part, train

BASE = replace(fast(), samples_kept=0)
VARIANTS = {
    "DAPO": BASE,
    "curriculum 1": replace(BASE, sampling=replace(BASE.sampling, curriculum=1.0)),
    "curriculum 2": replace(BASE, sampling=replace(BASE.sampling, curriculum=2.0)),
    "4 steps ahead": replace(
        BASE, workers="process:1", rollout=replace(BASE.rollout, staleness=4),
        loss=replace(BASE.loss, importance="truncate"),
    ),
}  # fmt: skip


def measure(config, directory, start):
    """Trains once; returns the final p(right) in percent, groups generated for a kept one, tokens, and staleness."""
    with Run.open(config, recipe="dapo", directory=directory, quiet=True) as run:
        train(config, run, start=start)
    rows = read_metrics(directory / "metrics.jsonl")
    kinds = ("mixed", "right", "wrong", "failed")
    groups = sum(row.get(f"groups/{kind}", 0.0) for row in rows for kind in kinds)
    return {
        "p(right)": read_json(directory / "summary.json")["summary"]["p(right)"]["mean"],
        "p(right) before": next(row["eval/p(right)"] for row in rows if "eval/p(right)" in row),
        "groups for a kept one": groups / sum(row["groups/trained"] for row in rows),
        "tokens": sum(row.get("groups/tokens", 0.0) for row in rows),
        "staleness": float(np.mean([row["async/staleness"] for row in rows if "async/staleness" in row])),
        "staleness, most": max(row.get("async/staleness_max", 0.0) for row in rows),
    }


def main():
    """Measures all variants, prints a line for each and writes the file."""
    torch.set_num_threads(1)
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    found = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            start = Path(folder) / f"start-{seed}"
            config = resolve(replace(BASE, seed=seed))
            with Run.open(config, recipe="dapo", directory=start, quiet=True) as part:
                start_part(config, part)
            for name, variant in VARIANTS.items():
                result = measure(replace(variant, seed=seed), Path(folder) / f"{name}-{seed}", start)
                found[name].append(result)
                print(seed, name, {key: round(value, 3) for key, value in result.items()}, flush=True)
    results = {"machine": environment(), "seeds": seeds, "variants": {}}
    for name, each in found.items():
        values = {key: [one[key] for one in each] for key in each[0]}
        plain = {key: [one[key] for one in found["DAPO"]] for key in each[0]}
        results["variants"][name] = {
            "by seed": values,
            "intervals": {key: bootstrap_interval(one).as_dict() for key, one in values.items()},
            "over DAPO": {
                key: paired_difference(plain[key], values[key]).as_dict()
                for key in ("p(right)", "groups for a kept one")
            },
        }
        print(name, {key: str(bootstrap_interval(one)) for key, one in values.items()})
    write_json(Path(__file__).with_name("results") / "dapo_variants.json", results)


if __name__ == "__main__":
    main()
