"""Readers: where each data set keeps its images, and how names, lists or tables tell people and cameras."""

from __future__ import annotations

import csv
import importlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sextet.core.errors import DataError, UsageError, missing_extra, unknown
from sextet.core.files import read_text
from sextet.reid.cuhk03 import read_cuhk03
from sextet.reid.images import Box, printable
from sextet.reid.scan import MARKET_NAME, SPLITS, Row, Scan, inside, natural

UNKNOWN_CAMERA = -1
_MSMT = re.compile(r"\d+_\d+_(\d+)_", re.ASCII)  # 0000_003_12_0113morning_0033_0.jpg
_RANDPERSON = re.compile(r"(\d+)_(?:s(?P<s1>\d+)_c(?P<c1>\d+)|c(?P<c2>\d+)_s(?P<s2>\d+))_", re.ASCII)
_FOLDER = re.compile(r"(?:-?\d+_)?c(?:am)?(\d{1,4})(?=[s_])|(\d{1,4})_", re.ASCII | re.IGNORECASE)
_TRUE = {"1", "true", "yes", "t", "y"}
Labelled = tuple[str, str, str, str, Box | None]  # split, name, person, camera, box


def _market(scan: Scan, home: Path, variant: str) -> None:
    scan.add_boxes(home)
    if variant == "500k":
        if not (home / "images").is_dir():
            raise DataError(f"{home / 'images'}: the 500k distractors are not there; leave out the variant 500k")
        scan.add_named("gallery", home / "images", distractors=True)
    scan.number_cameras()


def _duke(scan: Scan, home: Path, variant: str) -> None:
    _market(scan, home, variant)
    scan.notes.append(
        "DukeMTMC-reID was withdrawn by its authors in 2019; think twice before you publish results on it"
    )


def _personx(scan: Scan, home: Path, variant: str) -> None:
    for part in [home / str(camera) for camera in range(1, 7)] if (home / "1").is_dir() else [home]:
        scan.add_boxes(part)
    scan.number_cameras()


def _randperson(scan: Scan, home: Path, variant: str) -> None:
    found = []
    for name in scan.files(home):
        if match := _RANDPERSON.match(name.rpartition("/")[2]):
            place = int(match["s1"] or match["s2"]), int(match["c1"] or match["c2"])
            found.append((name, int(match[1]), place))
        else:
            scan.drop(name, "the name tells no person, scene and camera (000000_s00_c00_f000264.jpg)")
    cameras = {place: camera for camera, place in enumerate(sorted({place for *_, place in found}))}
    for name, person, place in found:  # people are counted from 0 here, and 0 means a distractor
        scan.add("train", name, person + 1, cameras[place])
    scan.notes.append("RandPerson has no test people: it can only be trained with")


def _msmt17(scan: Scan, home: Path, variant: str) -> None:
    train, test = ("mask_train_v2", "mask_test_v2") if (home / "mask_train_v2").is_dir() else ("train", "test")

    def rows(split: str, kind: str, folder: str, offset: int) -> list[Row]:
        found = []
        for number, line in enumerate(read_text(home / f"list_{kind}.txt").splitlines(), 1):
            name, _, person = line.strip().rpartition(" ")
            if not line.strip():
                continue
            if not person.isdecimal() or not (match := _MSMT.match(name.rpartition("/")[2])):
                raise DataError(f"{home / f'list_{kind}.txt'}:{number}: not a line like 0000/0000_000_01_... 0")
            place = (home / folder / name).relative_to(scan.root).as_posix()
            found.append(Row(split, place, int(person) + offset, int(match[1])))
        return found

    learned = rows("train", "train", train, 1)  # people are counted from 0, in the test again
    if (home / "list_val.txt").is_file():
        learned += rows("train", "val", train, 1)
    offset = max((row.person for row in learned), default=0) + 1
    scan.add_listed(home / train, learned)
    scan.add_listed(home / test, rows("query", "query", test, offset) + rows("gallery", "gallery", test, offset))
    scan.number_cameras()


def _folder(scan: Scan, home: Path, variant: str) -> None:
    found: list[tuple[str, str, str, str]] = []
    for split in SPLITS[:3]:
        for name in scan.files(home / split) if (home / split).is_dir() else []:
            parts = (home / split).joinpath(scan.root / name).relative_to(home / split).parts
            if len(parts) < 2:
                scan.drop(name, "lies in no person's folder")
                continue
            match = _FOLDER.match(parts[-1])
            found.append((split, name, parts[0], (match[1] or match[2]) if match else ""))
    without = next((name for _, name, _, camera in found if not camera), None)
    if without is not None:
        scan.notes.append(f"cameras unknown: {printable(without)} does not begin with one (3_0001.jpg, c3_0001.jpg)")
        found = [(split, name, person, "") for split, name, person, _ in found]
    _add_labelled(scan, [(*row, None) for row in found])


def _table(scan: Scan, home: Path, variant: str) -> None:
    found: list[Labelled] = []
    for place, row in _table_rows(home):
        name = os.path.normpath(row.get("path", "")).replace(os.sep, "/")
        person, camera = row.get("pid") or row.get("label", ""), row.get("camid") or row.get("sequence", "")
        split = row.get("split", "").lower()
        if not row.get("path") or not person or not split:
            raise DataError(f"{place}: needs path, pid (or label) and split")
        corners = [row.get(key) or row.get(key.replace("_", ""), "") for key in ("x_1", "y_1", "x_2", "y_2")]
        try:
            left, top, right, bottom = (round(float(corner or 0)) for corner in corners)
            box = (left, top, right, bottom) if all(corners) else None
        except (ValueError, OverflowError) as error:
            raise DataError(f"{place}: the box {', '.join(corners)} is not four numbers") from error
        flags = {part: row.get(f"is_{part}", "").lower() in _TRUE for part in ("query", "gallery", "junk")}
        splits = [split] if split in SPLITS else [part for part in ("query", "gallery") if flags[part]]
        if split not in (*SPLITS, "val", "validation", "test"):
            raise DataError(f"{place}: {unknown('split', split, (*SPLITS, 'validation', 'test'))}")
        reason = _unlisted(scan.root, name)
        if reason or not splits or flags["junk"]:
            scan.drop(name, reason or ("marked as junk" if flags["junk"] else "neither query nor gallery"))
            continue
        if len(splits) == 2 and camera in ("", "-1"):
            raise DataError(f"{place}: a query that finds itself in the gallery; give a camid or a sequence")
        found += [(part, name, person, camera, box) for part in splits]
    _add_labelled(scan, found)


def _unlisted(root: Path, name: str) -> str:
    """Why a listed file cannot be used; "" if it can."""
    if Path(name).is_absolute() or name.startswith(".."):
        return "leads out of the data set"
    if not (root / name).exists():
        return "listed, but there is no such file"
    return "" if inside(root, root / name) else "a link that leads out of the data set"


def _table_rows(path: Path) -> Iterable[tuple[str, Mapping[str, str]]]:
    if path.suffix.lower() == ".parquet":
        try:
            parquet = importlib.import_module("pyarrow.parquet")
        except ModuleNotFoundError as error:
            raise missing_extra("pyarrow", "reid", "a Parquet table") from error
        try:
            rows = parquet.read_table(path).to_pylist()
        except (OSError, ValueError) as error:  # pyarrow's own errors are among these
            raise DataError(f"{path}: not a readable Parquet file ({error})") from error
        for number, row in enumerate(rows, 1):
            yield f"{path}: row {number}", {key: _text(value) for key, value in row.items()}
        return
    lines = read_text(path, max_bytes=2**30).splitlines()
    header = lines[0] if lines else ""
    delimiter = max(",;\t", key=header.count)
    if "path" not in [cell.strip('" ') for cell in header.split(delimiter)]:
        raise DataError(f"{path}: its first line names no column path; {LAYOUTS['table'].expected}")
    for number, line in enumerate(csv.DictReader(lines, delimiter=delimiter), 2):
        yield f"{path}:{number}", {key.strip(): _text(value) for key, value in line.items() if key}


def _text(value: object) -> str:
    """A cell as text; whole numbers that became floats beside empty cells lose their ".0"."""
    return re.sub(r"^(-?\d+)\.0+$", r"\1", "" if value is None else str(value).strip())


def _add_labelled(scan: Scan, found: list[Labelled]) -> None:
    """Adds rows whose people and cameras are texts: kept where all are numbers, else numbered in natural order."""
    people = _numbered({row[2] for row in found}, first=1, kept={"-1": -1, "0": 0, "0000": 0})
    cameras = _numbered({row[3] for row in found} - {""}, first=0, kept={"-1": UNKNOWN_CAMERA})
    for split, name, person, camera, box in found:
        scan.add(split, name, people[person], max(cameras.get(camera, UNKNOWN_CAMERA), UNKNOWN_CAMERA), box)


def _numbered(labels: set[str], *, first: int, kept: Mapping[str, int]) -> dict[str, int]:
    if all(re.fullmatch(r"-?\d{1,18}", label, re.ASCII) for label in labels):
        return {label: int(label) for label in labels}
    others = sorted(labels - kept.keys(), key=natural)
    return {label: number for number, label in enumerate(others, first)} | dict(kept)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a data set lies on disk."""

    title: str
    expected: str
    read: Callable[[Scan, Path, str], None]
    marks: tuple[str, ...]
    """A folder that holds one of these (a pattern) holds the data set."""
    homes: tuple[str, ...] = ()
    """Folders below the root that may hold it instead."""
    variants: tuple[str, ...] = ()


_BOXES = "bounding_box_train/, query/ and bounding_box_test/"
LAYOUTS: dict[str, Layout] = {
    "market1501": Layout(
        title="Market-1501",
        expected=f"{_BOXES} with names like 0002_c1s1_000451_03.jpg (and gt_bbox/, images/ of the 500k)",
        read=_market, marks=("bounding_box_train",), variants=("500k",),
        homes=("Market-1501-v15.09.15", "market1501", "market1501/Market-1501-v15.09.15", "Market-1501"),
    ),
    "dukemtmc": Layout(
        title="DukeMTMC-reID",
        expected=f"{_BOXES} with names like 0005_c2_f0046985.jpg",
        read=_duke, marks=("bounding_box_train",),
        homes=("DukeMTMC-reID", "dukemtmc-reid", "dukemtmc-reid/DukeMTMC-reID"),
    ),
    "cuhk03_np": Layout(
        title="CUHK03-NP",
        expected=f"detected/ or labeled/ with {_BOXES}; or images_detected/ and its new_protocol .mat",
        read=read_cuhk03, variants=("detected", "labelled", "labeled"),
        marks=("detected/bounding_box_train", "label*ed/bounding_box_train", "cuhk03_new_protocol_config_*.mat",
               "images_detected", "images_labeled", "cuhk03_release", "cuhk-03.mat"),
        homes=("cuhk03-np", "cuhk03", "CUHK03-NP", "cuhk03_release"),
    ),
    "msmt17": Layout(
        title="MSMT17",
        expected="train/ and test/ (V1) or mask_train_v2/ and mask_test_v2/ (V2) beside list_train.txt, list_val.txt, "
        "list_query.txt and list_gallery.txt",
        read=_msmt17, marks=("list_train.txt",), variants=("v1", "v2"),
        homes=("MSMT17_V1", "MSMT17_V2", "MSMT17", "msmt17/MSMT17_V1", "msmt17/MSMT17_V2"),
    ),
    "randperson": Layout(
        title="RandPerson",
        expected="randperson_subset/ with names like 000000_s00_c00_f000264.jpg",
        read=_randperson, marks=("[0-9]*_[cs][0-9]*_[cs][0-9]*_f[0-9]*.jpg", "scene00"),
        homes=("randperson_subset", "randperson_subset/randperson_subset", "images", "randperson/images"),
    ),
    "personx": Layout(
        title="PersonX",
        expected=f"{_BOXES} with names like 0001_c1_1.jpg, or one folder with these for each camera 1 to 6",
        read=_personx, marks=("bounding_box_train", "1/bounding_box_train"), homes=("PersonX", "PersonX_v1", "personx"),
    ),
    "folder": Layout(
        title="a folder of people",
        expected="train/, query/ and gallery/ with a folder for each person, its images named CAMERA_*.jpg or at will",
        read=_folder, marks=("train", "gallery"),
    ),
    "table": Layout(
        title="a table",
        expected="a .csv or .parquet file with the columns path, pid, camid, split (or path, label, split, is_query, "
        "is_gallery, sequence); paths count from its folder",
        read=_table, marks=(),
    ),
}  # fmt: skip


def find(format: str, path: Path, variant: str = "") -> Path | None:
    """Returns the folder of a data set at or a little below a path (the file of a table), or None."""
    layout = LAYOUTS[format]
    if format == "table":
        return path if path.is_file() and path.suffix.lower() in (".csv", ".parquet", ".tsv") else None
    for home in (path, *(path / name for name in layout.homes)):
        if format == "msmt17" and variant and (home / "mask_train_v2").is_dir() != (variant == "v2"):
            continue
        if any(next(home.glob(mark), None) for mark in layout.marks):
            return home
    return None


def detect(path: Path) -> str:
    """Returns the format of the data set at a path by its layout; raises DataError when none fits."""
    fitting = [name for name in LAYOUTS if find(name, path)]
    if "market1501" in fitting and (home := find("market1501", path)):
        some = next(
            (entry.name for entry in os.scandir(home / "bounding_box_train") if MARKET_NAME.match(entry.name)), ""
        )
        if re.match(r"-?\d+_c\d+_f\d", some):
            return "dukemtmc"
        return "market1501" if re.match(r"-?\d+_c\d+s\d", some) else "personx"
    if not fitting:
        known = "; ".join(f"{name}: {layout.expected}" for name, layout in LAYOUTS.items())
        raise DataError(f"{path}: no data set of a known layout ({_listing(path)}). Known are {known}")
    return fitting[0]


def _listing(path: Path) -> str:
    if not path.exists():
        return "no such file or folder"
    if path.is_file():
        return "a file"
    names = sorted((entry.name + "/" * entry.is_dir() for entry in os.scandir(path)), key=natural)
    return f"found {', '.join(map(printable, names[:8])) or 'nothing'}{', ...' if len(names) > 8 else ''}"


def scan(format: str, path: Path | str, variant: str = "") -> Scan:
    """Lists the images of a data set with their people and cameras; opens none of them.

    Args:
        format: A name of `LAYOUTS`, or auto.
        path: Its folder, one above it, or the file of a table.
        variant: As the layout's `variants`; empty: the first one there.

    Raises:
        DataError: Nothing of that layout is there. UsageError: An unknown format or variant.
    """
    path = Path(path).expanduser()
    format = detect(path) if format == "auto" else format
    if format not in LAYOUTS:
        raise UsageError(unknown("format", format, (*LAYOUTS, "auto")))
    layout = LAYOUTS[format]
    if variant and variant not in layout.variants:
        raise UsageError(unknown(f"variant of {layout.title}", variant, layout.variants))
    home = find(format, path, variant)
    if home is None:
        raise DataError(
            f"{path}: {layout.title}{' ' + variant if variant else ''} is not there ({_listing(path)}); expected "
            f"{layout.expected}. To train without data: --data.format synthetic"
        )
    if not inside(Path(os.path.realpath(path)), home):
        raise DataError(f"{home}: a link that leads out of {path}; give the folder it leads to")
    home = Path(os.path.realpath(home.parent)) / home.name if format == "table" else Path(os.path.realpath(home))
    result = Scan(format=format, root=home.parent if format == "table" else home)
    layout.read(result, home, variant)
    result.rows.sort(key=lambda row: natural(row.name))
    return result
