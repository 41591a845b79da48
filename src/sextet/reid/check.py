"""`sextet data check`: what a data set holds, which files are not used and why, and whether the test leaks."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from hashlib import file_digest
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from sextet.core.console import Console
from sextet.core.errors import DataError
from sextet.reid.data import people_in_both
from sextet.reid.images import MAX_IMAGE_PIXELS, Inspection, inspect, printable
from sextet.reid.readers import LAYOUTS, scan
from sextet.reid.scan import SPLITS, Row, Scan


def check(
    path: Positional[Path],
    *,
    format: str = "auto",
    variant: str = "",
    decode: bool = True,
    leakage: bool = True,
    rows: int = 3,
    files: int = 20,
    max_pixels: int = MAX_IMAGE_PIXELS,
) -> dict[str, Any]:
    """Looks at a re-identification data set before training: counts, names, damaged files and leakage.

    Nothing is changed. Every file is either used or not used for one reason, so the counts add up.

    Args:
        path: Folder of the data set, or the file of a table (.csv, .parquet).
        format: Its layout: auto, market1501, dukemtmc, cuhk03_np, msmt17, randperson, personx, folder, table.
        variant: As `data.variant` of the training: 500k, detected, labelled, v1, v2.
        decode: Decode every image and name those that are damaged or not plain RGB.
        leakage: Compare the contents of files across training, query and gallery.
        rows: Parsed names shown of each split.
        files: Files named of those not used or converted; 0: all.
        max_pixels: Largest image, judged by its header.

    Returns:
        The report.

    Raises:
        DataError: Training would stop; with the report. Or nothing of a known layout is there.
        UsageError: An unknown format or variant.
    """
    console = Console()
    found = scan(format, path, variant)
    names = list(dict.fromkeys(row.name for row in found.rows))
    inspection = Inspection()
    if decode:
        with console.task("decode", len(names)):
            inspection = inspect(
                found.root, names, max_pixels=max_pixels, progress=lambda done, _: console.update(done)
            )
    dropped = found.dropped + [
        (row.name, inspection.problems[row.name]) for row in found.rows if row.name in inspection.problems
    ]
    used = [row for row in found.rows if row.name not in inspection.problems]
    errors = [text for text in (people_in_both(used), *_absent(used)) if text]
    report: dict[str, Any] = {
        "data set": f"{LAYOUTS[found.format].title} in {found.root}",
        "verdict": f"training would stop: {'; '.join(errors)}" if errors else "ready",
        "images": _per_split(used),
        "cameras": _per_camera(used),
        "first names": _first(used, rows),
        "files": {"seen": found.seen, "used": len(used)} | _reasons(dropped),
    }
    if dropped:
        report["not used"] = _lines(dropped, files)
    if inspection.converted:
        report["converted to RGB"] = _lines(inspection.converted.items(), files)
    warnings = list(found.notes)
    if leakage:
        with console.task("compare", len(used)):
            warnings += _leaks(found, used, console.update)
    console.close()
    report["warnings"] = warnings
    if errors:
        raise DataError(f"{found.root}: {report['verdict']}", report)
    return report


def _per_split(rows: Sequence[Row]) -> list[dict[str, Any]]:
    table = []
    for split in SPLITS:
        some = [row for row in rows if row.split == split]
        if some or split != "multi_query":
            people = {row.person for row in some} - {0}
            distractors = sum(row.person == 0 for row in some)
            cameras = {row.camera for row in some} - {-1}
            table.append(
                {
                    "split": split,
                    "images": len(some),
                    "people": len(people),
                    "cameras": len(cameras) or "unknown",
                    "distractors": distractors,
                }
            )
    return table


def _per_camera(rows: Sequence[Row]) -> list[dict[str, Any]]:
    counts = Counter((row.camera, row.split) for row in rows)
    cameras = sorted({camera for camera, _ in counts})
    return [
        {"camera": camera if camera >= 0 else "unknown", **{split: counts[camera, split] for split in SPLITS[:3]}}
        for camera in cameras
    ]


def _first(rows: Sequence[Row], count: int) -> list[dict[str, Any]]:
    return [
        {"file": printable(row.name), "split": split, "person": row.person, "camera": row.camera}
        for split in SPLITS
        for row in [row for row in rows if row.split == split][:count]
    ]


def _reasons(dropped: Iterable[tuple[str, str]]) -> dict[str, int]:
    return {f"not used, {reason}": count for reason, count in Counter(reason for _, reason in dropped).most_common()}


def _lines(named: Iterable[tuple[str, str]], limit: int) -> list[str]:
    lines = [f"{printable(name)}: {reason}" for name, reason in named]
    if limit and len(lines) > limit:
        return [*lines[:limit], f"... {len(lines) - limit:,} more; --files 0 names all"]
    return lines


def _absent(rows: Sequence[Row]) -> list[str]:
    splits = {row.split for row in rows}
    lacking = ["train"] if "train" not in splits else []
    if len({"query", "gallery"} & splits) == 1:
        lacking += sorted({"query", "gallery"} - splits)
    return [f"no usable image in {split}" for split in lacking]


def _leaks(found: Scan, rows: Sequence[Row], progress: Callable[[int], None]) -> list[str]:
    """Finds equal files across splits; only files of equal size are read."""
    sizes: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        if row.split != "multi_query" and row.box is None:
            sizes[(found.root / row.name).stat().st_size].append(row)
    equal: dict[bytes, list[Row]] = defaultdict(list)
    done = 0
    for some in sizes.values():
        for row in some if len(some) > 1 else ():
            with contextlib.suppress(OSError), (found.root / row.name).open("rb") as handle:
                equal[file_digest(handle, "sha256").digest()].append(row)
        done += len(some)
        progress(done)
    both: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for copies in equal.values():
        kinds = {row.split for row in copies}
        queries = [row for row in copies if row.split == "query"]
        others = {(row.person, row.camera) for row in copies if row.split == "gallery"}
        groups = {
            "training and test": [row for row in copies if row.split != "train"] if "train" in kinds else [],
            "query and gallery": [row for row in queries if others - {(row.person, row.camera)}],
            "query and gallery of one person and camera, which the usual protocol ignores": [
                row for row in queries if (row.person, row.camera) in others and row.camera >= 0
            ],
        }
        for kind, leaking in groups.items():
            if leaking:
                both[kind] += len(leaking)
                one_each = {row.split: printable(row.name) for row in copies}
                examples.setdefault(kind, " = ".join(one_each[split] for split in SPLITS if split in one_each))
    return [f"{count:,} test images are equal in {kind} (such as {examples[kind]})" for kind, count in both.items()]
