"""The commands ``sextet reid index`` and ``sextet reid search``: a folder of images into a gallery, and back out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tyro.conf import Positional

import sextet
from sextet.core.console import Console
from sextet.core.errors import DataError, UsageError
from sextet.core.files import read_image, sha256_of
from sextet.reid.gallery import Gallery

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
GALLERY = Path("gallery")
_DEBRIS = ("._*", "Thumbs.db", ".DS_Store", "desktop.ini")


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
    files, embedder = _files(directory), sextet.load(str(run))
    skipped = [{"file": name, "reason": reason} for name, (_, reason) in files.items() if reason]
    present = {name: stamp for name, (stamp, reason) in files.items() if not reason}
    with Gallery.open(gallery, embedder.feature_size, model=fingerprint(run)) as store:
        known = store.stamps()
        due = [name for name, stamp in present.items() if known.get(name) != stamp]
        new, console = [name for name in due if name not in known], Console(len(due))
        failed = []
        for start in range(0, len(due), batch):
            images = {}
            for name in due[start : start + batch]:
                try:
                    images[name] = read_image(directory / name)
                except DataError as error:
                    failed.append({"file": name, "reason": str(error).removeprefix(f"{directory / name}: ")})
            if images:
                cameras = [-1 if (number := camera_of(name)) is None else number for name in images]
                stamps = [present[name] for name in images]
                store.add(
                    embedder.embed(list(images.values()), batch=batch), names=list(images), stamps=stamps,
                    cameras=cameras, ids=[person_of(name) for name in images],
                    times=[int(stamp.partition("-")[2]) / 1e9 for stamp in stamps],
                    tags=[Path(name).parts[:-1] for name in images],
                )  # fmt: skip
            console.update(min(start + batch, len(due)))
        console.close()
        added = len(set(new) - {item["file"] for item in failed})
        counts = {"files": len(files), "added": added, "replaced": len(due) - len(failed) - added}
        gone = known.keys() - present.keys() if remove_missing else ()
        counts |= {"unchanged": len(present) - len(due), "removed": store.remove(gone) if gone else 0}
        return counts | {"skipped": skipped + failed, "vectors": len(store), "gallery": str(gallery)}


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
    picture = read_image(image)
    with Gallery.open(gallery, model=fingerprint(run)) as store:
        chosen: dict[str, Any] = {"cameras": camera or None, "exclude_cameras": exclude_camera or None, "tags": tag}
        hits = store.search(sextet.load(str(run)).embed([picture]), k, times=between, **chosen)[0]
    return [{"rank": rank, **vars(hit), "tags": ", ".join(hit.tags)} for rank, hit in enumerate(hits, 1)]


def fingerprint(run: Path) -> str:
    """Returns the SHA-256 of the weights of a run directory or of its ``final`` folder."""
    for path in (run / "final" / "model.safetensors", run / "model.safetensors"):
        if path.exists():
            return sha256_of(path)
    raise UsageError(f"{run} holds no finished run (no final/model.safetensors)")


def _files(root: Path) -> dict[str, tuple[str, str]]:
    """Stamp and the reason not to use it ("": none) of every file by relative name, in natural order."""
    found = {}
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for path in (Path(folder) / name for name in names + links):
            found[path.relative_to(root).as_posix()] = _look(path, root)
    return dict(sorted(found.items(), key=lambda item: _natural(item[0])))


def _look(path: Path, root: Path) -> tuple[str, str]:
    if any(path.match(pattern) for pattern in _DEBRIS):
        return "", "left by a file manager"
    if path.is_symlink() and (path.is_dir() or not path.resolve().is_relative_to(root.resolve())):
        return "", "a link to a folder" if path.is_dir() else "a link out of the folder"
    if path.suffix.lower() not in SUFFIXES:
        return "", f"not one of {', '.join(suffix[1:] for suffix in SUFFIXES)}"
    try:
        path.name.encode()
        stat = path.stat()
    except (OSError, UnicodeEncodeError) as error:
        return "", getattr(error, "strerror", None) or "its name is not UTF-8"
    return f"{stat.st_size}-{stat.st_mtime_ns}", ""


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


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
