"""Policies: the published convolutional network, a small perceptron, their files, and how they take a seat."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional

from sextet.core.checkpoint import pack_tensors
from sextet.core.errors import DataError, DivergenceError
from sextet.core.files import atomic_write_bytes, read_json, write_json
from sextet.mep.evaluate import sample_actions
from sextet.mep.kernels import UNITS, best_kernels
from sextet.mep.overcooked import MODES, Layout, Overcooked, observation_shape

if TYPE_CHECKING:
    from numpy.typing import NDArray

Weights = Mapping[str, Tensor]
Layers = list[tuple[Tensor, Tensor]]
NUM_ACTIONS = 6
CHUNK = 4096  # rows evaluated at once by log_policy, so that a layer's output stays in the cache
# Where each plane can change: Floor, Pots, Objects' cells (floor, counters), All of these, 1 cell, nowhere.
_VARYING = {"planes20": "FFFFFFFFFF.....PPOOO", "planes26": "FFFFFFFFFF......P.A.PAOO.1"}
_LARGEST = {"planes20": {15: 3, 16: 20}, "planes26": {16: 3, 18: 3, 20: 20}}


def _inputs(layout: Layout, encoding: str) -> tuple[Tensor, Tensor]:
    """Columns of a flat observation that can vary in this kitchen, and the scale of every column."""
    size = int(np.prod(observation_shape(layout, encoding)))
    name = encoding.removesuffix("_legacy")
    if name not in _VARYING:
        return torch.arange(size), torch.ones(size)
    floor, counter, pot = (layout.terrain == code for code in (0, 1, 3))
    one = np.arange(len(floor)) == 0
    cells = {"F": floor, "P": pot, "O": floor | counter, "A": floor | counter | pot, "1": one, ".": floor & ~floor}
    scale = np.ones((len(_VARYING[name]), len(floor)), np.float32)
    for plane, largest in _LARGEST[name].items():
        scale[plane] = 1 / largest
    columns = np.flatnonzero(np.stack([cells[mark] for mark in _VARYING[name]]))
    return torch.from_numpy(columns), torch.from_numpy(scale.ravel())


class Policy(nn.Module):
    """Action logits and value of one player's observation.

    `net` "conv" is the network of the 2019 code (42,264 weights on cramped_room; leaky ReLU of 0.2). "mlp" has two
    layers of 64 on those inputs that can vary in the kitchen (107 of 400 on cramped_room): it can represent the
    same functions as one that sees all and is faster. Pots' counters are scaled to at most 1.
    """

    columns: Tensor
    scale: Tensor

    def __init__(self, layout: Layout, encoding: str, net: str, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.layout, self.encoding, self.net = layout, encoding, net
        columns, scale = _inputs(layout, encoding)
        self.input_shape: tuple[int, ...] = (len(columns),)
        shapes: list[tuple[int, ...]] = [(UNITS, len(columns)), (UNITS, UNITS)]
        if net == "conv":
            columns = torch.arange(len(scale))
            planes, height, width = self.input_shape = observation_shape(layout, encoding)
            shapes = [(25, planes, 5, 5), (25, 25, 3, 3), (25, 25, 3, 3)]
            shapes += [(64, 25 * (height - 2) * (width - 2)), (64, 64), (64, 64)]
        self.register_buffer("columns", columns, persistent=False)
        self.register_buffer("scale", scale[columns], persistent=False)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for shape in (*shapes, (NUM_ACTIONS + 1, 64)):
            bound = math.prod(shape[1:]) ** -0.5  # torch's default range
            self.weights.append(nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator)))
            self.biases.append(nn.Parameter(torch.empty(shape[0]).uniform_(-bound, bound, generator=generator)))
        with torch.no_grad():
            self.weights[-1][:NUM_ACTIONS] *= 0.01
            self.biases[-1].zero_()

    def encode(self, observations: NDArray[Any], out: Tensor) -> Tensor:
        """Fills `out` (B, *input_shape) float32 with the network's inputs for B observations; returns it."""
        flat = torch.from_numpy(observations).view(len(out), -1).to(out.device)
        flat = flat if self.net == "conv" else flat.index_select(1, self.columns)
        return out.view(len(out), -1).copy_(flat).mul_(self.scale)

    def see(self, env: Overcooked, out: Tensor, rows: NDArray[np.int64] | None = None) -> Tensor:
        """Fills `out` with the network's inputs for what the players of `env` see now; returns it.

        Args:
            env: N games in this policy's kitchen.
            out: (R, *input_shape) float32.
            rows: (R,) players, 2 * game + seat; by default all 2N.
        """
        if self.net == "conv" or self.encoding not in MODES or out.device.type != "cpu":
            seen = env.observe(self.encoding).reshape(2 * env.num_envs, -1)
            self.encode(seen if rows is None else seen[rows], out)
            return out
        rows = np.arange(2 * env.num_envs) if rows is None else rows
        env.observe_columns(self.encoding, rows, self.columns.numpy(), self.scale.numpy(), out.numpy())
        return out

    def player(self, weights: Weights | None = None) -> Callable[[Tensor], Tensor]:
        """Returns `forward` with these weights, prepared for many calls with few rows, without gradients."""
        layers = [(weight.detach(), bias.detach()) for weight, bias in self._layers(weights)]
        if layers[0][0].dim() != 3 or layers[0][0].device.type != "cpu":
            # a product of few rows is up to twice as fast with the matrix in this order of memory
            laid_out = [(w.mT.contiguous().mT if w.dim() < 4 else w, bias) for w, bias in layers]
            return lambda inputs: self._run(inputs, laid_out)
        arrays = tuple((w.mT.contiguous().numpy(), bias.contiguous().numpy()) for w, bias in layers)
        run = best_kernels().perceptrons

        def play(inputs: Tensor) -> Tensor:
            outputs = torch.empty((len(inputs), NUM_ACTIONS + 1))
            run(inputs.numpy(), arrays, outputs.numpy())
            return outputs

        return play

    def _layers(self, weights: Weights | None) -> Layers:
        if weights is None:
            return list(zip(self.weights, self.biases, strict=True))
        return [(weights[f"weights.{layer}"], weights[f"biases.{layer}"]) for layer in range(len(self.weights))]

    def forward(self, inputs: Tensor, weights: Weights | None = None) -> Tensor:
        """Returns (B, 7): six action logits, then the value, of inputs (B, *input_shape).

        `weights` replaces the policy's own: of one policy, or of B policies, (B, ...) each, one per row.
        """
        return self._run(inputs, self._layers(weights))

    def _run(self, inputs: Tensor, layers: Layers) -> Tensor:
        hidden, last = inputs, len(layers) - 1
        for layer, (weight, bias) in enumerate(layers):
            if weight.dim() >= 4:
                groups = len(weight) if weight.dim() == 5 else 1  # one convolution, the policies side by side
                maps = hidden.reshape(-1, groups * hidden.shape[1], *hidden.shape[2:])
                kernel, padding = weight.reshape(-1, *weight.shape[-3:]), 2 - layer
                maps = functional.conv2d(maps, kernel, bias.flatten(), padding=padding, groups=groups)
                hidden = maps.reshape(len(hidden), -1, *maps.shape[2:])
            elif weight.dim() == 3:
                hidden = torch.baddbmm(bias.unsqueeze(1), hidden.flatten(1).unsqueeze(1), weight.mT).squeeze(1)
            else:
                hidden = functional.linear(hidden.flatten(1), weight, bias)
            if layer < last:
                hidden = functional.leaky_relu(hidden, 0.2) if self.net == "conv" else hidden.relu_()
        return hidden

    def save(self, folder: Path | str) -> None:
        """Writes `model.safetensors` and `config.json`, as the `final` folder of a run has them."""
        about = {"layout": self.layout.name, "encoding": self.encoding, "net": self.net}
        atomic_write_bytes(Path(folder) / "model.safetensors", pack_tensors(self.state_dict()))
        write_json(Path(folder) / "config.json", {"recipe": "mep", "config": about})

    @classmethod
    def load(cls, folder: Path | str, *, layout: str | None = None, encoding: str | None = None) -> Policy:
        """Reads a policy; `layout` and `encoding`, if given, are what the caller needs it to be for.

        Raises:
            DataError: Unreadable, not finite, or made for another kitchen, encoding or network.
        """
        path = Path(folder) / "model.safetensors"
        try:
            about = read_json(Path(folder) / "config.json")["config"]
            found = {name: str(about[name]) for name in ("layout", "encoding", "net")}
            weights = load(path.read_bytes())
        except (OSError, KeyError, TypeError, SafetensorError) as error:
            raise DataError(f"{folder}: not a saved policy ({error})") from error
        for name, wanted in (("layout", layout), ("encoding", encoding)):
            if wanted is not None and found[name] != wanted:
                raise DataError(f'{folder}: this policy has {name} "{found[name]}", but "{wanted}" is needed')
        policy = cls(Layout.load(found["layout"]), found["encoding"], found["net"])
        expected = {name: tuple(tensor.shape) for name, tensor in policy.state_dict().items()}
        if {name: tuple(tensor.shape) for name, tensor in weights.items()} != expected:
            raise DataError(f"{path}: the weights do not fit {found['net']} on {found['layout']}, {found['encoding']}")
        bad = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
        if bad:
            raise DataError(f"{path}: {bad[0]} is not finite")
        policy.load_state_dict(weights)
        return policy


class PolicyAgent:
    """A policy that takes a seat and samples its actions; with `weights` (N, ...), another policy in each game."""

    def __init__(self, policy: Policy, weights: Weights | None = None, *, name: str = "policy") -> None:
        self.policy, self.weights, self.name = policy, weights, name
        self._play: Callable[[Tensor], Tensor] = partial(policy.forward, weights=weights)

    def begin(self, env: Overcooked, seat: int) -> None:
        """Takes the weights as they are now for these games; policies have no memory."""
        self._play = self.policy.player(self.weights)

    @torch.inference_mode()
    def act(self, env: Overcooked, seat: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Samples (N,) actions; raises DivergenceError if the logits are not finite."""
        inputs = torch.empty((env.num_envs, *self.policy.input_shape), device=self.policy.scale.device)
        self.policy.see(env, inputs, np.arange(seat, 2 * env.num_envs, 2))
        logits = self._play(inputs)[:, :NUM_ACTIONS].cpu().numpy()
        if not np.isfinite(logits).all():
            raise DivergenceError(f"{self.name}: action logits are not finite")
        return sample_actions(logits, rng)


@torch.inference_mode()
def log_policy(policy: Policy, inputs: Tensor, weights: Weights | None = None) -> Tensor:
    """Log-probabilities of all actions, (B, A), of inputs (B, ...) under the policy or other `weights`."""
    logits = torch.cat([policy(rows, weights)[:, :NUM_ACTIONS] for rows in inputs.split(CHUNK)])
    return logits - logits.logsumexp(-1, keepdim=True)  # log_softmax is slow along few actions
