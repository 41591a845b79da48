"""A gallery of one million vectors of 2,048 numbers in float16 (4.1 GB): time to build, memory and time to search.

One process builds, another opens and searches, so that its peak memory is that of searching. Right answers are found
while building, in double precision of the rounded vectors. Needs 20 GB of free disk while small files are joined.
Writes results/gallery_million.json.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np
from gallery_stores import CAMERA, draw, peak_mb

from sextet.core.records import environment
from sextet.reid.gallery import BLOCK, Gallery

K = 10


def nearest(wanted, block, first, places, distances):
    """Merges a block into the K nearest of each query."""
    rounded = block.astype(np.float16).astype(np.float64)
    near = np.concatenate([distances, 1 - wanted.astype(np.float64) @ rounded.T], axis=1)
    all_places = np.concatenate([places, np.tile(first + np.arange(len(block)), (len(wanted), 1))], axis=1)
    order = np.argsort(near, axis=1, kind="stable")[:, :K]
    return np.take_along_axis(all_places, order, 1), np.take_along_axis(near, order, 1)


def build(folder, rows, dim, queries, pipe):
    """Draws, adds, and sends the queries, the right answers and what it cost."""
    generator = np.random.default_rng(0)
    basis = generator.standard_normal((128, dim)) / np.sqrt(128)
    centres, shift = generator.standard_normal((rows // 20, 128)), generator.standard_normal((6, 128))
    wanted, _ = draw(generator, generator.integers(0, len(centres), queries), centres, shift, basis)
    places, distances = np.zeros((queries, 0), np.int64), np.zeros((queries, 0))
    seconds = cpu = 0.0
    with Gallery.open(folder, dim, half=True) as gallery:
        for first in range(0, rows, BLOCK):
            block, cameras = draw(generator, np.arange(first, min(first + BLOCK, rows)) // 20, centres, shift, basis)
            places, distances = nearest(wanted, block, first, places, distances)
            names = [str(first + place) for place in range(len(block))]
            started, before = time.perf_counter(), time.process_time()
            gallery.add(block, names=names, cameras=cameras)
            seconds, cpu = seconds + time.perf_counter() - started, cpu + time.process_time() - before
            if first // BLOCK % 20 == 0:
                print(f"{first:,} rows, {seconds:.0f} s, {cpu:.0f} CPU s", flush=True)
        size = gallery.info()["bytes"]
    cost = {"add_seconds": seconds, "add_cpu_seconds": cpu, "peak_mb": peak_mb(), "bytes_with_old_versions": size}
    pipe.send((wanted, places, cost))


def search(folder, wanted, places, pipe):
    """Opens, searches one query at a time, then one camera."""
    started = time.perf_counter()
    gallery = Gallery.open(folder)
    gallery.search(wanted[0], K)
    result = {"open_to_first_answer_seconds": time.perf_counter() - started, "order_equals_exact": True}
    for name, filters in (("search", {}), ("search_one_camera", {"cameras": [CAMERA]})):
        walls, cpus = [], []
        for query, truth in zip(wanted, places, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            hits = gallery.search(query, K, **filters)[0]
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
            if not filters:
                result["order_equals_exact"] &= [int(hit.name) for hit in hits] == truth.tolist()
        result[f"{name}_seconds"] = {"p50": np.median(walls), "max": max(walls), "cpu_p50": np.median(cpus)}
    pipe.send(result | {"queries": len(wanted), "peak_mb": peak_mb()})


def alone(function, *arguments):
    """Returns what the function sends, from a process of its own."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=function, args=(*arguments, sender))
    process.start()
    sender.close()
    value = receiver.recv()
    process.join()
    return value


def main():
    """Builds, searches, prints and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results") / "gallery_million.json")
    options = parser.parse_args()
    result = {"machine": environment(), "rows": options.rows, "dim": options.dim, "dtype": "float16"}
    with tempfile.TemporaryDirectory() as folder:
        wanted, places, result["build"] = alone(build, folder, options.rows, options.dim, options.queries)
        result["search"] = alone(search, folder, wanted, places)
    text = json.dumps(result, indent=1)
    print(text)
    options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
