"""CUHK03 in its new protocol: people and splits from the published lists, images from the archive."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import numpy as np
from PIL import Image

from sextet.core.errors import DataError, missing_extra
from sextet.reid.scan import SPLITS, Row, Scan

NAME = re.compile(r"\d+_\d+_(\d+)_\d+", re.ASCII)
"""The view in 1_001_2_06.png: camera pair, person in it, view, image."""


def read_cuhk03(scan: Scan, home: Path, variant: str) -> None:
    """Lists CUHK03 in its new protocol (Zhong et al. 2017), from folders like Market-1501's or from its lists.

    Raises:
        DataError: Images or protocol lack, or the protocol is damaged.
    """
    kind = "labeled" if variant.startswith("label") else "detected"
    for spelling in (kind, "labelled" if kind == "labeled" else kind):
        if (home / spelling / "bounding_box_train").is_dir():
            scan.add_boxes(home / spelling)
            break
    else:
        _read_protocol(scan, home, kind)
    scan.number_cameras()


def _read_protocol(scan: Scan, home: Path, kind: str) -> None:
    images, protocol = home / f"images_{kind}", home / f"cuhk03_new_protocol_config_{kind}.mat"
    if not images.is_dir() or not protocol.is_file():
        lacking = protocol if images.is_dir() else images
        raise DataError(
            f"{lacking}: not there; CUHK03-NP needs {protocol.name} and the images of cuhk-03.mat in {images.name}/ as "
            f"PAIR_PERSON_VIEW_IMAGE.png (1_001_1_01.png): sextet.reid.cuhk03.extract_cuhk03(MAT, FOLDER) writes them"
        )
    from scipy.io import loadmat

    try:
        table = loadmat(protocol, variable_names=["filelist", "labels", "train_idx", "query_idx", "gallery_idx"])
        names = [str(cell[0]) for cell in table["filelist"].ravel()]
        labels = table["labels"].ravel().tolist()
        places = {split: (table[f"{split}_idx"].ravel() - 1).tolist() for split in SPLITS[:3]}
        offset = 1 - min(1, *labels)
        listed = []
        for split, indices in places.items():
            for index in indices:
                if index < 0 or not (match := NAME.match(names[index])):
                    raise ValueError(f"image {index + 1} of {split} has no name that tells its view")
                place = (images / names[index]).relative_to(scan.root).as_posix()
                listed.append(Row(split, place, int(labels[index]) + offset, int(match[1])))
    except Exception as error:  # damaged files make loadmat fail in many ways
        raise DataError(f"{protocol}: not the new protocol of CUHK03 ({error})") from error
    scan.add_listed(images, listed)


def extract_cuhk03(archive: Path | str, folder: Path | str) -> dict[str, int]:
    """Writes the images of cuhk-03.mat as images_detected/ and images_labeled/ in a folder, for the new protocol.

    The archive holds for each kind a list of camera pairs, for each pair ten image places of each person, five from
    each view (Li et al. 2014). Returns the images written of each kind.

    Raises:
        DataError: Another file, or the folder cannot be written. UsageError: h5py is not installed.
    """
    try:
        h5py = importlib.import_module("h5py")
    except ModuleNotFoundError as error:
        raise missing_extra("h5py", "reid", "cuhk-03.mat") from error
    counts: dict[str, int] = {}
    try:
        with h5py.File(archive, "r") as file:
            for kind in ("detected", "labeled"):
                out = Path(folder) / f"images_{kind}"
                out.mkdir(parents=True, exist_ok=True)
                counts[kind] = 0
                for pair, people in enumerate(file[kind][0], 1):
                    for (image, person), place in np.ndenumerate(file[people][:]):
                        if (pixels := file[place][:]).ndim == 3:
                            name = f"{pair}_{person + 1:03}_{1 + image // 5}_{image + 1:02}.png"
                            Image.fromarray(pixels.T).save(out / name)
                            counts[kind] += 1
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{archive}: not the archive of CUHK03, or {folder} cannot be written ({error})") from error
    return counts
