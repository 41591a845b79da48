"""The page to search a run's gallery for a person, and its routes.

Pictures are named by split and index, never by path; an error is ``{"error": a sentence}``.

- ``GET /api/about``: what is served: models with their branches, cameras and numbers of pictures.
- ``GET /api/people?page=``: query pictures by person and camera, ``PAGE`` at a time: ``{page, pages, pictures}``.
  This route and all below take the parameter ``model``, a name; by default the first.
- ``GET /api/search?query=INDEX``: the gallery by distance from a query picture: ``{query, scores, hits, searched}``.
  Further parameters: ``cameras`` (repeated; by default all), ``rerank``, ``count``. A hit is
  ``{index, id, camera, distance, rank, mark}``; its mark is ``right``, ``wrong`` or, for the same person in the same
  camera, ``left_out``: it has no rank, as in the evaluation. ``scores`` are ``{ap, first, right}``, the average
  precision, the rank of the first right one and how many there are; null where the cameras show none.
- ``POST /api/search``: the same for the image in the body, of which nothing is known: no marks and no scores.
- ``GET /api/cuts?indices=``: the rows, in 0..1 of the height, at which each branch cuts these gallery pictures.
- ``GET /api/crop/SPLIT/INDEX.png``: a picture of the split ``query`` or ``gallery``, as the models see it.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from fastapi import APIRouter, HTTPException, Query, Request, Response
from numpy.typing import NDArray
from PIL import Image
from prometheus_client import Histogram
from pydantic import BaseModel, Field
from safetensors import SafetensorError
from safetensors.torch import load_file

from sextet import __version__
from sextet.core.checkpoint import pack_tensors
from sextet.core.console import Console
from sextet.core.errors import DataError, UsageError, unknown
from sextet.core.files import atomic_write_bytes, sha256_of
from sextet.reid.data import ReIDData, Split, load_data
from sextet.reid.evaluate import Embedder, load
from sextet.reid.images import decode
from sextet.reid.metrics import Labels, Protocol, evaluate_distances
from sextet.reid.rerank import rerank
from sextet.reid.settings import METHODS
from sextet.serve import Demo, Options
from sextet.serve.turns import Turns

MAX_UPLOAD = 10 * 2**20
PAGE = 24
BATCH = 64
RERANKED = 2**26  # distances of all queries that are re-ranked at the start and kept: 256 MB
NEAREST = 2000  # gallery pictures among which any other query is re-ranked
BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30)


class Asked(BaseModel):
    """Parameters of a search."""

    model: str | None = None
    cameras: list[int] | None = None
    rerank: bool = False
    count: Annotated[int, Field(ge=1, le=200)] = 30


class AskedOne(Asked):
    """Parameters of a search for a query picture."""

    query: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Finder:
    """A model with its features of all query and gallery pictures, float32 of unit length."""

    name: str
    embedder: Embedder
    data: ReIDData
    version: str
    """Of the data; pictures that are seen twice may be kept while it stays the same."""
    query: NDArray[np.float32]
    gallery: NDArray[np.float32]
    reranked: NDArray[np.float32] | None = None

    def about(self) -> dict[str, Any]:
        """Returns what /api/about says of the model: the branches are those that cut a picture."""
        cuts, cameras = self.embedder.cuts(picture(self.data.query, 0)), np.unique(self.data.gallery.cameras)
        return {
            "name": self.name, "branches": [name for name, rows in cuts.items() if len(rows) > 2],
            "data": self.data.name, "version": self.version, "size": list(self.embedder.size),
            "query": len(self.query), "gallery": len(self.gallery), "cameras": cameras.tolist(),
        }  # fmt: skip

    def people(self, page: int) -> dict[str, Any]:
        """Returns a page of the query pictures."""
        ids, cameras = self.data.query.ids, self.data.query.cameras
        order = np.lexsort((cameras, ids))
        shown = [{"index": int(at), "id": int(ids[at]), "camera": int(cameras[at])} for at in order[PAGE * page :]]
        return {"page": page, "pages": -(-len(order) // PAGE), "pictures": shown[:PAGE]}

    def cuts(self, indices: Sequence[int]) -> list[dict[str, list[float]]]:
        """Returns the cut rows of gallery pictures by branch."""
        return [self.embedder.cuts(picture(self.data.gallery, index)) for index in indices]

    def distances(self, feature: NDArray[np.float32], row: int | None, reranking: bool) -> NDArray[np.float32]:
        """Returns the distances (G,) of the gallery from a feature, which is that of query picture `row` if given."""
        ready = reranking and row is not None and self.reranked is not None
        distances: NDArray[np.float32] = self.reranked[row] if ready else 1 - self.gallery @ feature  # type: ignore
        if reranking and not ready:
            near = np.argsort(distances, kind="stable")[:NEAREST]
            distances += 1  # all others come after these, whose distances are in 0..1
            distances[near] = rerank(feature[None], self.gallery[near], **_reranking(self.embedder))[0]
        return distances

    def search(self, row: int | None, content: bytes, asked: Asked) -> dict[str, Any]:
        """Returns the answer for a query picture, or where it is None for the content of an image's file.

        Raises:
            DataError: The content is no image that can be read.
        """
        image = decode(content)[0] if row is None else picture(self.data.query, row)
        feature = self.embedder.embed([image])[0] if row is None else self.query[row]
        ids, cameras = self.data.gallery.ids, self.data.gallery.cameras
        kept = np.flatnonzero(np.isin(cameras, cameras if asked.cameras is None else asked.cameras))
        distances, ids, cameras = self.distances(feature, row, asked.rerank)[kept], ids[kept], cameras[kept]
        order, settings, scores = np.argsort(distances, kind="stable"), self.embedder.config.evaluation, None
        query: dict[str, Any] = {"index": row, "id": None, "camera": None, "cuts": self.embedder.cuts(image)}
        if row is not None:
            query |= {"id": int(self.data.query.ids[row]), "camera": int(self.data.query.cameras[row])}
        same = ids == query["id"]
        left_out = same & (cameras == query["camera"]) & (settings.same_camera == "exclude")
        if (right := same & ~left_out).any():
            known = Labels(ids=np.array([query["id"]]), cameras=np.array([query["camera"]]))
            protocol = Protocol(same_camera=settings.same_camera, ap=settings.ap)
            found = evaluate_distances(distances[None], known, Labels(ids=ids, cameras=cameras), protocol)
            scores = {"ap": float(found.ap[0]), "first": int(found.first_match[0]), "right": int(right.sum())}
        marks, ranks = np.select([left_out, right], ["left_out", "right"], "wrong"), np.cumsum(~left_out[order])
        hits = [
            {
                "index": int(kept[at]), "id": int(ids[at]), "camera": int(cameras[at]),
                "distance": round(float(distances[at]), 4), "rank": None if left_out[at] else rank,
                "mark": None if row is None else str(marks[at]),
            }
            for at, rank in zip(order, ranks[ranks <= asked.count].tolist(), strict=False)
        ]  # fmt: skip
        return {"query": query, "scores": scores, "hits": hits, "searched": int((~left_out).sum())}


def _reranking(embedder: Embedder) -> dict[str, Any]:
    return {name: getattr(embedder.config.evaluation, name) for name in ("k1", "k2", "weight")}


def picture(split: Split, index: int) -> Image.Image:
    """Returns a picture of a split, as the model sees it."""
    return Image.fromarray(split.images.read([index])[0].permute(1, 2, 0).numpy())


def find_models(run: Path) -> list[Finder]:
    """Returns the models of a run with their features, which are made once and kept in the run.

    Raises:
        SextetError: No model, or data that cannot be read.
    """
    folders = sorted((run / "models").glob("*/"), key=lambda folder: (folder.name != "mgn", folder.name))
    folders = folders or [run / "final"]
    if not all((folder / "model.safetensors").is_file() for folder in folders):
        raise UsageError(f"{run} holds no finished model; finish it with: sextet resume {run}")
    console, finders = Console(len(folders)), []
    for folder in folders:
        embedder = load(folder)
        data = load_data((config := embedder.config).data, embedder.size, seed=config.seed)
        about = [(split.ids.tolist(), split.cameras.tolist(), split.names) for split in (data.query, data.gallery)]
        version = hashlib.sha256(json.dumps([__version__, repr(config.data), config.seed, about]).encode()).hexdigest()[
            :16
        ]
        name = METHODS[config.shown]
        key = "-".join([version, *(sha256_of(folder / part)[:16] for part in ("config.json", "model.safetensors"))])
        arrays = features(embedder, data, run / "artifacts" / "features" / name / f"{key}.safetensors", console)
        finders.append(Finder(name=name, embedder=embedder, data=data, version=version, **arrays))
    console.close()
    return finders


def features(embedder: Embedder, data: ReIDData, path: Path, console: Console) -> dict[str, Any]:
    """Returns arrays `query` (Q, D) and `gallery` (G, D), and unless it is too large `reranked` (Q, G).

    They are read from `path` if it exists; else they are made and kept there, and others beside it are deleted.
    """
    if path.exists():
        try:
            return {name: tensor.numpy() for name, tensor in load_file(path).items()}
        except (SafetensorError, OSError) as error:
            console.say(f"{path}: damaged, made again ({error})")
    tensors, done = {}, 0
    with console.task(f"features of {path.parent.name}", len(data.query.ids) + len(data.gallery.ids)):
        for name, split in (("query", data.query), ("gallery", data.gallery)):
            rows = []
            for start in range(0, len(split.ids), BATCH):
                rows.append(embedder.embed(split.images.read(range(len(split.ids))[start : start + BATCH])))
                console.update(done := done + len(rows[-1]))
            tensors[name] = np.concatenate(rows)
    if len(data.query.ids) * len(data.gallery.ids) <= RERANKED:
        tensors["reranked"] = rerank(tensors["query"], tensors["gallery"], **_reranking(embedder))
    try:
        atomic_write_bytes(path, pack_tensors({name: torch.from_numpy(array) for name, array in tensors.items()}))
        for other in path.parent.glob("*.safetensors"):
            other.unlink() if other != path else None
    except (DataError, OSError) as error:
        console.say(f"the features are made again at the next start: {error}")
    return tensors


def demo(runs: Sequence[Path], options: Options) -> Demo:
    """Returns the page of a finished run, see `sextet.serve`.

    Raises:
        SextetError: Several runs, no model, or data that cannot be read.
    """
    if options.study or options.games:
        raise UsageError("--study and --games are for the page of mep")
    if len(runs) > 1:
        raise UsageError(f"this page shows the gallery of one run; choose one of {', '.join(map(str, runs))}")
    torch.set_num_threads(1)
    finders, turns = find_models(runs[0]), Turns()
    seconds = Histogram("sextet_search_seconds", "From request to answer", buckets=BUCKETS, registry=None)

    return Demo(
        router=routes(runs[0].name, finders, turns, seconds), page=Path(__file__).with_name("page"), close=turns.close,
        gauges=turns.gauges, collectors=(seconds,), uploads={"/api/search": MAX_UPLOAD},
    )  # fmt: skip


def routes(run: str, finders: Sequence[Finder], turns: Turns, seconds: Histogram) -> APIRouter:
    """Returns the routes of the page."""
    router, models = APIRouter(prefix="/api"), {finder.name: finder for finder in finders}
    about = {"run": run, "max_upload": MAX_UPLOAD, "models": [finder.about() for finder in finders]}

    def finder(name: str | None) -> Finder:
        if name is not None and name not in models:
            raise HTTPException(404, unknown("model", name[:40], models))
        return finders[0] if name is None else models[name]

    def check(split: Split, indices: Sequence[int]) -> None:
        if not all(0 <= index < len(split.ids) for index in indices):
            raise HTTPException(404, f"no such picture; the last is number {len(split.ids) - 1}")

    async def search(row: int | None, content: bytes, asked: Asked) -> Any:
        with seconds.time():
            return await turns(finder(asked.model).search, row, content, asked)

    @router.get("/about")
    async def get_about() -> Any:
        return about

    @router.get("/people")
    async def get_people(page: Annotated[int, Query(ge=0)] = 0, model: str | None = None) -> Any:
        return finder(model).people(page)

    @router.get("/search")
    async def get_search(asked: Annotated[AskedOne, Query()]) -> Any:
        check(finder(asked.model).data.query, [asked.query])
        return await search(asked.query, b"", asked)

    @router.post("/search")
    async def post_search(asked: Annotated[Asked, Query()], request: Request) -> Any:
        try:
            return await search(None, await request.body(), asked)
        except DataError as error:
            raise HTTPException(400, str(error)) from error

    @router.get("/cuts")
    async def get_cuts(indices: Annotated[list[int], Query(max_length=400)], model: str | None = None) -> Any:
        check(finder(model).data.gallery, indices)
        return await turns(finder(model).cuts, indices)

    @router.get("/crop/{split}/{index}.png")
    async def get_crop(split: Literal["query", "gallery"], index: int, model: str | None = None) -> Response:
        pictures: Split = getattr(finder(model).data, split)
        check(pictures, [index])
        image, content = await asyncio.to_thread(picture, pictures, index), io.BytesIO()
        image.save(content, "PNG", compress_level=1)
        return Response(content.getvalue(), media_type="image/png", headers={"Cache-Control": "private, max-age=3600"})

    return router
