"""The agents of the 2019 study as partners: self-play, population-based training, and PPO beside a cloned human.

Their repository (HumanCompatibleAI/human_aware_rl, branch neurips2019, folder web_models) holds one agent for each
method and kitchen as a TensorFlow.js graph: `model.json` and one file of raw float32 numbers. Only its list of names,
shapes and types is read; nothing of the graph is run. The network is `Policy(layout, "planes20_legacy", "conv")` in
other axes: theirs sees (width, height, planes) and unscaled counts of onions and cooking steps. The exports have no
value head, so an imported policy's value is always 0.

The cloned human beside which the exported PPO_BC agents trained is that of the test games (there "ppo_bc_test"), so
with a human proxy of the test games they show about what can be had, not how well an agent meets a stranger.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sextet.core.errors import DataError
from sextet.core.files import read_json
from sextet.mep.overcooked import LAYOUTS, Layout
from sextet.mep.policy import NUM_ACTIONS, Policy

METHODS = {"ppo_sp": "SP", "pbt": "PBT", "ppo_bc": "PPO_BC"}
_FILE, _HEAD = "group1-shard1of1", "ppo2_model/pi/"
_LAYERS = ("conv_initial", "conv_0", "conv_1", "dense", "dense_1", "dense_2")  # in the order of Policy.weights


def find_published(folder: Path | None = None) -> dict[str, Path]:
    """Returns the agents' folders by name, such as "ppo_sp_cramped_room", sorted; empty where there are none.

    Looks in `folder`, else in `overcooked/agents` of the data folder: that of the environment variable SEXTET_DATA,
    or `../shared/data` beside a source checkout.
    """
    data = os.environ.get("SEXTET_DATA") or Path(__file__).parents[2].parent.parent / "shared" / "data"
    folder = folder or Path(data) / "overcooked" / "agents"
    names = (f"{method}_{layout}" for method in METHODS for layout in LAYOUTS)
    return {name: folder / name for name in sorted(names) if (folder / name / "model.json").is_file()}


def load_published(folder: Path | str) -> Policy:
    """Reads the agent of a folder named METHOD_KITCHEN; the kitchen is taken from this name.

    Raises:
        DataError: A file is missing, damaged or not finite, or is of another network; the text names it.
    """
    folder = Path(folder)
    allowed = [f"{method}_{layout}" for method in METHODS for layout in LAYOUTS]
    if folder.name not in allowed:
        raise DataError(f"{folder}: the folder's name must be one of {', '.join(allowed)}")
    (layout,) = (name for name in LAYOUTS if folder.name.endswith(name))
    policy = Policy(Layout.load(layout), "planes20_legacy", "conv")
    _, height, width = policy.input_shape
    theirs = _read(folder, _shapes(width, height))
    ours: list[Tensor] = []
    for layer in _LAYERS:
        kernel = theirs[f"{layer}/kernel"]
        if layer == "dense":  # after the convolutions the cells are flattened in the order x, y, map
            kernel = kernel.reshape(width - 2, height - 2, 25, 64).permute(2, 1, 0, 3).flatten(0, 2)
        ours.append(kernel.permute(*reversed(range(kernel.dim()))))  # (x, y, in, out) -> (out, in, y, x)
    ours[0] = ours[0] / policy.scale.view(policy.input_shape)[:, :1, :1]  # theirs saw the counts themselves
    with torch.no_grad():
        for place, (layer, weight) in enumerate(zip(_LAYERS, ours, strict=True)):
            policy.weights[place].copy_(weight)
            policy.biases[place].copy_(theirs[f"{layer}/bias"])
        for parameter, head in ((policy.weights[-1], theirs["w"].T), (policy.biases[-1], theirs["b"])):
            parameter.zero_()[:NUM_ACTIONS].copy_(head)
    return policy


def _shapes(width: int, height: int) -> dict[str, list[int]]:
    """Names and shapes of an export's tensors, without the scope's name."""
    kernels = [[5, 5, 20, 25], [3, 3, 25, 25], [3, 3, 25, 25]]
    kernels += [[25 * (width - 2) * (height - 2), 64], [64, 64], [64, 64]]
    shapes = {f"{layer}/kernel": shape for layer, shape in zip(_LAYERS, kernels, strict=True)}
    shapes |= {f"{layer}/bias": [shape[-1]] for layer, shape in zip(_LAYERS, kernels, strict=True)}
    return shapes | {"w": [64, NUM_ACTIONS], "b": [NUM_ACTIONS], "flatten/Reshape/shape": [2]}


def _read(folder: Path, expected: dict[str, list[int]]) -> dict[str, Tensor]:
    """Returns the tensors of an export by name; raises DataError for any that is missing, unknown or misshapen."""
    about, path = folder / "model.json", folder / _FILE
    listed = _listed(about, read_json(about))
    for name, (shape, kind) in listed.items():
        wanted = expected.get(name)
        dtype = "int32" if name.endswith("/shape") else "float32"
        if (shape, kind) != (wanted, dtype):
            raise DataError(f'{about}: tensor "{name}" is {kind} {shape}; expected {dtype} {wanted or "none"}')
    if missing := expected.keys() - listed.keys():
        raise DataError(f'{about}: no tensor "{min(missing)}" for this kitchen\'s network')
    sizes = [math.prod(shape) for shape, _ in listed.values()]
    try:
        if path.stat().st_size != 4 * sum(sizes):
            raise DataError(f"{path}: {path.stat().st_size:,} bytes; model.json lists {4 * sum(sizes):,}")
        numbers = np.fromfile(path, "<f4")  # the one integer tensor, a shape, is not used
    except OSError as error:
        raise DataError(f"{path}: cannot read ({error.strerror})") from error
    pieces = zip(listed.items(), np.split(numbers, np.cumsum(sizes)[:-1]), strict=True)
    tensors = {name: torch.from_numpy(piece.reshape(shape)) for (name, (shape, _)), piece in pieces}
    if bad := [name for name, tensor in tensors.items() if expected[name] != [2] and not tensor.isfinite().all()]:
        raise DataError(f'{path}: tensor "{bad[0]}" is not finite')
    return tensors


def _listed(about: Path, model: Any) -> dict[str, tuple[Any, Any]]:
    """Shape and type of each tensor in the file's order; the scope before `ppo2_model/pi/` is any one word."""
    try:
        (group,) = model["weightsManifest"]
        if group["paths"] != [_FILE]:
            raise DataError(f"{about}: the weights are in {group['paths']}; expected one file, {_FILE}")
        listed = {}
        for entry in group["weights"]:
            if entry.keys() != {"name", "shape", "dtype"}:
                raise DataError(f"{about}: a tensor has the fields {sorted(entry)}; expected name, shape and dtype")
            scope, found, name = entry["name"].partition(_HEAD)
            if not found or "/" in scope[:-1] or name in listed:
                raise DataError(f'{about}: unexpected or repeated tensor "{entry["name"]}"')
            listed[name] = (entry["shape"], entry["dtype"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{about}: not a TensorFlow.js model with one group of weights ({error!r})") from error
    return listed
