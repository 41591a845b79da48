"""Embedded vector stores for the gallery: insert, search, filter, remove, re-open, memory, disk, readers.

Each store runs in processes of its own, on one core: one builds, one opens and queries, one tries to open the folder
while the former holds it. Vectors are drawn like people: 5,000 identities of 20 images, in 128 directions of the space,
with a shift by camera and noise. A search setting is the cheapest that reaches recall@10 of 0.99 against exact search;
exact search counts as 1. Seconds of queries are wall time of single queries, beside the CPU time of all threads.

Usage: gallery_stores.py [--only NAME] [--rows 100000] [--dim 2048] [--queries 300] [--out FILE]. Stores that are not
installed are reported as absent. Needs numpy and psutil. Writes results/gallery_stores.json.
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
from datetime import timedelta
from pathlib import Path

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LANCE_CPU_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(name, "1")
import numpy as np  # noqa: E402

K, BLOCK, CAMERAS, PER_ID, CAMERA, TARGET = 10, 1000, 6, 20, 2, 0.99
EFS = (16, 32, 64, 128, 256, 512)


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


class _Store:
    """One store: what it can do is what it does not refuse with NotImplementedError."""

    package, settings, sweep, server, durable = "", "", (None,), "none", "at save"

    def __init__(self, folder, dim, index):
        self.folder, self.dim, self.index = Path(folder), dim, index

    def finish(self):
        """Builds indexes and saves, after the last insert."""

    def remove(self, ids):
        raise NotImplementedError


class _Faiss(_Store):
    package, server = "faiss-cpu", "none (a library)"
    variants = {"flat": "IDMap2,Flat, inner product", "hnsw": "HNSW, M=16, efConstruction=100"}

    def create(self):
        import faiss

        faiss.omp_set_num_threads(1)
        self.faiss = faiss
        if self.index == "flat":
            self.store = faiss.IndexIDMap2(faiss.IndexFlatIP(self.dim))
        else:
            inner = faiss.IndexHNSWFlat(self.dim, 16, faiss.METRIC_INNER_PRODUCT)
            inner.hnsw.efConstruction = 100
            self.store = faiss.IndexIDMap2(inner)

    def add(self, ids, vectors, cameras):
        self.store.add_with_ids(vectors, ids)

    def finish(self):
        self.faiss.write_index(self.store, str(self.folder / "index.faiss"))

    def open(self, cameras):
        import faiss

        faiss.omp_set_num_threads(1)
        self.faiss, self.cameras = faiss, cameras  # the library keeps no fields: the caller must
        self.store = faiss.read_index(str(self.folder / "index.faiss"), faiss.IO_FLAG_MMAP_IFC)

    def search(self, vector, effort, camera=None):
        options = {}
        if camera is not None:
            options["sel"] = self.faiss.IDSelectorBatch(np.flatnonzero(self.cameras == camera))
        if effort:
            options["efSearch"] = effort
        kind = self.faiss.SearchParametersHNSW if self.index == "hnsw" else self.faiss.SearchParameters
        parameters = kind(**options) if options else None
        return self.store.search(vector[None], K, params=parameters)[1][0].tolist()

    def remove(self, ids):
        if self.index == "hnsw":
            raise NotImplementedError
        store = self.faiss.read_index(str(self.folder / "index.faiss"))
        store.remove_ids(np.asarray(ids))
        self.store = store


class _Usearch(_Store):
    package, server = "usearch", "none for Python (a library)"
    variants = {"flat": "the HNSW index, searched with exact=True", "hnsw": "HNSW, connectivity 16, expansion_add 100"}

    def create(self):
        from usearch.index import Index

        self.store = Index(ndim=self.dim, metric="ip", dtype="f32", connectivity=16, expansion_add=100)

    def add(self, ids, vectors, cameras):
        self.store.add(ids, vectors, threads=1)

    def finish(self):
        self.store.save(str(self.folder / "index.usearch"))

    def open(self, cameras):
        from usearch.index import Index

        self.store = Index(ndim=self.dim, metric="ip", dtype="f32")
        self.store.view(str(self.folder / "index.usearch"))

    def search(self, vector, effort, camera=None):
        if camera is not None:
            raise NotImplementedError
        if effort:
            self.store.expansion_search = effort
        return self.store.search(vector, K, threads=1, exact=self.index == "flat").keys.tolist()

    def remove(self, ids):
        self.store.load(str(self.folder / "index.usearch"))
        self.store.remove(np.asarray(ids), threads=1)


class _QdrantLocal(_Store):
    package, server, durable = "qdrant-client", "Qdrant server and cluster, same client", "each call"
    variants = {"flat": "local mode: numpy over all points; fields and vectors pickled in SQLite"}

    def client(self):
        from qdrant_client import QdrantClient, models

        self.models, self.store = models, QdrantClient(path=str(self.folder))

    def create(self):
        self.client()
        shape = self.models.VectorParams(size=self.dim, distance=self.models.Distance.COSINE)
        self.store.create_collection("gallery", vectors_config=shape)

    def add(self, ids, vectors, cameras):
        payload = [{"camera": camera} for camera in cameras.tolist()]
        self.store.upload_collection("gallery", vectors=vectors, ids=ids.tolist(), payload=payload, batch_size=BLOCK)

    def finish(self):
        self.store.close()

    def open(self, cameras):
        self.client()

    def search(self, vector, effort, camera=None):
        chosen = None
        if camera is not None:
            match = self.models.FieldCondition(key="camera", match=self.models.MatchValue(value=camera))
            chosen = self.models.Filter(must=[match])
        found = self.store.query_points("gallery", query=vector, limit=K, query_filter=chosen, with_payload=False)
        return [point.id for point in found.points]

    def remove(self, ids):
        self.store.delete("gallery", points_selector=self.models.PointIdsList(points=ids))


class _QdrantEdge(_Store):
    package, server, durable = "qdrant-edge-py", "Qdrant server by snapshots; another API than its client", "each call"
    variants = {"flat": "exact=True, vectors memory-mapped", "hnsw": "HNSW, m=16, ef_construct=100"}

    def config(self):
        import qdrant_edge as edge

        self.edge = edge
        graph = edge.HnswIndexConfig(m=16, ef_construct=100, full_scan_threshold=10, max_indexing_threads=1)
        limit = 10**9 if self.index == "flat" else 1000
        optimizers = edge.EdgeOptimizersConfig(default_segment_number=1, indexing_threshold=limit)
        vectors = edge.EdgeVectorParams(size=self.dim, distance=edge.Distance.Cosine, memory=edge.Memory.Cold)
        return edge.EdgeConfig(vectors=vectors, hnsw_config=graph, optimizers=optimizers, max_search_threads=1)

    def create(self):
        config = self.config()
        self.store = self.edge.EdgeShard.create(str(self.folder), config)

    def add(self, ids, vectors, cameras):
        rows = zip(ids.tolist(), vectors.tolist(), cameras.tolist(), strict=True)
        points = [self.edge.Point(name, vector, {"camera": camera}) for name, vector, camera in rows]
        self.store.update(self.edge.UpdateOperation.upsert_points(points))

    def finish(self):
        self.store.flush()
        self.store.optimize()
        self.store.close()

    def open(self, cameras):
        config = self.config()
        self.store = self.edge.EdgeShard.load(str(self.folder), config)

    def search(self, vector, effort, camera=None):
        edge, chosen = self.edge, None
        if camera is not None:
            chosen = edge.Filter(must=[edge.FieldCondition("camera", match=edge.MatchValue(camera))])
        parameters = edge.SearchParams(hnsw_ef=effort, exact=self.index == "flat")
        query = edge.Query.Nearest(vector.tolist())
        request = edge.SearchRequest(query=query, limit=K, filter=chosen, params=parameters)
        return [point.id for point in self.store.search(request)]

    def remove(self, ids):
        self.store.update(self.edge.UpdateOperation.delete_points(ids))


class _Milvus(_Store):
    package, server, durable = "milvus-lite", "Milvus server and cluster, same client (pymilvus)", "each call"
    variants = {"flat": "FLAT", "hnsw": "HNSW, M=16, efConstruction=100 (faiss)"}

    def client(self):
        from pymilvus import MilvusClient

        self.store = MilvusClient(uri=str(self.folder / "gallery.db"))

    def create(self):
        from pymilvus import DataType

        self.client()
        schema = self.store.create_schema(auto_id=False)
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("camera", DataType.INT64)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=self.dim)
        self.store.create_collection("gallery", schema=schema)

    def add(self, ids, vectors, cameras):
        rows = zip(ids.tolist(), vectors, cameras.tolist(), strict=True)
        self.store.insert("gallery", [{"id": name, "vector": row, "camera": camera} for name, row, camera in rows])

    def finish(self):
        self.store.flush("gallery")
        parameters, graph = self.store.prepare_index_params(), {"M": 16, "efConstruction": 100}
        kind, options = ("FLAT", {}) if self.index == "flat" else ("HNSW", graph)
        parameters.add_index("vector", index_type=kind, metric_type="IP", params=options)
        self.store.create_index("gallery", parameters)
        self.store.load_collection("gallery")
        self.store.close()

    def open(self, cameras):
        self.client()
        self.store.load_collection("gallery")

    def search(self, vector, effort, camera=None):
        options = {"metric_type": "IP", "params": {"ef": effort} if effort else {}}
        chosen = "" if camera is None else f"camera == {camera}"
        found = self.store.search("gallery", [vector], filter=chosen, limit=K, search_params=options)
        return [hit["id"] for hit in found[0]]

    def remove(self, ids):
        self.store.delete("gallery", ids=ids)


class _Lance(_Store):
    package, durable = "lancedb", "each call"
    server = "object stores (s3://, gs://, az://) and LanceDB's server (db://), same client"
    variants = {"flat": "no vector index", "ivf": "IVF_FLAT, 256 partitions"}

    def create(self):
        import lancedb
        import pyarrow as pa

        self.arrow = pa
        vector = pa.list_(pa.float32(), self.dim)
        schema = pa.schema([("id", pa.int64()), ("camera", pa.int32()), ("vector", vector)])
        self.store = lancedb.connect(self.folder).create_table("gallery", schema=schema)

    def add(self, ids, vectors, cameras):
        rows = self.arrow.FixedSizeListArray.from_arrays(vectors.ravel(), self.dim)
        columns = [self.arrow.array(ids), self.arrow.array(cameras.astype(np.int32)), rows]
        self.store.add(self.arrow.Table.from_arrays(columns, schema=self.store.schema))

    def finish(self):
        self.store.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)  # or each block stays twice
        if self.index == "ivf":
            from lancedb.index import IvfFlat

            self.store.create_index("vector", config=IvfFlat(distance_type="dot", num_partitions=256))

    def open(self, cameras):
        import lancedb

        self.store = lancedb.connect(self.folder).open_table("gallery")

    def search(self, vector, effort, camera=None):
        query = self.store.search(vector).metric("dot").limit(K).select(["id"])
        query = query.nprobes(effort) if effort else query.bypass_vector_index()
        if camera is not None:
            query = query.where(f"camera = {camera}")
        return query.to_arrow()["id"].to_pylist()

    def remove(self, ids):
        self.store.delete(f"id IN ({', '.join(map(str, ids))})")


STORES = {
    "faiss": _Faiss,
    "usearch": _Usearch,
    "lancedb": _Lance,
    "milvus-lite": _Milvus,
    "qdrant-edge": _QdrantEdge,
    "qdrant-local": _QdrantLocal,
}


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
        "cpu_ms": float(np.median(cpus)),
        "queries": len(queries),
    }


def query(store, folder, command):
    """Opens, answers, filters, lets a second process try, removes."""
    with np.load(folder / "data.npz") as data:
        queries, exact, filtered, cameras = (data[name] for name in ("queries", "exact", "filtered", "cameras"))
    started = time.perf_counter()
    store.open(cameras)
    efforts = (None,) if store.index == "flat" else EFS
    store.search(queries[0], efforts[0])
    result = {"open_to_first_answer_seconds": time.perf_counter() - started}
    for effort in efforts:
        chosen = timed(store, queries[:100], exact[:100], effort)
        if chosen["recall"] >= TARGET:
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


def child(options):
    """One phase of one store in this process; prints JSON as the last line."""
    with contextlib.suppress(AttributeError):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    name, index = options.only.split(":")
    data = np.load(options.folder / "data.npz")
    place = options.folder / options.only.replace(":", "-")
    place.mkdir(exist_ok=True)
    store = STORES[name](place, int(data["dim"]), index)
    command = [sys.executable, __file__, "--only", options.only, "--folder", str(options.folder)]
    phases = {"build": lambda: build(store, options.folder), "reader": lambda: reader(store, options.folder)}
    result = phases.get(options.phase, lambda: query(store, options.folder, command))()
    print("\n" + json.dumps(result), flush=True)
    os._exit(0)  # some stores leave threads that do not end


def measure(names, folder, options):
    """Yields one row per store and index."""
    for name in names:
        store = STORES[name.split(":")[0]]
        for index in [name.split(":")[1]] if ":" in name else store.variants:
            row = {"store": name.split(":")[0], "index": index, "settings": store.variants[index]}
            row |= {"server_form": store.server, "durable_after": store.durable}
            try:
                row["version"] = importlib.metadata.version(store.package)
            except importlib.metadata.PackageNotFoundError:
                yield row | {"absent": f"pip install {store.package}"}
                continue
            command = [sys.executable, __file__, "--only", f"{row['store']}:{index}", "--folder", str(folder)]
            for phase in ("build", "query"):
                done = subprocess.run([*command, "--phase", phase], capture_output=True, text=True)
                if done.returncode:
                    row[f"{phase}_error"] = done.stderr.strip()[-400:]
                    break
                row |= json.loads(done.stdout.strip().splitlines()[-1])
            yield row


def main():
    """Measures, prints a row per store and index, and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="a store, or store:index")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results") / "gallery_stores.json")
    options = parser.parse_args()
    if options.phase:
        return child(options)
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder), options.rows, options.dim, options.queries)
        rows = []
        for row in measure([options.only] if options.only else STORES, Path(folder), options):
            rows.append(row)
            print(json.dumps(row), flush=True)
            result = {
                "machine": {"python": platform.python_version(), "numpy": np.__version__, "cores": os.cpu_count()},
                "rows": options.rows,
                "dim": options.dim,
                "threads": 1,
                "stores": rows,
            }
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
