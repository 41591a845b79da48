"""A stand-in for a human: a player cloned from the 2019 human-human games.

The proxy follows 2019: 62 features of either seat, two layers of 64 tanh units, cross-entropy, Adam at 1e-3,
batches of 64, 85 % of the rows to learn from, epochs per layout, the last weights, sampled actions, and the
"unblock" rule. (The weights of the best validation loss, reached after about 20 epochs, play worse: they hesitate.)
The "test" games make the proxy that agents are evaluated with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sextet.core.errors import DataError, UsageError
from sextet.core.files import atomic_write_bytes, read_json, write_json
from sextet.core.seeding import torch_rng
from sextet.mep.evaluate import sample_actions
from sextet.mep.features import features62
from sextet.mep.human_data import HumanData
from sextet.mep.overcooked import LAYOUTS, Layout, Overcooked

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Weights = dict[str, NDArray[np.float32]]
    Progress = Callable[[int, int, float], None]

EPOCHS = dict(zip(LAYOUTS, (100, 120, 120, 90, 110), strict=True))
_SHAPES = {"w0": (64, 62), "b0": (64,), "w1": (64, 64), "b1": (64,), "w2": (6, 64), "b2": (6,)}


class HumanProxy:
    """A behaviour-cloned player of one layout; an `Agent` of `sextet.mep.evaluate`.

    `weights` are float32 "w0" (64, 62), "b0", "w1" (64, 64), "b1", "w2" (6, 64), "b2". With `unblock`, a player
    whose cell and orientation did not change over the last three steps does not repeat any of its last three
    actions (from the fifth step of a game on, as in 2019); without it proxies block each other for ever.
    """

    def __init__(self, layout: str, weights: Weights, *, unblock: bool = True, info: Any = None) -> None:
        self.layout, self.weights, self.unblock, self.info = layout, weights, unblock, info or {}
        self._past: dict[int, list[tuple[NDArray[Any], NDArray[np.int64]]]] = {}

    def logits(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns (N, 6) logits of (N, 62) features."""
        w = self.weights
        hidden = np.tanh(np.tanh(features @ w["w0"].T + w["b0"]) @ w["w1"].T + w["b1"])
        logits: NDArray[np.float32] = hidden @ w["w2"].T + w["b2"]
        return logits

    def begin(self, env: Overcooked, seat: int) -> None:
        """Starts new games in `seat`; raises UsageError for another layout."""
        if env.layout.name != self.layout:
            raise UsageError(f"this human proxy plays {self.layout}, not {env.layout.name}")
        self._past[seat] = []

    def act(self, env: Overcooked, seat: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Samples (N,) actions."""
        logits, past = self.logits(features62(env.layout, env.state, seat)), self._past[seat]
        place = env.state.pos[:, seat] * 4 + env.state.orient[:, seat]
        if self.unblock and len(past) == 3:
            still = [place == before for before, _ in past]
            stuck = np.flatnonzero(np.all([*still, env.state.time >= 4], axis=0))
            for _, taken in past:
                logits[stuck, taken[stuck]] = -np.inf
        actions = sample_actions(logits, rng)
        self._past[seat] = [*past[-2:], (place, actions)]
        return actions

    def save(self, folder: Path | str) -> None:
        """Writes `model.safetensors` and `config.json` into `folder`."""
        from safetensors.numpy import save

        atomic_write_bytes(Path(folder) / "model.safetensors", save(self.weights))
        config = {"kind": "human_proxy", "layout": self.layout, "info": self.info}
        write_json(Path(folder) / "config.json", config)

    @staticmethod
    def load(folder: Path | str, *, unblock: bool = True) -> HumanProxy:
        """Reads what `save` wrote; raises DataError for anything else."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        config = read_json(Path(folder) / "config.json")
        if not isinstance(config, dict) or config.get("kind") != "human_proxy" or config.get("layout") not in LAYOUTS:
            raise DataError(f"{folder}/config.json: not a human proxy of one of {', '.join(LAYOUTS)}")
        try:
            weights = load_file(Path(folder) / "model.safetensors")
        except (OSError, SafetensorError) as error:
            raise DataError(f"{folder}/model.safetensors: cannot read ({error})") from error
        if (shapes := {name: array.shape for name, array in weights.items()}) != _SHAPES:
            raise DataError(f"{folder}/model.safetensors: shapes {shapes}; a human proxy has {_SHAPES}")
        return HumanProxy(config["layout"], weights, unblock=unblock, info=config.get("info"))


def train_proxy(
    layout: str, data: HumanData, *, seed: int, epochs: int | None = None, progress: Progress | None = None
) -> HumanProxy:
    """Clones the persons of `data`, rows of both seats alike; equal seeds give equal weights on one thread.

    `epochs` defaults to the 2019 number of the layout. `progress` is called after each epoch with (epochs done,
    epochs, validation loss). Raises UsageError when `data` is of another layout or `epochs` is below 1.
    """
    import torch
    from torch.nn.functional import cross_entropy, linear

    epochs = EPOCHS[data.layout] if epochs is None else epochs
    if layout != data.layout or epochs < 1:
        raise UsageError(f"cannot train {epochs} epochs for {layout} on games of {data.layout}")
    rows = [features62(Layout.load(layout), data.state, seat) for seat in (0, 1)]
    chosen = slice(None) if data.persons is None else data.persons.T.flatten()
    inputs = torch.from_numpy(np.concatenate(rows)[chosen])
    labels = torch.from_numpy(data.actions.T.flatten()[chosen]).long()
    w = {name: torch.zeros(shape) for name, shape in _SHAPES.items()}
    for name, gain in (("w0", 2**0.5), ("w1", 2**0.5), ("w2", 0.01)):
        torch.nn.init.orthogonal_(w[name], gain, generator=torch_rng(seed, "init", "human", layout, name))
    adam = torch.optim.Adam([tensor.requires_grad_() for tensor in w.values()], lr=1e-3, eps=1e-8, fused=True)

    def forward(batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(linear(torch.tanh(linear(batch, w["w0"], w["b0"])), w["w1"], w["b1"]))
        return linear(hidden, w["w2"], w["b2"])

    order = torch.randperm(len(labels), generator=torch_rng(seed, "split", "human", layout))
    training, validation = order.tensor_split([int(0.85 * len(order))])
    for epoch in range(1, epochs + 1):
        shuffle = torch.randperm(len(training), generator=torch_rng(seed, "step", "human", layout, epoch))
        for batch in training[shuffle].split(64):
            adam.zero_grad()
            cross_entropy(forward(inputs[batch]), labels[batch]).backward()
            adam.step()
        with torch.no_grad():
            logits, wanted = forward(inputs[validation]), labels[validation]
            loss = float(cross_entropy(logits, wanted))
        if progress is not None:
            progress(epoch, epochs, loss)
    info = {"seed": seed, "epochs": epochs, "rows": len(labels), "validation_loss": loss}
    info["validation_accuracy"] = float((logits.argmax(1) == wanted).float().mean())
    return HumanProxy(layout, {name: tensor.detach().numpy() for name, tensor in w.items()}, info=info)
