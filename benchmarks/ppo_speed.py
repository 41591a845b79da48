"""Environment steps a second of whole PPO (play and learn), and what is learned in 1 M of them, beside JaxMARL.

    python benchmarks/ppo_speed.py [--peer-python PATH_OF_A_PYTHON_WITH_JAXMARL]

Both train on cramped_room on one core and one thread; CPU seconds count. The peer is measured twice: with the work
per step that we do (actor and critic from one trunk of two layers of 64, two passes over the data, 16 minibatches)
and with its own recommended settings (an actor and a critic of two layers of 64 each, four passes, 4 minibatches),
each at several numbers of games, of which the fastest counts; our repeats are taken in between. Compilation is not
counted. Each sees its own observations: the peer 520 numbers, we the 107 of 400 that can vary. The peer's return is
that of its recommended settings in its own environment, where seats start at other cells and facing anywhere, and
the learning rate reaches zero at the end of the 1 M steps.
Writes results/ppo_speed.json. Takes 6 minutes. The peer's environment:

    pip install --no-deps jaxmarl==0.2.0
    pip install jax flax chex gymnax jaxtyping safetensors pillow matplotlib scipy optax
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[variable] = "1"

import torch  # noqa: E402

from sextet.core.records import environment  # noqa: E402
from sextet.core.seeding import numpy_rng, torch_rng  # noqa: E402
from sextet.mep.config import fast  # noqa: E402
from sextet.mep.overcooked import Layout, Overcooked  # noqa: E402
from sextet.mep.ppo import Learner, collect  # noqa: E402
from sextet.mep.train import self_play  # noqa: E402

LAYOUT, STEPS, SEEDS, REPEATS = "cramped_room", 1_000_000, 3, 5
HERE = Path(__file__).parent
PEER_ENVIRONMENT = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
}
# Source: baselines/IPPO/config/ippo_ff_overcooked.yaml of JaxMARL, but total_steps.
RECOMMENDED = {
    "layout": LAYOUT, "network": "separate", "activation": "tanh", "num_envs": 16, "num_steps": 128,
    "epochs": 4, "minibatches": 4, "rate": 2.5e-4, "total_steps": STEPS, "shaping_steps": 2.5e6, "gamma": 0.99,
    "gae_lambda": 0.95, "clip": 0.2, "entropy_coef": 0.01, "value_coef": 0.5, "max_grad_norm": 0.5,
    "repeats": REPEATS, "repeat_steps": 50_000, "train_seeds": 0,
}  # fmt: skip
SAME_WORK = {**RECOMMENDED, "network": "shared", "activation": "relu", "epochs": 2, "minibatches": 16}
PEERS = {  # settings, (games, steps of each per update)
    "same work per step": (SAME_WORK, ((8, 400), (32, 128), (64, 128), (32, 400), (128, 128), (256, 128))),
    "recommended settings": (RECOMMENDED, ((16, 128), (64, 128), (256, 128))),
}


class Ours:
    """Self-play with the preset fast."""

    def __init__(self, seed: int) -> None:
        self.config, self.seed, self.updates = fast(), seed, 0
        self.learner = Learner(self.config, Layout.load(LAYOUT), torch_rng(seed, "init"))
        self.env = Overcooked(LAYOUT, self.config.ppo.num_envs, horizon=self.config.ppo.horizon)

    def train(self, updates: int) -> float:
        """Plays and learns; returns environment steps per CPU second."""
        began = time.process_time()
        for _ in range(updates):
            self.updates += 1
            rollout = collect(self.env, self.learner.policy, torch_rng(self.seed, "rollout", self.updates))
            rng, none = torch_rng(self.seed, "update", self.updates), torch.zeros(())
            self.learner.update(rollout, none, rng, total_steps=STEPS, context="benchmark")
        return updates * self.config.steps_per_update / (time.process_time() - began)


def train_ours() -> list[dict[str, float]]:
    """Trains each seed for `STEPS`; returns steps, return and CPU seconds."""
    rows = []
    for seed in range(SEEDS):
        run, began = Ours(seed), time.process_time()
        run.train(round(STEPS / run.config.steps_per_update))
        score = self_play(run.config, run.learner.policy, numpy_rng(seed, "evaluate"))
        seconds = time.process_time() - began
        rows.append({"environment_steps": run.learner.env_steps, "return": score, "cpu_seconds": round(seconds, 1)})
    return rows


def measure_peer(python: str, options: dict[str, Any]) -> dict[str, Any]:
    """Runs the peer in its own interpreter on this core."""
    command = [python, str(HERE / "peers" / "jaxmarl_ippo.py"), json.dumps(options)]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=kept | PEER_ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{python} could not run the peer:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peer-python", help="interpreter that can import jaxmarl and optax; without it, only ours")
    peer_python = parser.parse_args().peer_python
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    run = Ours(0)
    run.train(2)  # warms up
    rates = [run.train(4) for _ in range(REPEATS)]
    peers: dict[str, Any] = {}
    for name, (settings, batches) in PEERS.items() if peer_python else ():
        for num_envs, num_steps in batches:
            batch = {"num_envs": num_envs, "num_steps": num_steps}
            learn = name == "recommended settings" and num_envs == RECOMMENDED["num_envs"]
            found = measure_peer(str(peer_python), settings | batch | {"train_seeds": SEEDS * learn})
            found["steps_per_cpu_second"] = round(statistics.median(found["steps_per_cpu_second"]))
            peers.setdefault(name, []).append(batch | found)
            print(f"jaxmarl, {name}, {num_envs} games x {num_steps} steps: {found['steps_per_cpu_second']}", flush=True)
            rates.append(run.train(4))
    ours = {"steps_per_cpu_second": round(statistics.median(rates)), "training": train_ours()}
    ratios = {
        f"ours / jaxmarl, {name}, at its best batch": round(
            ours["steps_per_cpu_second"] / max(row["steps_per_cpu_second"] for row in rows), 2
        )
        for name, rows in peers.items()
    }
    result = {
        "what": "environment steps per CPU second of PPO, play and learn, one core, one thread; return after 1 M steps",
        "layout": LAYOUT,
        "machine": environment(),
        "ours": {**ours, "repeats": [round(rate) for rate in rates]},
        "jaxmarl": peers or "not measured",
        "ratios": ratios,
    }
    path = HERE / "results" / "ppo_speed.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"ours: {ours['steps_per_cpu_second']}, returns {[row['return'] for row in ours['training']]}")
    learned = [row["return"] for rows in peers.values() for found in rows for row in found["training"]]
    print(f"jaxmarl's returns {learned}", *(f"{name}: {ratio}" for name, ratio in ratios.items()), sep="\n")


if __name__ == "__main__":
    main()
