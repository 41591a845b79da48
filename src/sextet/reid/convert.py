"""Checkpoints of seathiefwang/MGN-pytorch, a replication of MGN with 256-d classifiers, as networks of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from tyro.conf import Positional

from sextet.core.errors import DataError, UsageError, nearest
from sextet.core.records import write_final
from sextet.reid.config import MGN_PRESETS
from sextet.reid.model import build_model
from sextet.reid.weights import fit_weights, read_weights

PLACES = ((0, 0), (1, 0), (2, 0), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3))
"""Branch and place in it, in our network, of their features 0 to 7: theirs begin with the three whole maps."""
_CLASSIFIERS = ("2048_0", "2048_1", "2048_2", "256_1_0", "256_1_1", "256_2_0", "256_2_1", "256_2_2")
"""Their names; in spite of them all see 256 features."""
_PREFIXES = {
    "backone.0.": "shared.0.0.", "backone.1.": "shared.0.1.", "backone.4.": "shared.0.4.", "backone.5.": "shared.1.",
    "backone.6.": "shared.2.",
    **{f"p{b + 1}.{stage}.": f"branches.{b}.stages.{stage}." for b in range(3) for stage in range(2)},
    **{f"reduction_{k}.0.": f"branches.{b}.reductions.{i}.linear." for k, (b, i) in enumerate(PLACES)},
    **{f"reduction_{k}.1.": f"branches.{b}.reductions.{i}.bn." for k, (b, i) in enumerate(PLACES)},
    **{f"fc_id_{_CLASSIFIERS[k]}.": f"branches.{b}.classifiers.{i}." for k, (b, i) in enumerate(PLACES)},
}  # fmt: skip


def convert_mgn(state: Mapping[str, Tensor], *, source: str = "the checkpoint") -> dict[str, Tensor]:
    """Their state dict -> ours, for a ResNet-50 with ``classify="reduced"``; the biases of their classifiers are lost.

    Features come out in our order: each branch's whole map before its stripes (theirs: all whole maps first).

    Args:
        state: Of their network, possibly inside ``module.`` or ``model.``.
        source: What errors call it.

    Raises:
        DataError: A name that their network does not have.
    """
    found = {}
    for name, value in state.items():
        inner = name.removeprefix("module.").removeprefix("model.")
        prefix = next((prefix for prefix in _PREFIXES if inner.startswith(prefix)), None)
        if prefix is None:
            raise DataError(
                f"{source}: {name} is not of MGN-pytorch{nearest(name, _PREFIXES)}; its names begin with "
                f"{', '.join(sorted({known.partition('.')[0] for known in _PREFIXES})[:4])} and so on"
            )
        ours = _PREFIXES[prefix] + inner.removeprefix(prefix)
        if not (prefix.startswith("fc_id") and name.endswith("bias")):
            found[ours] = value.flatten(1) if ours.endswith("linear.weight") else value
    return found


def convert(
    checkpoint: Positional[Path], /, *, out: Path, pool: Literal["max", "avg"] = "max",
) -> dict[str, Any]:  # fmt: skip
    """Writes a checkpoint of seathiefwang/MGN-pytorch as a folder that everything here reads like a finished run.

    Args:
        checkpoint: Their file, .pt or .pth, or the same as .safetensors.
        out: Folder to write; it must not exist.
        pool: The pooling it was trained with; the file does not say.

    Returns:
        Where it is, the number of people it was trained with, and what was left out.

    Raises:
        DataError: The file is not of that network. UsageError: The folder exists.
    """
    if out.exists():
        raise UsageError(f"{out} exists; choose another folder with --out")
    weights = convert_mgn(read_weights(checkpoint), source=str(checkpoint))
    base = MGN_PRESETS["paper"]()
    config = replace(base, model=replace(base.model, classify="reduced", pool=pool, weights=""))
    people = len(weights.get("branches.0.classifiers.0.weight", ())) or 2
    network = build_model("mgn", config.model, people)
    notes = fit_weights(network, weights, source=str(checkpoint))
    write_final(out, "mgn", config, {"converted from": checkpoint.name}, network.state_dict())
    return {"folder": str(out), "people": people, "notes": [*notes, "biases of the classifiers left out"]}
