"""What lies in the folders of a data set: every file is either used or dropped with a reason; nothing is decoded.

Files are taken in natural order, so labels and ties are the same on every machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sextet.core.errors import DataError
from sextet.reid.images import SUFFIXES, Box

SPLITS = ("train", "query", "gallery", "multi_query")
BOXES = {"train": "bounding_box_train", "query": "query", "gallery": "bounding_box_test", "multi_query": "gt_bbox"}
"""Folders of Market-1501's layout by split."""
_LITTER = {"thumbs.db", "desktop.ini", ".ds_store"}
_DIGITS = re.compile(r"(\d+)", re.ASCII)
MARKET_NAME = re.compile(r"(-?\d+)_c(\d+)", re.ASCII)
"""Person and camera in 0002_c1s1_000451_03.jpg and 0005_c2_f0046985.jpg."""


def natural(name: str) -> tuple[list[Any], str]:
    """Returns the sort key in which numbers count by value: "c2" before "c10"."""
    parts: list[Any] = _DIGITS.split(name)
    parts[1::2] = map(int, parts[1::2])
    return parts, name


def inside(root: Path, path: Path | str) -> bool:
    """Whether a path, links followed, lies in the folder `root`, which has no links in it."""
    return Path(os.path.realpath(path)).is_relative_to(root)


class Row(NamedTuple):
    """One image: its split, its file relative to the root, person and camera, and its part of the file."""

    split: str
    name: str
    person: int
    camera: int
    box: Box | None = None


@dataclass(kw_only=True)
class Scan:
    """What lies under a root: `seen` counts every file or listed image, which is in `rows` or in `dropped`."""

    format: str
    root: Path
    rows: list[Row] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    """Names with the reason why they are not used."""
    seen: int = 0
    notes: list[str] = field(default_factory=list)

    def files(self, folder: Path) -> list[str]:
        """Returns the image files in and below a folder, in natural order; others are dropped, links not followed."""
        if not inside(self.root, folder):
            raise DataError(f"{folder}: a link that leads out of {self.root}; give the folder it leads to as the root")
        found, folders, cut = [], [str(folder)], len(str(self.root)) + 1
        while folders:
            try:
                with os.scandir(folders.pop()) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                            continue
                        name = entry.path[cut:].replace(os.sep, "/")
                        if reason := self._unfit(entry):
                            self.drop(name, reason)
                        else:
                            found.append(name)
            except FileNotFoundError as error:
                raise DataError(f"{folder}: no such folder; `sextet data check --help` names the layouts") from error
            except OSError as error:
                raise DataError(f"{error.filename}: cannot read ({error.strerror or error})") from error
        return sorted(found, key=natural)

    def _unfit(self, entry: os.DirEntry[str]) -> str:
        if entry.name.startswith("._") or entry.name.lower() in _LITTER:
            return "left by a file browser"
        if not entry.name.lower().endswith(SUFFIXES):
            return "not an image by its name"
        if entry.is_symlink() and not inside(self.root, entry.path):
            return "a link that leads out of the data set"
        return "" if entry.is_file() else "not a file"

    def drop(self, name: str, reason: str) -> None:
        """Counts a file that is not used."""
        self.seen += 1
        self.dropped.append((name, reason))

    def add(self, split: str, name: str, person: int, camera: int, box: Box | None = None) -> None:
        """Counts an image; junk (id -1) is dropped everywhere, distractors (id 0) outside the gallery."""
        if person < 0:
            self.drop(name, f"id {person}: junk")
        elif person == 0 and split != "gallery":
            self.drop(name, f"id 0 in {split}: distractors belong to the gallery")
        else:
            self.seen += 1
            self.rows.append(Row(split, name, person, camera, box))

    def add_named(self, split: str, folder: Path, *, distractors: bool = False) -> None:
        """Adds a folder of names that begin with person and camera."""
        for name in self.files(folder):
            if match := MARKET_NAME.match(name.rpartition("/")[2]):
                person = int(match[1])
                self.add(split, name, min(person, 0) if distractors else person, int(match[2]))
            else:
                self.drop(name, "the name tells no person and camera (0002_c1s1_000451_03.jpg)")

    def add_boxes(self, home: Path) -> None:
        """Adds those of the folders of Market-1501's layout that are there."""
        for split, folder in BOXES.items():
            if (home / folder).is_dir():
                self.add_named(split, home / folder)

    def add_listed(self, folder: Path, listed: Iterable[Row]) -> None:
        """Adds images that lists name; files of the folder in no list, and listed ones that lack, are dropped."""
        before = len(self.dropped)
        files = set(self.files(folder))
        counted = {name for name, _ in self.dropped[before:]}
        for row in listed:
            if row.name in files:
                self.add(*row)
                counted.add(row.name)
            elif row.name not in counted:
                self.drop(row.name, "listed, but there is no such file")
        for name in sorted(files - counted, key=natural):
            self.drop(name, "in no list of the data set")

    def number_cameras(self) -> None:
        """Numbers cameras from 0 where names count them from 1."""
        if all(row.camera > 0 for row in self.rows):
            self.rows = [row._replace(camera=row.camera - 1) for row in self.rows]
