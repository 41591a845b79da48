"""What each rank of the tests of several ranks does: `python ranks.py TASK FOLDER`, under torchrun's variables."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sextet.core.device import World
from sextet.core.run import Run
from sextet.launch import launch
from sextet.reid import train as training
from sextet.reid.config import MGN_PRESETS
from sextet.reid.data import load_data
from sextet.reid.evaluate import evaluate_network, extract
from sextet.reid.heads import Outputs
from sextet.reid.losses import Shares, total_loss
from sextet.reid.model import build_model
from sextet.reid.settings import LossConfig

SMALL = {"height_px": 48, "width_px": 16, "device": "cpu", "save_every": 5}
LOSSES = {
    "triplet": LossConfig(margin=1.2),
    "soft": LossConfig(kind="soft", normalise=True),
    "circle": LossConfig(kind="circle"),
}


def config():
    base = MGN_PRESETS["smoke"]()
    return replace(base, **SMALL, evaluation=replace(base.evaluation, batch=7, rerank=False))


def gradients(world):
    """Gradients of a linear network's weights under each loss, of the batch that all ranks share."""
    found = {}
    for name, loss in LOSSES.items():
        draw = torch.Generator().manual_seed(0)
        inputs, labels = torch.randn(12, 6, generator=draw), torch.arange(6).repeat_interleave(2)
        network = torch.nn.Linear(6, 5, bias=False)
        torch.nn.init.normal_(network.weight, generator=draw)
        model = torch.nn.parallel.DistributedDataParallel(network) if world.size > 1 else network
        own = slice(world.rank * 12 // world.size, (world.rank + 1) * 12 // world.size)
        features = model(inputs[own])
        value, _ = total_loss(
            Outputs([features.repeat(1, 2)], [features], []),
            labels[own],
            loss,
            metric_weight=1.0,
            cosine=False,
            shares=Shares(world.rank, world.size),
        )
        value.backward()
        found[name] = network.weight.grad.numpy()
    return found


def features_of(directory):
    """Features and scores of an untrained network; each rank's normalisations are spoiled but the first's."""
    settings = config()
    with Run.open(settings, recipe="mgn", directory=directory, quiet=True) as run:
        world = run.world
        data = load_data(settings.data, settings.size)
        network = build_model("mgn", settings.model, 12, rng=run.rng("init").torch)
        for buffer in network.buffers():
            if buffer.is_floating_point():
                buffer += 0.5 * world.rank
        scores = evaluate_network(settings, run, network, data, tables=False)
        features = extract(network, data.query.images, batch=7, world=world)
        np.savez(directory / f"rank-{world.rank}.npz", features=features, **gradients(world))
        (directory / f"rank-{world.rank}.json").write_text(json.dumps(scores))


def train(directory, stop_at):
    """Trains the smoke preset, with scores in between; one rank dies at a step, as by a power cut."""
    seen, rank = [], World().rank
    real = training.total_loss

    def spy(outputs, labels, *arguments, **options):
        seen.append(labels.tolist())
        if stop_at and rank == 1 and len(seen) == stop_at:
            os._exit(9)
        return real(outputs, labels, *arguments, **options)

    training.total_loss = spy
    orders, real_prefetch = [], training.prefetch

    def prefetch(images, batches, threads):
        return real_prefetch(images, (orders.append(list(rows)) or rows for rows in batches), threads)

    training.prefetch = prefetch
    fields = {**SMALL, "optim": {"epochs": 0.4}, "evaluation": {"every": 0.2}}
    launch("mgn", "smoke", fields, directory=directory, resume=True, quiet=True)
    (directory / f"rank-{rank}.json").write_text(json.dumps({"orders": orders, "labels": seen}))


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    if sys.argv[1] == "features":
        features_of(folder)
    else:
        train(folder, int(sys.argv[3]) if len(sys.argv) > 3 else 0)
