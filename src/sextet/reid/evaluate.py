"""Features of images, the test of a network, and the model that `sextet.load` returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from sextet.core.config import from_dict
from sextet.core.device import World
from sextet.core.errors import DataError, UsageError
from sextet.core.files import read_json
from sextet.core.run import Run
from sextet.reid.augment import normalise
from sextet.reid.data import Images, ReIDData, Split, load_data
from sextet.reid.distances import expand_queries, pool_queries
from sextet.reid.images import FileImages, resized, upright_rgb
from sextet.reid.model import build_model, for_testing
from sextet.reid.settings import Config


@torch.no_grad()
def extract(
    network: nn.Module, images: Images, *, flip: bool = True, batch: int = 64, world: World | None = None
) -> NDArray[np.float32]:
    """Features of all images, (N, D) float32 with rows of length 1.

    The features of an image and of its mirror image are added before they are normalised. Ranks take whole batches in
    turn, so that the result is the same for any number of them.
    """
    rank, size = (world.rank, world.size) if world is not None else (0, 1)
    network = for_testing(network)
    place = next(network.parameters()).device
    features = torch.zeros(len(images), int(network.feature_size))  # type: ignore[arg-type]
    for number in range(rank, math.ceil(len(images) / batch), size):
        rows = range(number * batch, min((number + 1) * batch, len(images)))
        features[rows.start : rows.stop] = embed(network, images.read(rows).to(place), flip=flip)
    if size > 1:
        from torch import distributed

        shared = features.to(place)
        distributed.all_reduce(shared)
        features = shared.cpu()
    return features.numpy()


def features(
    config: Config, network: nn.Module, data: ReIDData, world: World | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Features of the query and gallery images as the settings test them, (Q, D) and (G, D) of length 1.

    Raises:
        UsageError: Several images of a query are asked for, and the data has no further ones.
    """
    settings = config.evaluation
    check_queries(config, data)

    def of(split: Split) -> NDArray[np.float32]:
        return extract(network, split.images, flip=settings.flip, batch=settings.batch, world=world)

    query, gallery = of(data.query), of(data.gallery)
    if settings.multi_query != "none" and data.multi_query is not None:
        further = of(data.multi_query), data.multi_query.labels
        query = pool_queries(query, data.query.labels, *further, how=settings.multi_query)
        query /= np.linalg.norm(query, axis=1, keepdims=True)
    if settings.expand:
        query, gallery = expand_queries(query, gallery, k=settings.expand)
    return query, gallery


def check_queries(config: Config, data: ReIDData) -> None:
    """Raises UsageError where settings ask for further images of the queries and there are none."""
    if config.evaluation.multi_query != "none" and data.multi_query is None:
        raise UsageError(
            f"{data.name} has no further images of its queries (Market-1501 has them in gt_bbox/); leave out "
            "--evaluation.multi-query"
        )


@torch.no_grad()
def embed(network: nn.Module, images: Tensor, *, flip: bool = True) -> Tensor:
    """uint8 (B, 3, H, W) -> features (B, D) of length 1."""
    x = normalise(images).contiguous(memory_format=torch.channels_last)
    if not flip:
        return functional.normalize(network(x))
    features: Tensor = network(torch.cat((x, x.flip(3))))
    return functional.normalize(features.unflatten(0, (2, -1)).sum(0))


def evaluate_network(
    config: Config, run: Run, network: nn.Module, data: ReIDData, *, tables: bool = True
) -> dict[str, Any]:
    """Tests a network on the query and gallery images; every rank must call it.

    Returns:
        mAP, rank-1 and so on in percent, the first two with a 95 % interval over queries; ranks other than 0 get only
        the means of these two.
        With `tables`, the run's report gets the tables and a picture of rankings, and re-ranking is tested too.
        Where data and protocol leave nothing to test, only "not tested" with the reason: nothing trained is lost.
    """
    from sextet.reid import tables as report

    world = run.world
    if world.size > 1:
        from torch import distributed

        for buffer in network.buffers():  # each rank's normalisations have seen other images
            distributed.broadcast(buffer, 0)
    query, gallery = features(config, network, data, world)
    scores: dict[str, Any] = {}
    if world.is_main:
        try:
            scores = report.score(config, run if tables else None, data, query, gallery, quick=not tables)
        except UsageError as error:
            scores = {"not tested": str(error)}
            run.say(f"warning: not tested: {error}")
    if world.size > 1:
        names = ("mAP", "rank-1")
        means = torch.tensor([scores.get(name, {"mean": math.nan})["mean"] for name in names], dtype=torch.float64)
        means = means.to(next(network.parameters()).device)
        distributed.broadcast(means, 0)
        if not world.is_main and not means.isnan().any():  # all ranks log the same names
            scores = {name: {"mean": float(mean)} for name, mean in zip(names, means, strict=True)}
    return scores


def evaluate(config: Config, directory: Path) -> dict[str, Any]:
    """Tests the finished network of a run again; the recipe's `evaluate`.

    Raises:
        UsageError: The run has no finished network.
    """
    from sextet.reid import tables as report

    model = load(directory / "final")
    data = load_data(config.data, config.size, seed=config.seed)
    return report.score(config, None, data, *features(config, model.network, data))


class Embedder:
    """A trained network that turns images of people into vectors: what `sextet.load` returns.

    Args:
        network: Of `build_model`; used for testing only.
        config: Of its run.
    """

    def __init__(self, network: nn.Module, config: Config) -> None:
        self.network, self.config = network.eval(), config
        self._folded = for_testing(network)
        self.size, self.feature_size = config.size, int(network.feature_size)  # type: ignore[arg-type]

    def embed(self, images: Sequence[Any] | Tensor, *, batch: int = 64) -> NDArray[np.float32]:
        """Returns a vector of length 1 for each image, (N, feature_size); their dot products are cosines.

        Args:
            images: Paths, Pillow images, or a uint8 tensor (N, 3, H, W); resized to the network's size.
            batch: Images at once.

        Raises:
            DataError: An image cannot be read. UsageError: A tensor of another type or shape.
        """
        chunks = [
            embed(self._folded, self.pixels(images[start : start + batch]), flip=self.config.evaluation.flip)
            for start in range(0, len(images), batch)
        ]
        return torch.cat(chunks).numpy() if chunks else np.zeros((0, self.feature_size), np.float32)

    @torch.no_grad()
    def cuts(self, image: Any) -> dict[str, list[float]]:
        """Returns the rows at which each branch cuts this image, as shares of its height from 0 to 1."""
        cuts = self.network.cuts(normalise(self.pixels([image])))  # type: ignore[operator]
        return {name: [float(row) for row in rows[0]] for name, rows in cuts.items()}

    def pixels(self, images: Sequence[Any] | Tensor) -> Tensor:
        """Paths, Pillow images or a tensor -> uint8 (N, 3, H, W) of the network's size."""
        if isinstance(images, Tensor):
            if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
                kind = f"{images.dtype} of shape {tuple(images.shape)}".removeprefix("torch.")
                raise UsageError(f"images as a tensor are uint8 (N, 3, H, W), not {kind}")
            return resized(images, self.size)
        rows = []
        for image in images:
            if isinstance(image, (str, Path)):
                file = FileImages("", [str(image)], self.size, max_pixels=self.config.data.max_pixels)
                rows.append(file.read([0])[0])
            else:
                pixels = torch.from_numpy(np.array(upright_rgb(image)[0])).permute(2, 0, 1)
                rows.append(resized(pixels[None], self.size)[0])
        return torch.stack(rows)


def load(folder: Path) -> Embedder:
    """Returns the network of a run's `final` folder, whatever the number of people it was trained with.

    Raises:
        UsageError: No run's final folder. DataError: The weights do not fit the settings.
    """
    record = read_json(folder / "config.json")
    config = from_dict(Config, record["config"], source=str(folder / "config.json"))
    weights = load_file(folder / "model.safetensors")
    people = next((len(value) for name, value in weights.items() if "classifier" in name), 2)
    network = build_model(config.shown, replace(config.model, weights=""), people)
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise DataError(f"{folder}: the weights do not fit the settings ({error})") from error
    return Embedder(network, config)
