"""What each rank of the tests of several ranks does: `python dapo_ranks.py TASK FOLDER ...`, under torchrun."""

import copy
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from dapo.learning import FakeRun, answered_groups, learner, moved, settings
from dapo.lm import small_decoder
from sextet.core.device import World
from sextet.core.run import Run
from sextet.dapo import train as training
from sextet.dapo.learner import samples_of
from sextet.dapo.model import add_adapters, plain_weights
from sextet.dapo.ranks import Trained, whole
from sextet.launch import launch

CASES = {
    "dapo": {"method": "dapo"},
    "small": {"method": "dapo", "optim": {"micro_tokens": 64}},
    "all": {"method": "grpo", "loss": {"old": "recompute", "kl": 0.1, "entropy": 0.01}, "optim": {"micro_tokens": 300}},
    "gspo": {"method": "gspo", "loss": {"clip_low": 0.02, "clip_high": 0.02}},
    "one": {"method": "dapo", "groups": 1},
    "minibatches": {"method": "grpo", "optim": {"minibatches": 4, "micro_tokens": 64}},
    "adapters": {"method": "dapo", "rank": 4},
}
"""``one`` has fewer rows than ranks; the others have uneven shares."""


def updates(name, world, folder, *, shard):
    """Two updates, a checkpoint, a third update; returns the first gradient, logs and weights, and whether the third
    is the same after a restart."""
    case = dict(CASES[name])
    sampler = small_decoder()
    groups = answered_groups(sampler, flat=(1,), number=case.pop("groups", 8))
    rank = case.pop("rank", 0)
    optim = case.pop("optim", {}) | {"shard": shard}
    config = settings(optim=optim, **case)

    def fresh():
        model = moved(copy.deepcopy(sampler))
        if rank:
            torch.manual_seed(0)
            add_adapters(model, rank, 16)
        return learner(model, config, world)

    found = fresh()
    samples, _ = samples_of(groups, config)
    logs = found.update(samples, FakeRun(step=0))
    tensors = {"gradient": torch.cat([whole(parameter.grad).flatten() for parameter in found.parameters])}
    found.update(samples, FakeRun(step=1))
    tensors |= {f"weights.{key}": value.clone() for key, value in whole(plain_weights(found.model)).items()}

    def saved(part, *, resume):
        with Run.open(config, recipe="dapo", directory=folder / name, resume=resume, quiet=True) as run:
            run.track(policy=Trained(part.model, part.optimiser))
            if resume:
                run.restore()
            else:
                run.step = 2
                run.save()

    saved(found, resume=False)
    again = fresh()
    saved(again, resume=True)
    for part in (found, again):
        part.update(samples, FakeRun(step=2))
    one, other = (whole(plain_weights(part.model)) for part in (found, again))
    return tensors, logs, all(torch.equal(one[key], other[key]) for key in one)


def compute(folder, names, *, shard):
    """Runs the cases on this rank and writes what they give."""
    world = World()
    tensors, records = {}, {}
    for name in names:
        found, logs, same = updates(name, world, folder, shard=shard)
        tensors |= {f"{name}.{key}": value for key, value in found.items()}
        records[name] = {"logs": logs, "same": same}
    save_file(tensors, folder / f"rank-{world.rank}.safetensors")
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(records))


def train(folder, shard, stop_at):
    """Trains the smoke preset; the last rank dies at a step, as by a power cut."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    real, seen = training.Learner.update, []

    def update(self, samples, run):
        seen.append(run.step)
        if stop_at and rank == size - 1 and run.step >= stop_at:  # a step may have nothing to learn from
            os._exit(9)
        return real(self, samples, run)

    training.Learner.update = update
    fields = {
        "device": "cpu", "save_every": 1, "model": {"warm_steps": 300, "width": 32}, "task": {"size": 20},
        "optim": {"steps": 4, "shard": shard, "learning_rate": 1e-3, "minibatches": 2},
        "sampling": {"surplus": "carry", "candidates": 2.0},
    }  # fmt: skip
    launch("dapo", "smoke", fields, directory=folder, resume=True, quiet=True)


if __name__ == "__main__":
    task, where, *more = sys.argv[1:]
    if task == "compute":
        for number, kind in enumerate(("copies", "shards")):
            (Path(where) / kind).mkdir(exist_ok=True)
            compute(Path(where) / kind, more, shard=bool(number))
    else:
        train(Path(where), more[0] == "shards", int(more[1]))
