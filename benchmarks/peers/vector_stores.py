"""What `gallery_stores.py` asks of each vector store: create, add, finish, open, search, remove."""

from datetime import timedelta
from pathlib import Path

import numpy as np

K, BLOCK = 10, 1000


class _Store:
    """One store: what it can do is what it does not refuse with NotImplementedError."""

    package, server, durable, one_index = "", "none", "at save", False

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
    package, server, one_index = "usearch", "none for Python (a library)", True
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
        try:
            self.store.create_index("gallery", parameters)
        except Exception as error:  # its client asks again after some minutes, while the index is being built
            if "index already exists" not in str(error):
                raise
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
    "lancedb": _Lance,
    "milvus-lite": _Milvus,
    "qdrant-edge": _QdrantEdge,
    "qdrant-local": _QdrantLocal,
    "usearch": _Usearch,
}
