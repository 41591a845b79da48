"""CPU seconds of MGN beside seathiefwang/MGN-pytorch: a training step, features of images, batch-hard triplets.

    PYTHON benchmarks/reid_training.py --mgn CHECKOUT

PYTHON has sextet and torchvision (`pip install --no-deps torchvision` beside any torch). ResNet-50, 384x128, 751
people, batches of 8 (4 people x 2), classifiers on 256 features on both sides. The peer's step is taken with its
vectorised triplet loss, with SGD as in the paper and with the Adam of its best logged run; ours as our trainer takes
it: channels last, fused optimiser. Features are those of an image and its mirror image; the peer is spared the
gradients that its own test code records. One thread of one process, in turns, median of five after one for warmth.
Writes results/reid_training.json. Takes 5 minutes of an idle core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402
from peers import reid_networks as peers  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from sextet.core.records import environment  # noqa: E402
from sextet.core.seeding import torch_rng  # noqa: E402
from sextet.reid.evaluate import embed  # noqa: E402
from sextet.reid.losses import Shares, batch_hard, total_loss  # noqa: E402
from sextet.reid.model import build_model  # noqa: E402
from sextet.reid.settings import LossConfig, ModelConfig, OptimConfig  # noqa: E402
from sextet.reid.train import make_optimiser  # noqa: E402

PEOPLE, BATCH, SIZE, REPEATS, MARGIN = 751, 8, (384, 128), 5, 1.2
RATES = {"sgd": 1e-3, "amsgrad": 2e-4}  # low, as nothing is pretrained here; time does not depend on them


def medians(runs: dict[str, Callable[[], Any]], *, inner: int = 1) -> dict[str, Any]:
    """Runs each in turn; returns all CPU seconds, their medians, and how many times faster ours is."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(REPEATS + 1):
        for name, run in runs.items():
            began = time.process_time()
            for _ in range(inner):
                run()
            if repeat:
                seconds[name].append((time.process_time() - began) / inner)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "cpu_seconds": {name: [round(value, 6) for value in values] for name, values in seconds.items()},
        "median": {name: round(value, 6) for name, value in middle.items()},
        "peer / ours": round(middle["peer"] / middle["ours"], 3),
    }


def steps(theirs: nn.Module, ours: nn.Module, triplet: nn.Module, optimiser: str) -> dict[str, Callable[[], Any]]:
    """One training step of each."""
    pixels = torch.randn(BATCH, 3, *SIZE, generator=torch_rng(0, "pixels"))
    labels = torch.arange(BATCH // 2).repeat_interleave(2)
    rate, loss_config = RATES[optimiser], LossConfig(margin=MARGIN, metric=2.0)
    own = make_optimiser(ours, OptimConfig(name=optimiser, learning_rate=rate, weight_decay=5e-4))  # type: ignore[arg-type]
    if optimiser == "sgd":
        other: torch.optim.Optimizer = torch.optim.SGD(theirs.parameters(), rate, momentum=0.9, weight_decay=5e-4)
    else:
        other = torch.optim.Adam(theirs.parameters(), rate, weight_decay=5e-4, amsgrad=True)

    def peer() -> None:
        other.zero_grad()
        outputs = theirs(pixels)
        softmax = sum(functional.cross_entropy(logits, labels) for logits in outputs[4:]) / 8
        loss = softmax + 2 * sum(triplet(feature, labels) for feature in outputs[1:4]) / 3
        loss.backward()
        other.step()

    def mine() -> None:
        own.zero_grad()
        outputs = ours(pixels.contiguous(memory_format=torch.channels_last))
        loss, _ = total_loss(outputs, labels, loss_config, metric_weight=1.0, cosine=False, shares=Shares())
        loss.backward()
        own.step()

    return {"peer": peer, "ours": mine}


def features(theirs: nn.Module, ours: nn.Module) -> dict[str, Callable[[], Any]]:
    """Features of a batch of images and their mirror images, of length 1."""
    images = torch.randint(0, 256, (BATCH, 3, *SIZE), generator=torch_rng(1, "pixels")).to(torch.uint8)
    pixels = torch.randn(BATCH, 3, *SIZE, generator=torch_rng(0, "pixels"))

    @torch.no_grad()
    def peer() -> Tensor:
        total = torch.zeros(BATCH, 2048)
        for inputs in (pixels, pixels.index_select(3, torch.arange(SIZE[1] - 1, -1, -1))):
            total = total + theirs(inputs)[0]
        return total.div(total.norm(p=2, dim=1, keepdim=True))

    return {"peer": peer, "ours": lambda: embed(ours, images)}


def triplets(loop: nn.Module) -> dict[str, Callable[[], Any]]:
    """Batch-hard loss of 64 features (16 people x 4), forward and backward."""
    rows = torch.randn(64, 256, generator=torch_rng(2, "features")).requires_grad_()
    labels = torch.arange(16).repeat_interleave(4)

    def run(loss: Callable[[], Tensor]) -> None:
        rows.grad = None
        loss().backward()

    return {
        "peer": lambda: run(lambda: loop(rows, labels)),
        "ours": lambda: run(lambda: batch_hard(rows, labels, MARGIN)),
    }


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mgn", type=Path, required=True, help="checkout of seathiefwang/MGN-pytorch")
    checkout = parser.parse_args().mgn
    torch.set_num_threads(1)
    loop, vectorised = peers.third_party_triplets(checkout)
    theirs = peers.third_party_mgn(checkout, num_classes=PEOPLE)
    ours = build_model("mgn", ModelConfig(backbone="resnet50", classify="reduced"), PEOPLE)
    ours.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    found = {"batch-hard triplets, 64 features": medians(triplets(loop), inner=50)}
    for optimiser in RATES:
        runs = steps(theirs.train(), ours.train(), vectorised, optimiser)
        found[f"training step, {optimiser}"] = medians(runs)
        print(f"training step, {optimiser}: {found[f'training step, {optimiser}']['peer / ours']}", flush=True)
    found["features with mirror images"] = medians(features(theirs.eval(), ours.eval()))
    result = {
        "what": (__doc__ or "").partition("\n")[0],
        "batch": BATCH,
        "size": SIZE,
        "people": PEOPLE,
        "machine": environment(),
        "measured": found,
    }
    path = Path(__file__).parent / "results" / "reid_training.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for name, row in found.items():
        print(name, row["median"], row["peer / ours"])


if __name__ == "__main__":
    main()
