"""A gallery of image vectors on disk: add, remove, exact search with filters, several readers and one writer.

The store is LanceDB (see ``docs/gallery.md`` for the comparison behind the choice): a table of versioned files. Every
``add`` is one commit, so a reader sees it whole or not at all, and a writer that dies loses nothing it has reported.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sextet.core.errors import DataError, UsageError, missing_extra
from sextet.core.records import lock_directory

FORMAT, TABLE = "sextet-gallery-1", "gallery"
BLOCK = 4096
FIELDS = ["name", "id", "camera", "time", "tags"]
Column = Sequence[Any] | NDArray[Any] | None


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One found image.

    Attributes:
        name: What the image was added as.
        distance: Cosine distance ``1 - q.g`` in [0, 2], computed in double precision.
        id: Person, if known.
        camera: Camera; -1 if unknown.
        time: Seconds on the clock of the caller, if known.
        tags: Any words.
    """

    name: str
    distance: float
    id: int | None
    camera: int
    time: float | None
    tags: tuple[str, ...]


class Gallery:
    """A persisted set of unit vectors by name; make one with :meth:`open`, use it as a context manager."""

    def __init__(self, table: Any, path: str, folder: Path | None) -> None:
        self._table, self._path, self._folder = table, path, folder
        with _reading(path):
            facts = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
            kind = table.schema.field("vector").type if facts.get("format") == FORMAT else None
        if kind is None:
            raise DataError(f"{path}: not a gallery of sextet (its table has no mark {FORMAT})")
        self.dim, self.model, self._half = int(kind.list_size), facts["model"], str(kind.value_type) == "halffloat"
        self._writer: contextlib.ExitStack | None = None
        self._numbers, self._last = dict[str, int](), -1

    @classmethod
    def open(
        cls, path: Path | str, dim: int | None = None, server: str | None = None, *, model: str = "", half: bool = False
    ) -> Gallery:
        """Opens a gallery, or makes one when there is none and ``dim`` is given.

        Args:
            path: A folder; an address of an object store that several machines share (``s3://``, ``gs://``, ``az://``);
                with ``server`` the name of a database there.
            dim: Length of the vectors. It must be that of an existing gallery.
            server: Address of a LanceDB server. Its key is taken from ``LANCEDB_API_KEY``.
            model: SHA-256 of the weights that make the vectors, recorded by a new gallery and compared with an old one.
            half: A new gallery keeps float16, half the size; distances are then those of the rounded vectors.

        Raises:
            UsageError: No gallery and no ``dim``, or vectors of another length or model. DataError: Damaged files.
        """
        try:
            lancedb = importlib.import_module("lancedb")
        except ModuleNotFoundError as error:
            raise missing_extra(str(error.name), "reid", "the gallery") from error
        address = str(path)
        options: dict[str, Any] = {"read_consistency_interval": timedelta(0)}
        if server is not None:
            address = f"db://{address.removeprefix('db://')}"
            options = {"api_key": os.environ.get("LANCEDB_API_KEY", "none"), "host_override": server}
        folder = None if "://" in address else Path(path)
        absent = UsageError(f"{address}: no gallery here; make one: sextet reid index IMAGES --run RUN")
        if dim is None and folder is not None and not folder.is_dir():
            raise absent
        with _reading(address):
            store = lancedb.connect(address, **options)
            if TABLE in store.list_tables().tables:
                table = store.open_table(TABLE)
            elif dim is None:
                raise absent
            else:
                table = store.create_table(TABLE, schema=_schema(dim, model, half), exist_ok=True)
        gallery = cls(table, address, folder)
        if dim not in (None, gallery.dim) or model not in ("", gallery.model):
            old, new = (name[:12] or "unknown" for name in (gallery.model, model))
            raise UsageError(
                f"{address}: made by model {old} with vectors of {gallery.dim} numbers, not by model {new} with "
                f"{dim or gallery.dim}; they cannot be compared: choose another gallery, or index again with this model"
            )
        return gallery

    def __enter__(self) -> Gallery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        with _reading(self._path):
            return int(self._table.count_rows())

    def info(self) -> dict[str, Any]:
        """Returns path, number and length of the vectors, their type on disk, the model, and bytes on disk."""
        kind, files = "float16" if self._half else "float32", self._folder.rglob("*") if self._folder else ()
        facts = {"path": self._path, "vectors": len(self), "dim": self.dim, "dtype": kind, "model": self.model}
        return facts | {"bytes": sum(file.stat().st_size for file in files if file.is_file()) or None}

    def close(self) -> None:
        """Lets the next writer in; this gallery can still be read. Nothing is lost without it."""
        if self._writer is not None:
            with self._writer:
                self._compact(most=64)
            self._writer = None

    def add(
        self, vectors: ArrayLike, *, names: Sequence[str], ids: Column = None, cameras: Column = None,
        times: Column = None, tags: Column = None, stamps: Column = None,
    ) -> None:  # fmt: skip
        """Adds vectors, or replaces those of the same names, which keep their place in the order.

        When it returns, all of them are stored; when it raises, or the process dies, whole blocks of 4,096 are or not.

        Args:
            vectors: (N, dim) finite; those not of unit length are divided by their length.
            names: (N,) different names.
            ids: (N,) persons.
            cameras: (N,) cameras from 0; -1 is unknown.
            times: (N,) seconds.
            tags: (N,) any number of words each.
            stamps: (N,) what :meth:`stamps` returns, to tell whether a file has changed.

        Raises:
            UsageError: Lengths differ, a name is twice there, a vector is zero or not finite, another process writes.
        """
        unit, names, count = _unit(vectors, self.dim), list(names), len(names)
        given = {"id": ids, "camera": cameras, "time": times, "tags": tags, "stamp": stamps, "vector": unit}
        for key, values in given.items():
            if values is not None and len(values) != count:
                raise UsageError(f"{count} names, but {len(values)} of {key}")
        if len(set(names)) != count:
            raise UsageError(f'the name "{Counter(names).most_common(1)[0][0]}" is given more than once')
        self._write()
        unknown = [name for name in names if name not in self._numbers]
        fresh = {name: self._last + place for place, name in enumerate(unknown, 1)}
        numbers = [fresh.get(name, self._numbers.get(name)) for name in names]
        columns: dict[str, Any] = {"name": names, "number": numbers}
        for key, empty in {"id": None, "camera": -1, "time": None, "tags": (), "stamp": ""}.items():
            values = given[key]
            columns[key] = [empty] * count if values is None else getattr(values, "tolist", lambda v=values: v)()
        arrow = importlib.import_module("pyarrow")
        flat = arrow.array(unit.astype(np.float16 if self._half else np.float32).ravel())
        columns["vector"] = arrow.FixedSizeListArray.from_arrays(flat, self.dim)
        try:
            rows = arrow.table(columns, schema=self._table.schema)
        except (ValueError, TypeError, OverflowError) as error:
            raise UsageError(f"these values cannot be stored: {error}") from error
        with _reading(self._path, "write"):
            for start in range(0, count, BLOCK):
                part, some = rows.slice(start, BLOCK), names[start : start + BLOCK]
                if fresh.keys() >= set(some):
                    self._table.add(part)
                else:
                    merge = self._table.merge_insert("name").when_matched_update_all().when_not_matched_insert_all()
                    merge.execute(part)
                self._numbers |= {name: fresh[name] for name in some if name in fresh}
                self._last = max(self._last, *map(self._numbers.__getitem__, some))
        self._compact(most=2048)

    def remove(self, names: Iterable[str] | None = None, *, ids: Iterable[int] | None = None) -> int:
        """Removes by name or by person; returns how many vectors are gone. Unknown names and persons are no error."""
        if (names is None) == (ids is None):
            raise UsageError("give either names or ids of what to remove")
        self._write()
        column, before = "id" if names is None else "name", len(self)
        chosen: list[Any] = [*(names if names is not None else ids or ())]
        with _reading(self._path, "write"):
            for start in range(0, len(chosen), BLOCK):
                self._table.delete(_in(column, chosen[start : start + BLOCK]))
        self._numbers = {row["name"]: row["number"] for row in self._rows()}
        return before - len(self)

    def stamps(self) -> dict[str, str]:
        """Returns the stamps of all names, in the order in which they were first added."""
        return {row["name"]: row["stamp"] for row in sorted(self._rows("stamp"), key=lambda row: row["number"])}

    def search(
        self, vectors: ArrayLike, k: int = 10, *, cameras: Iterable[int] | None = None,
        exclude_cameras: Iterable[int] | None = None, times: tuple[float | None, float | None] | None = None,
        tags: Iterable[str] | None = None, exclude_names: Iterable[str] | None = None,
    ) -> list[list[Hit]]:  # fmt: skip
        """Returns the ``k`` nearest of each query: all rows compared, equal distances in the order of insertion.

        Args:
            vectors: (Q, dim), or (dim,) for one query; made unit vectors as in :meth:`add`.
            k: How many; fewer where the filters leave fewer.
            cameras: Only these.
            exclude_cameras: None of these. Unknown cameras stay.
            times: From and to, both included, in seconds; None leaves a side open. Unknown times are left out.
            tags: Only what has all of these.
            exclude_names: None of these.

        Raises:
            UsageError: ``k`` is not positive, or a vector is not usable. DataError: Damaged files.
        """
        if k < 1:
            raise UsageError(f"k is {k}; it must be 1 or more")
        conditions = [] if cameras is None else [_in("camera", cameras)]
        conditions += [f"NOT {_in('camera', exclude_cameras)}"] if exclude_cameras is not None else []
        conditions += [f"NOT {_in('name', exclude_names)}"] if exclude_names is not None else []
        conditions += [f"array_has(tags, {_literal(tag)})" for tag in tags or ()]
        limits = zip((">=", "<="), times or (None, None), strict=True)
        conditions += [
            f"time {sign} {float(limit)!r}" for sign, limit in limits if limit is not None and abs(limit) < np.inf
        ]
        where = " AND ".join(conditions)
        with _reading(self._path):
            return [self._nearest(query, k, where) for query in _unit(np.atleast_2d(vectors), self.dim)]

    def _nearest(self, query: NDArray[np.float32], k: int, where: str) -> list[Hit]:
        """The store's own distances are single precision: it proposes, double precision decides."""
        wanted, slack = k + 16, 2e-3 if self._half else 1e-5  # how far the store's distances may be off
        search = self._table.search(query, vector_column_name="vector").distance_type("dot").bypass_vector_index()
        search = (search.where(where) if where else search).select([*FIELDS, "number", "vector", "_distance"])
        while True:
            rows = search.limit(wanted).to_arrow()
            near = np.asarray(rows["_distance"])
            if len(near) < wanted or near[-1] > near[k - 1] + 2 * slack:
                break
            wanted *= 4  # so many nearly equal that one left out could belong to the first k
        found = np.asarray(rows["vector"].combine_chunks().flatten()).reshape(-1, self.dim).astype(np.float64)
        if np.abs(np.linalg.norm(found, axis=1) - 1).max(initial=0) > 1e-2:
            raise DataError(f"{self._path}: damaged, a vector is not of unit length; index again into a new gallery")
        # Rounded, so that equal vectors have equal distances whatever the order of the sum.
        distances = (1 - np.einsum("nd,d->n", found, query.astype(np.float64))).round(12)
        order = np.lexsort((np.asarray(rows["number"]), distances))[:k]
        items = zip(rows.select(FIELDS).take(order).to_pylist(), distances[order].tolist(), strict=True)
        return [Hit(**item | {"tags": tuple(item["tags"])}, distance=far) for item, far in items]

    def _rows(self, *columns: str) -> list[dict[str, Any]]:
        with _reading(self._path):
            query = self._table.search().select(["name", "number", *columns])
            return list(query.limit(None).to_list())

    def _write(self) -> None:
        """Becomes the writer of the folder, until closed. Object stores and servers order commits themselves."""
        if self._writer is None:
            with contextlib.ExitStack() as stack:
                if self._folder:
                    stack.callback(lock_directory(self._folder).release)
                self._numbers = {row["name"]: row["number"] for row in self._rows()}
                self._last = max(self._numbers.values(), default=-1)
                self._writer = stack.pop_all()

    def _compact(self, most: int) -> None:
        """Joins small files once they hold a third of the rows or are too many, so that no row is copied often."""
        if self._folder:
            with _reading(self._path, "write"):
                rows, files = (self._table.stats()[key] for key in ("num_rows", "fragment_stats"))
                small = 3 * files["lengths"]["max"] <= 2 * rows or files["num_fragments"] > most
                if small and files["num_fragments"] > 1:
                    self._table.optimize(cleanup_older_than=timedelta(minutes=10))  # some reader may be in a search


def _schema(dim: int, model: str, half: bool) -> Any:
    arrow = importlib.import_module("pyarrow")
    if dim < 1:
        raise UsageError(f"dim is {dim}; it must be 1 or more")
    fields = {"name": arrow.string(), "number": arrow.int64(), "id": arrow.int64(), "camera": arrow.int32()}
    fields |= {"time": arrow.float64(), "tags": arrow.list_(arrow.string()), "stamp": arrow.string()}
    fields["vector"] = arrow.list_(arrow.float16() if half else arrow.float32(), dim)
    return arrow.schema(fields, metadata={"format": FORMAT, "model": model})


def _unit(vectors: ArrayLike, dim: int) -> NDArray[np.float32]:
    """Unit vectors (N, dim). Those of unit length already keep their bits, and so the order of their distances."""
    array = np.asarray(vectors, dtype=np.float32)
    if array.ndim != 2 or array.shape[1] != dim:
        raise UsageError(f"vectors have shape {array.shape}; this gallery holds rows of {dim} numbers")
    lengths = np.linalg.norm(array.astype(np.float64), axis=1)
    for bad, text in ((~np.isfinite(lengths), "has a number that is not finite"), (lengths == 0, "is zero")):
        if bad.any():
            raise UsageError(f"vector {int(np.argmax(bad))} {text}; it has no direction to compare")
    scale = np.where(np.abs(lengths - 1) > 1e-5, lengths, 1.0)
    return (array / scale[:, None]).astype(np.float32)


def _literal(value: Any) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(int(value))


def _in(column: str, values: Iterable[Any]) -> str:
    listed = ", ".join(map(_literal, values))
    return f"({column} IN ({listed}))" if listed else "(1 = 0)"


@contextlib.contextmanager
def _reading(path: str, verb: str = "read") -> Iterator[None]:
    """Errors of the store, which are of many kinds, as one of ours that names the gallery."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, KeyError, importlib.import_module("pyarrow").ArrowException) as error:
        text = str(error).split(", /", 1)[0].splitlines()[0][:300] if str(error) else type(error).__name__
        raise DataError(f"{path}: cannot {verb} the gallery ({text}); if it is damaged, index again") from error
