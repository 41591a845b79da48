"""The commands ``sextet reid index`` and ``sextet reid search``: a folder of images into a gallery, and back out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tyro.conf import Positional

import sextet
from sextet.core.console import Console
from sextet.core.errors import DataError, UsageError
from sextet.core.files import sha256_of
from sextet.reid.gallery import Gallery
from sextet.reid.images import inspect, printable
from sextet.reid.scan import Scan

GALLERY = Path("gallery")


def index(
    directory: Positional[Path], /, *, run: Path, gallery: Path = GALLERY, camera: str = r"_c(\d+)",
    first_camera: int = 1, person: str = "", batch: int = 64, remove_missing: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Adds the images of a folder to a gallery. Files that are in it already, by size and time, are not read again.

    Args:
        directory: Folder of images; sub-folders too. Their names become tags; the time is that of the file.
        run: Finished run whose network makes the vectors.
        gallery: Folder of the gallery; made when absent.
        camera: Where file names tell the camera: a regular expression with one group. Market-1501's by default.
        first_camera: Number that names give to the first camera; the gallery counts from 0.
        person: The same for the number of the person; empty: unknown.
        batch: Images at a time.
        remove_missing: Remove from the gallery what is not in the folder any more.

    Returns:
        Counts, and a reason for each skipped file; files = added + replaced + unchanged + skipped.

    Raises:
        UsageError: No folder, no run, a pattern that is not usable, or a gallery of another model.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a folder")
    if batch < 1:
        raise UsageError(f"--batch {batch} is not allowed; it must be 1 or more")
    camera_of, person_of = _number(camera, first_camera), _number(person, 0)
    embedder, root = sextet.load(str(run)), directory.resolve()
    scan = Scan(format="folder", root=root)
    present = {name: stamp for name in scan.files(root) if (stamp := _stamp(scan, name))}
    with Gallery.open(gallery, embedder.feature_size, model=fingerprint(run)) as store:
        known = store.stamps()
        due = [name for name, stamp in present.items() if known.get(name) != stamp]
        added, replaced, console = 0, 0, Console(len(due))
        for start in range(0, len(due), batch):
            names, vectors = _embed(embedder, scan, due[start : start + batch])
            if names:
                stamps, cameras = [present[name] for name in names], [camera_of(name) for name in names]
                store.add(
                    vectors, names=names, stamps=stamps, ids=[person_of(name) for name in names],
                    cameras=[-1 if number is None else number for number in cameras],
                    times=[int(stamp.partition("-")[2]) / 1e9 for stamp in stamps],
                    tags=[name.split("/")[:-1] for name in names],
                )  # fmt: skip
            replaced += sum(name in known for name in names)
            added += sum(name not in known for name in names)
            console.update(min(start + batch, len(due)))
        console.close()
        gone = known.keys() - present.keys() if remove_missing else ()
        removed = store.remove(gone) if gone else 0
        skipped = [{"file": printable(name), "reason": reason} for name, reason in scan.dropped]
        counts = {"added": added, "replaced": replaced, "unchanged": len(present) - len(due), "removed": removed}
        files = added + replaced + counts["unchanged"] + len(skipped)
        return {"files": files, **counts, "skipped": skipped, "vectors": len(store), "gallery": str(gallery)}


def search(
    image: Positional[Path], /, *, run: Path, gallery: Path = GALLERY, k: int = 10, camera: tuple[int, ...] = (),
    exclude_camera: tuple[int, ...] = (), tag: tuple[str, ...] = (), between: tuple[float, float] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Finds the images of a gallery that are most like one image.

    Args:
        image: Image of a person.
        run: The run that the gallery was made with.
        gallery: Folder of the gallery.
        k: How many.
        camera: Only these cameras, counted from 0; -1 is unknown.
        exclude_camera: None of these.
        tag: Only images with all of these tags (names of folders).
        between: Only images from the first to the second time, in seconds since 1970.

    Returns:
        One row for each image found, nearest first.

    Raises:
        UsageError: No gallery, or one of another model. DataError: The image cannot be read.
    """
    with Gallery.open(gallery, model=fingerprint(run)) as store:
        chosen: dict[str, Any] = {"cameras": camera or None, "exclude_cameras": exclude_camera or None, "tags": tag}
        hits = store.search(sextet.load(str(run)).embed([image]), k, times=between, **chosen)[0]
    return [{"rank": rank, **vars(hit), "tags": ", ".join(hit.tags)} for rank, hit in enumerate(hits, 1)]


def fingerprint(run: Path) -> str:
    """Returns the SHA-256 of the weights of a run directory or of its ``final`` folder."""
    for path in (run / "final" / "model.safetensors", run / "model.safetensors"):
        if path.exists():
            return sha256_of(path)
    raise UsageError(f"{run} holds no finished run (no final/model.safetensors)")


def _stamp(scan: Scan, name: str) -> str:
    """Size and time of a file; "" for one that is dropped because it cannot be asked, or named in a text column."""
    try:
        name.encode()
        stat = (scan.root / name).stat()
    except (OSError, UnicodeEncodeError) as error:
        scan.drop(name, getattr(error, "strerror", None) or "its name is not UTF-8")
        return ""
    return f"{stat.st_size}-{stat.st_mtime_ns}"


def _embed(embedder: Any, scan: Scan, names: list[str]) -> tuple[list[str], Any]:
    """Names and vectors of those images that can be read; the others are dropped with the reason."""
    while names:
        try:
            return names, embedder.embed([scan.root / name for name in names], batch=len(names))
        except DataError:
            problems = inspect(scan.root, names, cache=False).problems
            if not problems:
                raise
            for name, reason in problems.items():
                scan.drop(name, reason)
            names = [name for name in names if name not in problems]
    return [], None


def _number(pattern: str, first: int) -> Callable[[str], int | None]:
    """A function from file name to the number in the pattern's group, counted from ``first``."""
    try:
        expression = re.compile(pattern or "(?!)()")
        if expression.groups != 1:
            raise re.error(f"it has {expression.groups} groups and needs one, as in _c(\\d+)")
    except re.error as error:
        raise UsageError(f'the pattern "{pattern}" is not usable: {error}') from error

    def number(name: str) -> int | None:
        match = expression.search(name.rpartition("/")[2])
        text = (match[1] or "") if match else ""
        return int(text) - first if text.isdecimal() else None

    return number
