"""Images and labels of person re-identification: what a data set is, and the readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sextet.core.errors import UsageError
from sextet.reid.settings import DataConfig


class Images(Protocol):
    """Pictures behind a split."""

    size: tuple[int, int]
    """Height and width of what `read` returns."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """Returns the images at `indices`, (B, 3, H, W) uint8; the same whenever asked, from any thread."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Split:
    """Images with their labels."""

    images: Images
    ids: NDArray[np.int64]
    """(N,) person ids; 0 is a distractor of the gallery."""
    cameras: NDArray[np.int64]
    """(N,) cameras from 0; -1 is unknown."""
    names: tuple[str, ...]
    """Relative paths or names for people to read."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ReIDData:
    """A data set: people to train with and others to test with."""

    name: str
    train: Split
    query: Split
    gallery: Split
    multi_query: Split | None = None
    """Further images of each query's person and camera (Market-1501's gt_bbox)."""

    @property
    def classes(self) -> NDArray[np.int64]:
        """Sorted ids of the training people; a label is a place in it."""
        return np.unique(self.train.ids)


def load_data(config: DataConfig, size: tuple[int, int], *, seed: int = 0) -> ReIDData:
    """Reads or draws the data set of the settings."""
    if config.format == "synthetic":
        from sextet.reid.synthetic import draw_data

        return draw_data(config.variant, size, people=config.people, seed=seed)
    raise UsageError(config.format)
