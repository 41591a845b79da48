"""Image files: decoded to RGB whatever they hold, resized, prefetched in order, and inspected once for damage."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from sextet.core.errors import DataError
from sextet.core.files import atomic_write_text, read_json

if TYPE_CHECKING:
    from sextet.reid.data import Images

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF")  # no kind that starts another program
MAX_IMAGE_PIXELS = 24_000_000
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
MIN_SIDE_PX = 4
"""Images of fewer rows or columns show nobody and count as damaged."""
DRAFT_FACTOR = 2
"""JPEGs are decoded at a fraction of their size while that leaves this many times the pixels needed a side."""
_INDEX = "sextet-images/1"
_MAX_INDEX_BYTES = 512 * 2**20
_ORIENTED = {"exif", "xmp", "Raw profile type exif", "XML:com.adobe.xmp"}
_KINDS = {"L": "greyscale", "1": "black and white", "P": "palette", "CMYK": "CMYK", "RGBA": "transparent",
          "LA": "transparent", "PA": "transparent", "I": "16-bit", "YCbCr": ""}  # fmt: skip
Box = tuple[int, int, int, int]


def printable(name: str) -> str:
    """Returns a file name in one line: control characters and undecodable bytes are escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in name)


def decode(
    source: Path | str | bytes, *, near: tuple[int, int] | None = None, max_pixels: int = MAX_IMAGE_PIXELS
) -> tuple[Image.Image, str]:
    """Decodes an image file to upright RGB; 16 bits are scaled to 8, transparency becomes white.

    Args:
        source: JPEG, PNG, BMP, WebP or TIFF, as the path of a file or its bytes; the content counts, not the name.
        near: Height and width that the image will be resized to: large JPEGs are then decoded at a smaller scale.
        max_pixels: Largest image, judged by its header before anything is decoded.

    Returns:
        The image, and what was converted ("" for plain RGB; else "CMYK", "16-bit, EXIF-rotated" and so on).

    Raises:
        DataError: Empty, damaged, of another format, or too large or too small; the text names the file.
    """
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise ValueError(f"{width}x{height} pixels are over the limit of {max_pixels:,}")
            if min(width, height) < MIN_SIDE_PX:
                raise ValueError(f"{width}x{height} pixels show nothing")
            if near is not None and _ORIENTED.isdisjoint(image.info):
                image.draft(None, (near[1] * DRAFT_FACTOR, near[0] * DRAFT_FACTOR))
            image.load()
            return upright_rgb(image)
    except Exception as error:  # damaged files make the decoders fail in many ways
        name = "image" if isinstance(source, bytes) else printable(str(source))
        raise DataError(f"{name}: {_reason(error, source)}") from error


def upright_rgb(image: Image.Image) -> tuple[Image.Image, str]:
    """Returns an image as :func:`decode` does, and what was converted."""
    oriented = not _ORIENTED.isdisjoint(image.info)
    if image.mode == "RGB" and not oriented and "transparency" not in image.info:
        return image, ""
    kind = _KINDS.get(image.mode[:1] if image.mode.startswith("I") else image.mode, "")
    notes = [kind] if kind else []
    if oriented:
        turned = ImageOps.exif_transpose(image)
        notes += ["EXIF-rotated"] if turned.getexif().get(0x0112, 1) != image.getexif().get(0x0112, 1) else []
        image = turned
    if image.mode.startswith("I"):
        deep = np.asarray(image).astype(np.int64).clip(0, 65535)
        image = Image.fromarray((deep >> 8).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
        notes = [note for note in notes if note != "transparent"] + ["transparent"]
    return image.convert("RGB"), ", ".join(notes)


def _reason(error: Exception, source: Path | str | bytes) -> str:
    if isinstance(error, Image.DecompressionBombError):
        return "its header promises more pixels than memory holds"
    if isinstance(error, UnidentifiedImageError):
        with contextlib.suppress(OSError):
            if not (len(source) if isinstance(source, bytes) else Path(source).stat().st_size):
                return "empty file"
        return f"not a readable {', '.join(FORMATS)} image"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__


class FileImages:
    """Pictures in files, decoded and resized at each read; files are expected to have passed `inspect`.

    Args:
        root: Folder of the names.
        names: (N,) relative paths.
        size: Height and width of what `read` returns.
        boxes: (N,) part of each file that is the picture, (left, top, right, bottom) in pixels; None: all of it.
        interpolation: Of the antialiased resize.
        max_pixels: Largest file, judged by its header.
    """

    def __init__(
        self,
        root: Path | str,
        names: Sequence[str],
        size: tuple[int, int],
        *,
        boxes: Sequence[Box | None] | None = None,
        interpolation: Literal["bilinear", "bicubic"] = "bilinear",
        max_pixels: int = MAX_IMAGE_PIXELS,
    ) -> None:
        self.size = size
        self.root, self.names = Path(root), tuple(names)
        self.boxes = boxes if boxes is not None and any(boxes) else None
        self.interpolation, self.max_pixels = interpolation, max_pixels

    def __len__(self) -> int:
        return len(self.names)

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """Returns images as (B, 3, H, W) uint8 in channels-last memory; raises DataError naming an unreadable file.

        Images of one size are resized together; the result does not depend on what else is in the batch.
        """
        groups: dict[tuple[int, ...], tuple[list[int], list[np.ndarray[Any, Any]]]] = {}
        for place, index in enumerate(indices):
            pixels = self._pixels(int(index))
            places, pictures = groups.setdefault(pixels.shape, ([], []))
            places.append(place)
            pictures.append(pixels)
        out = torch.empty((len(indices), 3, *self.size), dtype=torch.uint8, memory_format=torch.channels_last)
        for places, pictures in groups.values():
            batch = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)
            batch = resized(batch, self.size, self.interpolation)
            if len(groups) == 1:
                return batch
            out[places] = batch
        return out

    def _pixels(self, index: int) -> np.ndarray[Any, Any]:
        path, box = self.root / self.names[index], self.boxes[index] if self.boxes else None
        image, _ = decode(path, near=None if box else self.size, max_pixels=self.max_pixels)
        if box:
            left, top, right, bottom = box
            box = (max(left, 0), max(top, 0), min(right, image.width), min(bottom, image.height))
            if box[0] >= box[2] or box[1] >= box[3]:
                raise DataError(f"{printable(str(path))}: box {left},{top},{right},{bottom} is empty or outside")
            image = image.crop(box)
        return np.asarray(image)


def resized(images: torch.Tensor, size: tuple[int, int], interpolation: str = "bilinear") -> torch.Tensor:
    """Resizes uint8 images (B, 3, H, W) to height and width, with antialiasing; those of that size stay as they are."""
    if tuple(images.shape[2:]) == size:
        return images
    return torch.nn.functional.interpolate(images, size, mode=interpolation, antialias=True)


def prefetch(images: Images, batches: Iterable[Sequence[int]], threads: int = 1) -> Iterator[torch.Tensor]:
    """Yields `images.read(batch)` for each batch, in order, while threads read the next ones.

    The tensors do not depend on `threads`; 0 reads in the caller's thread. An error comes at the place of its batch.
    Close the iterator (or leave it to the garbage collector) to stop early; batches under way are waited for.
    """
    if threads < 1:
        yield from map(images.read, batches)
        return
    pending: deque[Future[torch.Tensor]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="images")
    try:
        for batch in batches:
            pending.append(pool.submit(images.read, batch))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(kw_only=True)
class Inspection:
    """What decoding every file found, by name."""

    problems: dict[str, str] = field(default_factory=dict)
    """Why a file cannot be used."""
    converted: dict[str, str] = field(default_factory=dict)
    """What of a usable file is not plain RGB."""


def inspect(
    root: Path | str,
    names: Sequence[str],
    *,
    max_pixels: int = MAX_IMAGE_PIXELS,
    cache: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Inspection:
    """Decodes every file once (JPEGs at an eighth of their size) and tells which cannot be used.

    Damaged files are found before training rather than replaced when they are read: a batch never holds a stand-in,
    a damaged gallery image never counts as found, people and labels are the same for every rank, resume and number of
    threads. The result is kept in the user's cache folder by size and modification time, so a file is decoded for this
    only once; nothing is written into the data set.

    Args:
        root: Folder of the names.
        names: Relative paths.
        max_pixels: Largest image, judged by its header.
        cache: Use and update what earlier inspections found.
        progress: Called with the files done and the files to do.
    """
    index = _index_path(root, max_pixels)
    known = _read_index(index) if cache else {}
    stamps = {name: _stamp(Path(root) / name) for name in names}
    due = [name for name, stamp in stamps.items() if not stamp or known.get(name, ("",))[0] != stamp]
    found: dict[str, tuple[str, str, str]] = {name: known[name] for name in stamps.keys() - set(due)}

    def look(some: list[str]) -> dict[str, tuple[str, str, str]]:
        results = {}
        for name in some:
            path, problem, note = Path(root) / name, "", ""
            try:
                _, note = decode(path, near=(1, 1), max_pixels=max_pixels)
            except DataError as error:
                problem = str(error).removeprefix(f"{printable(str(path))}: ")
            results[name] = (stamps[name], problem, note)
        return results

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        done = 0
        for results in pool.map(look, (due[start : start + 64] for start in range(0, len(due), 64))):
            found |= results
            done += len(results)
            progress(done, len(due))
    if due and cache:
        content = {"format": _INDEX, "files": known | found}
        with contextlib.suppress(DataError):  # without a cache folder the next run inspects again
            atomic_write_text(index, json.dumps(content, separators=(",", ":")))
    return Inspection(
        problems={name: found[name][1] for name in stamps if found[name][1]},
        converted={name: found[name][2] for name in stamps if found[name][2]},
    )


def _stamp(path: Path) -> str:
    try:
        stat = path.stat()
    except OSError:
        return ""
    return f"{stat.st_size}.{stat.st_mtime_ns}"


def _index_path(root: Path | str, max_pixels: int) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = sha256(os.fsencode(f"{Path(root).resolve()}|{max_pixels}")).hexdigest()[:24]
    return cache / "sextet" / "images" / f"{key}.json"


def _read_index(path: Path) -> dict[str, tuple[str, str, str]]:
    try:
        stored = read_json(path, max_bytes=_MAX_INDEX_BYTES)
        if stored["format"] != _INDEX:
            return {}
        files = {
            name: (str(stamp), str(problem), str(note)) for name, (stamp, problem, note) in stored["files"].items()
        }
    except (DataError, KeyError, TypeError, ValueError, AttributeError):
        return {}  # absent, damaged or of another version: inspect again
    return files
