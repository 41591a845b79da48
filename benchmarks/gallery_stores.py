"""Embedded vector stores for the gallery: insert, search, filter, remove, re-open, memory, disk, readers.

Each store runs in processes of its own, on one core: one builds, one opens and queries, one tries to open the folder
while the former holds it. Vectors are drawn like people: 5,000 identities of 20 images, in 128 directions of the space,
with a shift by camera and noise. A search setting is the cheapest that reaches recall@10 of 0.99 against exact search;
exact search counts as 1. Seconds of queries are wall time of single queries, beside the CPU time of all threads.

Stores that are not installed are reported as absent. Needs numpy. Writes results/gallery_stores.json.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LANCE_CPU_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(name, "1")
import numpy as np  # noqa: E402
from peers.vector_stores import BLOCK, STORES, K  # noqa: E402

CAMERAS, PER_ID, CAMERA, TARGET = 6, 20, 2, 0.99
EFS = (16, 32, 64, 128, 256, 512)
BUILT = ("insert_rows_per_second", "insert_rows_per_cpu_second", "insert_and_index_seconds",
         "insert_and_index_cpu_seconds", "peak_mb_build", "disk_mb")  # fmt: skip


def draw(generator, ids, centres, cameras_shift, basis):
    """Unit vectors (N, dim) of identities seen by random cameras, and the cameras (N,)."""
    cameras = generator.integers(0, CAMERAS, len(ids))
    latent = centres[ids] + 0.4 * cameras_shift[cameras] + 0.5 * generator.standard_normal((len(ids), len(basis)))
    vectors = (latent @ basis).astype(np.float32)
    vectors += 0.3 * generator.standard_normal(vectors.shape, np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors, cameras


def make_data(folder, rows, dim, queries):
    """Writes vectors, cameras, queries and the exact answers without and with the camera filter."""
    generator = np.random.default_rng(0)
    basis = generator.standard_normal((128, dim)) / np.sqrt(128)
    centres = generator.standard_normal((max(1, rows // PER_ID), 128))
    shift = generator.standard_normal((CAMERAS, 128))
    wanted, _ = draw(generator, generator.integers(0, len(centres), queries), centres, shift, basis)
    cameras, scores, order = [], [], generator.permutation(rows)
    with (folder / "vectors.f32").open("wb") as file:
        for start in range(0, rows, BLOCK):
            block, seen = draw(generator, order[start : start + BLOCK] % len(centres), centres, shift, basis)
            file.write(block.tobytes())
            cameras.append(seen)
            scores.append(wanted @ block.T)
    cameras, scores = np.concatenate(cameras), np.concatenate(scores, axis=1)
    exact = np.argsort(-scores, axis=1, kind="stable")[:, :K]
    filtered = np.argsort(np.where(cameras == CAMERA, -scores, np.inf), axis=1, kind="stable")[:, :K]
    np.savez(folder / "data.npz", cameras=cameras, queries=wanted, exact=exact, filtered=filtered, dim=dim)


def peak_mb():
    """Highest resident memory of this process so far, in MiB; pages of memory-mapped files count."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def build(store, folder):
    """Inserts everything in blocks and indexes it."""
    data = np.load(folder / "data.npz")
    store.create()
    started, cpu = time.perf_counter(), time.process_time()
    with (folder / "vectors.f32").open("rb") as file:
        for start in range(0, len(data["cameras"]), BLOCK):
            block = np.fromfile(file, np.float32, BLOCK * store.dim).reshape(-1, store.dim)
            ids = np.arange(start, start + len(block))
            store.add(ids, block, data["cameras"][start : start + BLOCK])
    inserted, insert_cpu = time.perf_counter() - started, time.process_time() - cpu
    store.finish()
    rows = len(data["cameras"])
    return {
        "insert_rows_per_second": rows / inserted,
        "insert_rows_per_cpu_second": rows / insert_cpu,
        "insert_and_index_seconds": time.perf_counter() - started,
        "insert_and_index_cpu_seconds": time.process_time() - cpu,
        "peak_mb_build": peak_mb(),
        "disk_mb": sum(path.stat().st_size for path in store.folder.rglob("*") if path.is_file()) / 2**20,
    }


def timed(store, queries, exact, effort, camera=None):
    """Times single queries; returns recall, wall and CPU milliseconds."""
    walls, cpus, right = [], [], 0
    for vector, truth in zip(queries, exact, strict=True):
        wall, cpu = time.perf_counter(), time.process_time()
        found = store.search(vector, effort, camera)
        walls.append(1e3 * (time.perf_counter() - wall))
        cpus.append(1e3 * (time.process_time() - cpu))
        right += len(set(found) & set(truth.tolist()))
    middle, high = np.percentile(walls, [50, 99])
    return {
        "recall": right / exact.size,
        "p50_ms": middle,
        "p99_ms": high,
        "cpu_p50_ms": np.percentile(cpus, 50),
        "cpu_p99_ms": np.percentile(cpus, 99),
        "queries": len(queries),
    }


def query(store, folder, command, limit):
    """Opens, answers, filters, lets a second process try, removes."""
    with np.load(folder / "data.npz") as data:
        queries, exact, filtered, cameras = (data[name] for name in ("queries", "exact", "filtered", "cameras"))
    queries, exact, filtered = queries[:limit], exact[:limit], filtered[:limit]
    started = time.perf_counter()
    store.open(cameras)
    efforts = (None,) if store.index == "flat" else EFS
    store.search(queries[0], efforts[0])
    result = {"open_to_first_answer_seconds": time.perf_counter() - started}
    for effort in efforts:
        if effort is None or timed(store, queries[:100], exact[:100], effort)["recall"] >= TARGET:
            break
    result |= {"effort": effort, "search": timed(store, queries, exact, effort)}
    result["peak_mb_search"] = peak_mb()
    with contextlib.suppress(NotImplementedError):
        result["search_one_camera"] = timed(store, queries[:100], filtered[:100], effort, CAMERA)
    other = subprocess.run([*command, "--phase", "reader"], capture_output=True, text=True)
    result["second_process_reads"] = other.returncode == 0
    if other.returncode:
        result["second_process_error"] = (other.stderr.strip().splitlines() or ["no text"])[-1][:200]
    try:
        started = time.perf_counter()
        store.remove(exact[0, :5].tolist())
        result["remove_5_seconds"] = time.perf_counter() - started
        result["removed"] = not set(store.search(queries[0], effort)) & set(exact[0, :5].tolist())
    except NotImplementedError:
        result["removed"] = None
    return result


def reader(store, folder):
    """What a second process does: opens and asks once."""
    with np.load(folder / "data.npz") as data:
        store.open(data["cameras"])
        return {"found": len(store.search(data["queries"][0], EFS[0] if store.index != "flat" else None))}


def place(folder, name, index):
    """Folder of a store."""
    return folder / (name if STORES[name].one_index else f"{name}-{index}")


def child(options):
    """One phase of one store in this process; prints JSON as the last line."""
    with contextlib.suppress(AttributeError):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    name, index = options.only.split(":")
    data = np.load(options.folder / "data.npz")
    place(options.folder, name, index).mkdir(exist_ok=True)
    store = STORES[name](place(options.folder, name, index), int(data["dim"]), index)
    command = [sys.executable, __file__, "--only", options.only, "--folder", str(options.folder)]
    phases = {"build": lambda: build(store, options.folder), "reader": lambda: reader(store, options.folder)}
    result = phases.get(options.phase, lambda: query(store, options.folder, command, options.queries))()
    print("\n" + json.dumps(result), flush=True)
    os._exit(0)  # some stores leave threads that do not end


def measure(name, index, folder, rows, queries):
    """Returns the row of one store and index; one that shares its files with an earlier row is not built again."""
    store = STORES[name]
    row = {"store": name, "index": index, "settings": store.variants[index]}
    row |= {"server_form": store.server, "durable_after": store.durable}
    try:
        row["version"] = importlib.metadata.version(store.package)
    except importlib.metadata.PackageNotFoundError:
        return row | {"absent": f"pip install {store.package}"}
    command = [
        sys.executable,
        __file__,
        "--only",
        f"{name}:{index}",
        "--folder",
        str(folder),
        "--queries",
        str(queries),
    ]
    same = next((other for other in rows if store.one_index and other["store"] == name), None)
    for phase in ("build", "query"):
        if phase == "build" and same and place(folder, name, index).exists():
            row |= {key: same[key] for key in BUILT}
            continue
        done = subprocess.run([*command, "--phase", phase], capture_output=True, text=True)
        if done.returncode:
            return row | {f"{phase}_error": done.stderr.strip()[-400:]}
        row |= json.loads(done.stdout.strip().splitlines()[-1])
    return row


def table(rows):
    """The rows as Markdown."""
    heads = ["store", "index", "rows/CPU s", "build CPU s", "effort", "recall", "p50 ms", "p99 ms", "CPU p50 ms"]
    heads += ["one camera: recall", "CPU p50 ms", "open s", "peak MB", "disk MB", "removes", "2nd process reads"]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        cells = [row["store"], row["index"]]
        if "search" in row:
            found, one, no = row["search"], row.get("search_one_camera"), {True: "yes", False: "no", None: "no"}
            cells += [f"{row['insert_rows_per_cpu_second']:,.0f}", f"{row['insert_and_index_cpu_seconds']:.0f}"]
            cells += [str(row["effort"] or "all"), f"{found['recall']:.3f}"]
            cells += [f"{found[key]:.3g}" for key in ("p50_ms", "p99_ms", "cpu_p50_ms")]
            cells += [f"{one['recall']:.3f}", f"{one['cpu_p50_ms']:.3g}"] if one else ["no filter", ""]
            cells += [f"{row['open_to_first_answer_seconds']:.2f}", f"{row['peak_mb_search']:,.0f}"]
            cells += [f"{row['disk_mb']:,.0f}", no[row["removed"]], no[row["second_process_reads"]]]
        lines.append(cells + ["" for _ in heads[len(cells) :]] if "search" in row else [*cells, "not measured"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main():
    """Measures, prints a row per store and index, and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="a store, or store:index")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="where data and stores are kept; default: a temporary folder")
    parser.add_argument("--keep", action="store_true", help="do not repeat what the file of results has")
    parser.add_argument("--table", action="store_true", help="print the file of results as Markdown and end")
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results") / "gallery_stores.json")
    options = parser.parse_args()
    if options.phase:
        return child(options)
    if options.table:
        return print(table(json.loads(options.out.read_text())["stores"]))
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not (folder / "data.npz").exists():
            make_data(folder, options.rows, options.dim, options.queries)
        machine = {"python": platform.python_version(), "numpy": np.__version__, "cores": os.cpu_count()}
        result = {"machine": machine, "rows": options.rows, "dim": options.dim, "threads": 1, "stores": []}
        if options.keep and options.out.exists():
            result["stores"] = json.loads(options.out.read_text())["stores"]
        rows = result["stores"]
        for name, store in STORES.items():
            for index in store.variants:
                known = any((row["store"], row["index"]) == (name, index) for row in rows)
                if not known and options.only in (None, name, f"{name}:{index}"):
                    rows.append(measure(name, index, folder, rows, options.queries))
                    print(json.dumps(rows[-1]), flush=True)
                    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
