"""Small image files in the layouts of the public data sets, drawn from a seed."""

import struct
import zlib

import numpy as np
from PIL import Image

MARKET = {
    "bounding_box_train": ["0002_c1s1_000451_03.jpg", "0002_c2s1_000301_01.jpg", "0007_c10s3_077419_03.jpg",
                           "0007_c3s3_077419_03.jpg", "-1_c1s1_000401_03.jpg", "0000_c1s1_000151_01.jpg"],
    "query": ["0001_c1s1_001051_00.jpg", "0003_c2s1_001051_00.jpg"],
    "bounding_box_test": ["0001_c2s1_001976_01.jpg", "0001_c1s1_001976_01.jpg", "0003_c1s6_015971_02.jpg",
                          "0000_c3s1_000151_01.jpg", "-1_c1s1_000401_03.jpg"],
    "gt_bbox": ["0001_c1s1_001051_00.jpg", "0001_c1s2_001052_00.jpg", "0001_c2s1_001976_01.jpg",
                "0002_c1s1_000451_00.jpg"],
}  # fmt: skip
DUKE = {
    "bounding_box_train": ["0001_c2_f0046182.jpg", "0001_c1_f0044158.jpg"],
    "query": ["0005_c2_f0046985.jpg"],
    "bounding_box_test": ["0005_c5_f0051341.jpg", "0006_c8_f0051341.jpg"],
}


def draw(seed, size=(16, 32)):
    """A picture of smooth noise, (width, height)."""
    colors = np.random.default_rng(seed).integers(0, 256, (4, 2, 3), dtype=np.uint8)
    return Image.fromarray(colors).resize(size, Image.Resampling.BICUBIC)


def write(root, folders, seed=0):
    """Draws every file of folders, {folder: names}, under root; returns the root."""
    for folder, names in folders.items():
        for name in names:
            path = root / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            draw(seed).save(path)
            seed += 1
    return root


def truncate(path):
    """Cuts a file in the middle."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])


def png_header(path, width, height):
    """A PNG that promises pixels it does not hold."""
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(64)))]
    chunks = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
