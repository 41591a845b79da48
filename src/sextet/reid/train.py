"""Training of every method, top to bottom: `check`, `train`, `fit`.

    batch of P people x K images -> augment -> network -> softmax and triplet losses -> step

With `optim.trunk_epochs` a global network learns a trunk first, from which all branches start: what weights of
ImageNet do for a large network, where there are none.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import replace
from itertools import tee
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sextet.core.config import require
from sextet.core.device import Device, pick_device
from sextet.core.errors import UsageError
from sextet.core.run import Run
from sextet.reid.augment import augment
from sextet.reid.data import ReIDData, load_data
from sextet.reid.evaluate import check_queries, evaluate_network
from sextet.reid.images import prefetch
from sextet.reid.losses import Shares, total_loss
from sextet.reid.model import build_model, build_trunk
from sextet.reid.sampler import PeopleSampler
from sextet.reid.settings import Config, LossConfig, OptimConfig

HEADS = ("reduction", "classifier", "exponent")  # parameters with these in their names begin without a trunk's weights


def check(config: Config) -> None:
    """Raises what would stop the training later or be without effect, such as a wrong size or device."""
    pick_device(config.device)
    methods = config.compared if config.method == "compare" else [config.method]
    for method in methods:
        network = build_model(method, config.model, 2).eval()
        with torch.no_grad():
            network(torch.zeros(1, 3, *config.size))
    idle = config.model.full and not {"global", "wide", "mgn", "mgn_globals"}.isdisjoint(methods)
    advice = "above 0, or nothing trains the reduction of global features; else choose --model.classify reduced"
    require(config.loss.metric > 0 or not idle, "loss.metric", config.loss.metric, advice)
    require(config.loss.softmax > 0, "loss.softmax", config.loss.softmax, "above 0")


def train(config: Config, run: Run) -> None:
    """Trains one network and tests it, or runs the comparison."""
    torch.set_num_threads(config.threads)
    config = adapt(config)
    if config.method == "compare":
        from sextet.reid.compare import compare

        compare(config, run)
        return
    data = load_data(config.data, config.size, seed=config.seed, console=run.console)
    check_queries(config, data)
    for note in data.notes:
        run.say(f"data: {note}")
        run.event("warning", text=note)
    trunk = None
    if config.optim.trunk_epochs > 0:
        part = run.child("trunk")
        if not part.finished:
            train_trunk(config, part, data)
        run.world.barrier()
        trunk = trunk_weights(part.directory)
    network = build_model(config.method, config.model, len(data.classes), trunk=trunk, rng=run.rng("init").torch)
    fit(config, run, network, data)
    scores = evaluate_network(config, run, network, data)
    run.finish(scores, network.state_dict())


def adapt(config: Config) -> Config:
    """The settings with which a method is trained."""
    if config.method == "rmgl_unshifted":
        return replace(config, augment=replace(config.augment, shift=0.0))
    return config


def train_trunk(config: Config, part: Run, data: ReIDData) -> None:
    """Trains the trunk of `config.method` by the softmax loss of a global network and finishes the part."""
    model = replace(config.model, classify="reduced", neck="relu", classifier="linear")
    method = "wide" if config.method == "wide" else "global"
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.set_state(part.rng("init", "trunk").torch.get_state())
        trunk = build_trunk(model, method)
    network = build_model(method, model, len(data.classes), built=trunk, rng=part.rng("init").torch)
    optim = replace(
        config.optim, epochs=config.optim.trunk_epochs, learning_rate=config.optim.trunk_learning_rate,
        schedule="cosine", cosine_start=0.0, warmup=min(1.0, config.optim.trunk_epochs / 10), trunk_rate=1.0, freeze=0,
    )  # fmt: skip
    evaluation = replace(config.evaluation, every=0.0)
    fit(
        replace(config, model=model, optim=optim, loss=LossConfig(metric=0.0), evaluation=evaluation),
        part,
        network,
        data,
    )
    part.finish({"trunk": 1}, trunk.state_dict())


def trunk_weights(part: Path) -> dict[str, Tensor]:
    """Reads the weights of a finished trunk."""
    return load_file(part / "final" / "model.safetensors")


def fit(config: Config, run: Run, network: nn.Module, data: ReIDData) -> None:
    """Trains a network as the settings say; the run's steps are done once, however often it is interrupted.

    Raises:
        UsageError: The data has too few people, or the ranks do not divide a batch's people.
    """
    optim, world = config.optim, run.world
    if optim.people % world.size:
        raise UsageError(f"{world.size} ranks cannot share {optim.people} people a batch: choose a multiple of them")
    device = Device(config.device, config.precision, threads=config.threads, world=world)
    labels = np.searchsorted(data.classes, data.train.ids)
    sampler = PeopleSampler(labels, optim.people, optim.images, epoch=optim.epoch, seed=run.key("data"))
    total = math.ceil(optim.epochs * sampler.batches_per_epoch)
    network.to(device.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimiser = make_optimiser(network, optim)
    run.track(network=network, optimiser=optimiser)
    run.restore()
    for parameter, state in optimiser.state.items():
        for name, value in state.items():
            if value.shape == parameter.shape:  # fused steps need the parameter's order in memory, which files lose
                state[name] = torch.empty_like(parameter, requires_grad=False).copy_(value)
    # without a metric loss at first, the reductions of global features have no gradients to exchange
    model = replicas(network, device, unused=config.model.full and config.loss.ramp_end > 0)
    share = optim.people * optim.images // world.size
    shares, cosine = Shares(world.rank, world.size), config.model.classifier == "cosine"
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    own = slice(world.rank * share, (world.rank + 1) * share)
    order, ahead = tee(sampler[step][own].tolist() for step in range(run.step, total))
    pictures = prefetch(data.train.images, ahead, config.data.readers)
    for step, rows, pixels in zip(run.steps(total), order, pictures, strict=True):
        model.train()
        images = augment(pixels, config.augment, run.rng("update", step, world.rank).torch)
        targets = torch.from_numpy(labels[rows])
        images, targets = device.move((images.contiguous(memory_format=torch.channels_last), targets))
        rate = set_rates(optimiser, optim, step, sampler.batches_per_epoch)
        weight = ramp(step / total, config.loss)
        with device.autocast():
            outputs = model(images)
        loss, parts = total_loss(outputs, targets, config.loss, metric_weight=weight, cosine=cosine, shares=shares)
        norm = device.step(loss, parameters, optimiser, clip=optim.clip, context=f"step {step}")
        run.log({"loss": loss.detach(), **parts, "grad_norm": norm, "learning_rate": rate})
        if run.every(round(config.evaluation.every * sampler.batches_per_epoch)) and step + 1 < total:
            scores = evaluate_network(config, run, network, data, tables=False)
            if "mAP" in scores:
                run.score = float(scores["mAP"]["mean"])
                run.log({"eval/mAP": run.score, "eval/rank-1": float(scores["rank-1"]["mean"])})
    network.eval()


def replicas(network: nn.Module, device: Device, *, unused: bool) -> nn.Module:
    """Returns the network as `device.prepare` does; with `unused`, some parameters may have no gradient in a step."""
    if device.world.size == 1 or not unused:
        return device.prepare(network)
    ids = [device.device.index] if device.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(network, device_ids=ids, find_unused_parameters=True)


def make_optimiser(network: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """Returns the optimiser, with one group for the trunk and one for the heads."""
    groups: list[dict[str, Any]] = [{"params": [], "factor": optim.trunk_rate}, {"params": [], "factor": 1.0}]
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            groups[any(part in name for part in HEADS)]["params"].append(parameter)
    rate, decay = optim.learning_rate, optim.weight_decay
    if optim.name == "sgd":
        return torch.optim.SGD(groups, rate, momentum=0.9, weight_decay=decay, fused=True)
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, rate, weight_decay=decay, fused=True)
    return torch.optim.Adam(groups, rate, weight_decay=decay, amsgrad=optim.name == "amsgrad", fused=True)


def set_rates(optimiser: torch.optim.Optimizer, optim: OptimConfig, step: int, per_epoch: int) -> float:
    """Sets the step sizes of this step; returns that of the heads."""
    rate = optim.learning_rate * schedule(optim, step / per_epoch)
    for index, group in enumerate(optimiser.param_groups):
        group["lr"] = 0.0 if index == 0 and step < optim.freeze else rate * group["factor"]
    return rate


def schedule(optim: OptimConfig, epoch: float) -> float:
    """Factor on the step size at a (fractional) epoch: linear warm-up, then milestones or a cosine."""
    factor = min(1.0, (epoch + 0.01) / optim.warmup) if optim.warmup else 1.0
    if optim.schedule == "steps":
        milestones = sorted(float(part) for part in optim.milestones.split(","))
        return factor * optim.decay ** bisect.bisect_right(milestones, epoch)
    floor = optim.final_rate / optim.learning_rate
    done = max(0.0, epoch - optim.cosine_start) / max(optim.epochs - optim.cosine_start, 1e-9)
    return factor * (floor + (1 - floor) * (1 + math.cos(math.pi * min(1.0, done))) / 2)


def ramp(done: float, loss: LossConfig) -> float:
    """Weight of the metric loss when this share of the training is done."""
    if done >= loss.ramp_end:
        return 1.0
    return max(0.0, (done - loss.ramp_start) / (loss.ramp_end - loss.ramp_start)) if done > loss.ramp_start else 0.0
