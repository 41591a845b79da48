"""Images and labels of person re-identification: what a data set is, and how one is read or drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sextet.core.errors import DataError
from sextet.reid.images import FileImages, Inspection, inspect, printable
from sextet.reid.ranking import Labels
from sextet.reid.readers import LAYOUTS, scan
from sextet.reid.scan import Row, Scan
from sextet.reid.settings import DataConfig

if TYPE_CHECKING:
    from sextet.core.console import Console

NAMED = 3
"""Files named in a line that counts them."""


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

    @property
    def labels(self) -> Labels:
        """The labels alone, as scores take them."""
        return Labels(ids=self.ids, cameras=self.cameras)


@dataclass(frozen=True, eq=False, kw_only=True)
class ReIDData:
    """A data set: people to train with and others to test with."""

    name: str
    train: Split
    query: Split
    gallery: Split
    multi_query: Split | None = None
    """Further images of each query's person and camera (Market-1501's gt_bbox)."""
    notes: tuple[str, ...] = ()
    """What a user should know of it, a line each: files left out by reason, unknown cameras."""

    @property
    def classes(self) -> NDArray[np.int64]:
        """Sorted ids of the training people; a label is a place in it."""
        return np.unique(self.train.ids)


def load_data(config: DataConfig, size: tuple[int, int], *, seed: int = 0, console: Console | None = None) -> ReIDData:
    """Reads or draws the data set of the settings.

    Files are decoded once for damage (see `images.inspect`); what cannot be used is left out and named in the notes,
    or, by `config.bad_images`, ends the run here and not in the middle of the training.

    Args:
        config: Which data set.
        size: Height and width of the images.
        seed: Of the drawn set.
        console: Shows the progress of a first look at many files.

    Raises:
        DataError: Not there, damaged files with bad_images "stop", the same people in training and test, or no image.
    """
    if config.format == "synthetic":
        from sextet.reid.synthetic import draw_data

        return draw_data(config.variant, size, people=config.people, seed=seed)
    found = scan(config.format, config.root, config.variant)
    names = list(dict.fromkeys(row.name for row in found.rows))

    def progress(done: int, total: int) -> None:
        if console is not None:
            console.update(done)

    inspection = inspect(found.root, names, max_pixels=config.max_pixels, progress=progress)
    if inspection.problems and config.bad_images == "stop":
        raise DataError(
            f"{found.root}: {_damaged(inspection)}; `sextet data check {config.root}` names all; "
            "--data.bad-images skip leaves them out"
        )
    rows = [row for row in found.rows if row.name not in inspection.problems]
    if shared := people_in_both(rows):
        raise DataError(f"{found.root}: {shared}; test people must not be trained with")
    splits = {split: [row for row in rows if row.split == split] for split in ("train", "query", "gallery")}
    for split, others in splits.items():
        if not others and (split == "train" or any(splits[part] for part in ("query", "gallery"))):
            raise DataError(f"{found.root}: no usable image in {split}; `sextet data check {config.root}` tells why")
    wanted = {(row.person, row.camera) for row in splits["query"]}
    more = [row for row in rows if row.split == "multi_query" and (row.person, row.camera) in wanted]
    train, query, gallery = (_split(found, part, size, config.max_pixels) for part in splits.values())
    return ReIDData(
        name=LAYOUTS[config.format].title,
        train=train,
        query=query,
        gallery=gallery,
        multi_query=_split(found, more, size, config.max_pixels) if more else None,
        notes=(*found.notes, *_left_out(found), *([_damaged(inspection)] if inspection.problems else [])),
    )


def _split(found: Scan, rows: Sequence[Row], size: tuple[int, int], max_pixels: int) -> Split:
    boxes = [row.box for row in rows]
    return Split(
        images=FileImages(found.root, [row.name for row in rows], size, boxes=boxes, max_pixels=max_pixels),
        ids=np.array([row.person for row in rows], np.int64),
        cameras=np.array([row.camera for row in rows], np.int64),
        names=tuple(row.name + ("[{},{},{},{}]".format(*row.box) if row.box else "") for row in rows),
    )


def people_in_both(rows: Sequence[Row]) -> str:
    """Returns which people are in the training and in the test images, in words; "" if none."""
    trained = {row.person for row in rows if row.split == "train"}
    tested = {row.person for row in rows if row.split in ("query", "gallery") and row.person}
    if not (both := sorted(trained & tested)):
        return ""
    first = ", ".join(map(str, both[:5])) + (", ..." if len(both) > 5 else "")
    return f"{len(both)} {'person is' if len(both) == 1 else 'people are'} in training and test (id {first})"


def _damaged(inspection: Inspection) -> str:
    some = [f"{printable(name)}: {reason}" for name, reason in list(inspection.problems.items())[:NAMED]]
    more = ["..."] if len(inspection.problems) > NAMED else []
    return f"{len(inspection.problems)} files cannot be used as images ({'; '.join(some + more)})"


def _left_out(found: Scan) -> list[str]:
    return [
        f"{count:,} files left out: {reason}"
        for reason, count in Counter(reason for _, reason in found.dropped).items()
    ]
