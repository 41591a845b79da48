"""How fast person images are listed, decoded and augmented, beside torchreid's pipeline (deep-person-reid).

    python benchmarks/reid_loading.py --torchreid CHECKOUT --torchvision SITE_PACKAGES [--rounds 5]

20,000 JPEGs of 64x128 pixels with Market-1501's names are written into a temporary folder. Both sides read the same
files in batches of 64 on one thread, in turns, and do the same work: decode, resize, flip with probability 0.5, in
half of the cases move (torchreid: resize by 1.125 and crop; here: shift by up to 6 %), normalise, erase with
probability 0.5, stack. The median over the rounds of CPU seconds counts. torchreid's own transforms and image reader
are loaded from a checkout by path, and run as it runs them, in a DataLoader without worker processes. They need
torchvision, which is taken from the site-packages of another environment (pip install --no-deps torchvision); two
operators that its Python code wants to see but never calls here are declared first.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

from sextet.core.records import environment  # noqa: E402
from sextet.core.seeding import torch_rng  # noqa: E402
from sextet.reid.augment import augment  # noqa: E402
from sextet.reid.data import load_data  # noqa: E402
from sextet.reid.images import FileImages, prefetch  # noqa: E402
from sextet.reid.readers import scan  # noqa: E402
from sextet.reid.settings import AugmentConfig, DataConfig  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "reid_loading.json"
FILES, BATCH, BATCHES = 20_000, 64, 8
SIZES = ((256, 128), (384, 128))
WORK = {
    "flip, erase": (AugmentConfig(flip=0.5, erase=0.5), ["random_flip", "random_erase"]),
    "flip, move, erase": (
        AugmentConfig(flip=0.5, erase=0.5, shift=0.5, shift_y=0.0625, shift_x=0.0625),
        ["random_flip", "random_crop", "random_erase"],
    ),
}


def write_files(root: Path) -> None:
    """Draws a Market-like data set: smooth pictures with some grain, about 3 KB each."""
    rng = np.random.default_rng(0)
    pictures = []
    for _ in range(1000):
        coarse = Image.fromarray(rng.integers(0, 256, (16, 8, 3), dtype=np.uint8)).resize((64, 128), 3)
        grain = np.asarray(coarse) + rng.normal(0, 4, (128, 64, 3))
        buffer = io.BytesIO()
        Image.fromarray(grain.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
        pictures.append(buffer.getvalue())
    for folder in ("bounding_box_train", "query", "bounding_box_test"):
        (root / folder).mkdir()
    for index in range(FILES):
        person, camera = index // 16 + 1, index % 6 + 1
        folder = "bounding_box_train" if person <= 700 else ("query" if index % 16 < 2 else "bounding_box_test")
        name = f"{person:04}_c{camera}s1_{index:06}_00.jpg"
        (root / folder / name).write_bytes(pictures[index % len(pictures)])


def timed(action: Callable[[], Any]) -> dict[str, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return {"seconds": round(time.perf_counter() - wall, 3), "cpu_seconds": round(time.process_time() - cpu, 3)}


def loading(root: Path) -> dict[str, Any]:
    """Listing, first and second loading, and the images opened in the second."""
    config = DataConfig(format="market1501", root=str(root))
    scan("market1501", root)
    listed = [timed(lambda: scan("market1501", root)) for _ in range(5)]
    first = timed(lambda: load_data(config, (256, 128)))
    opened, original = [0], Image.open

    def counted(*arguments: Any, **options: Any) -> Any:
        opened[0] += 1
        return original(*arguments, **options)

    Image.open = counted
    again = [timed(lambda: load_data(config, (256, 128))) for _ in range(5)]
    Image.open = original
    return {
        "files": FILES,
        "scan": {key: statistics.median(row[key] for row in listed) for key in first},
        "first load_data, every file decoded once for damage": first,
        "load_data again": {key: statistics.median(row[key] for row in again) for key in first},
        "images opened by load_data again": opened[0],
    }


def module(path: Path) -> ModuleType:
    """Imports one file by path."""
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def ours(images: FileImages, config: AugmentConfig, threads: int) -> Iterator[torch.Tensor]:
    """Augmented batches of the first images."""
    generator = torch_rng(0, "data")
    batches = [range(start, start + BATCH) for start in range(0, BATCH * BATCHES, BATCH)]
    for batch in prefetch(images, batches, threads):
        yield augment(batch, config, generator)


def torchreid(checkout: Path, paths: list[Path], size: tuple[int, int], names: list[str]) -> Iterator[torch.Tensor]:
    """The same images through torchreid's reader and transforms."""
    read_image = module(checkout / "torchreid" / "utils" / "tools.py").read_image
    stdout, sys.stdout = sys.stdout, io.StringIO()
    transform, _ = module(checkout / "torchreid" / "data" / "transforms.py").build_transforms(*size, transforms=names)
    sys.stdout = stdout
    random.seed(0)
    torch.manual_seed(0)

    class Pictures(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return BATCH * BATCHES

        def __getitem__(self, index: int) -> torch.Tensor:
            return transform(read_image(str(paths[index])))

    yield from torch.utils.data.DataLoader(Pictures(), batch_size=BATCH)


def consume(stream: Iterator[torch.Tensor], size: tuple[int, int]) -> None:
    count = 0
    for batch in stream:
        assert batch.shape == (BATCH, 3, *size) and batch.dtype == torch.float32
        count += len(batch)
    assert count == BATCH * BATCHES


def throughput(root: Path, checkout: Path, rounds: int) -> dict[str, Any]:
    """Images per CPU second of both sides and their ratio."""
    names = [row.name for row in scan("market1501", root).rows if row.split == "train"]
    results = {}
    for size in SIZES:
        images = FileImages(root, names, size)
        for work, (config, peer) in WORK.items():
            contestants: dict[str, Callable[[], Iterator[torch.Tensor]]] = {
                "sextet": lambda config=config, images=images: ours(images, config, 0),
                "sextet, one thread ahead": lambda config=config, images=images: ours(images, config, 1),
                "torchreid": lambda peer=peer, size=size: torchreid(checkout, [root / n for n in names], size, peer),
            }
            spent: dict[str, list[float]] = {name: [] for name in contestants}
            for number in range(rounds + 1):
                for name, start in contestants.items():
                    stream, began = start(), time.process_time()
                    consume(stream, size)
                    if number:  # the first round warms up
                        spent[name].append(time.process_time() - began)
            rates = {name: round(BATCH * BATCHES / statistics.median(values)) for name, values in spent.items()}
            pairs = [theirs / mine for mine, theirs in zip(spent["sextet"], spent["torchreid"], strict=True)]
            results[f"{size[0]}x{size[1]}: {work}"] = {
                "images_per_cpu_second": rates,
                "ratio": round(statistics.median(pairs), 2),
                "ratio_range": [round(min(pairs), 2), round(max(pairs), 2)],
            }
    return results


def main() -> None:
    """Measures everything, prints it and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torchreid", type=Path, required=True)
    parser.add_argument("--torchvision", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.path.append(str(options.torchvision))
    import torchvision

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        write_files(Path(folder))
        result = {
            "what": "listing 20,000 images; decoding and augmenting 512 of 64x128 pixels per round on one thread",
            "machine": environment() | {"torchvision": torchvision.__version__},
            "rounds": options.rounds,
            "loading": loading(Path(folder)),
            "throughput": throughput(Path(folder), options.torchreid, options.rounds),
        }
    text = json.dumps(result, indent=1)
    print(text)
    RESULTS.write_text(text + "\n")


if __name__ == "__main__":
    main()
