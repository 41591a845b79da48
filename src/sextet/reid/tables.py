"""Scores of a test as a summary, and the tables and pictures of a run's report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sextet.core.run import Run
from sextet.core.stats import Interval
from sextet.reid.data import ReIDData, Split
from sextet.reid.distances import feature_blocks
from sextet.reid.metrics import (
    Protocol,
    Scores,
    camera_pairs,
    evaluate_distances,
    evaluate_features,
    true_positive_rates,
)
from sextet.reid.rerank import rerank_blocks
from sextet.reid.settings import Config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Features = NDArray[np.float32]
SHOWN, DEEP = 8, 10  # queries and gallery images in the picture of rankings
RIGHT, WRONG = "#2a7d3f", "#b3261e"


def percent(interval: Interval) -> dict[str, Any]:
    """An interval of shares as one of percents, for a summary."""
    bounds = [None if value is None else 100 * value for value in (interval.low, interval.high)]
    return Interval(mean=100 * interval.mean, low=bounds[0], high=bounds[1], n=interval.n).as_dict()


def protocol_of(config: Config) -> Protocol:
    """The protocol of the settings."""
    return Protocol(same_camera=config.evaluation.same_camera, ap=config.evaluation.ap)


def score(
    config: Config, run: Run | None, data: ReIDData, query: Features, gallery: Features, *, quick: bool = False
) -> dict[str, Any]:
    """Scores features of the query and gallery images.

    Args:
        config: Protocol and re-ranking.
        run: Whose report gets tables and a picture; None: no run's.
        data: The labels.
        query: (Q, D).
        gallery: (G, D).
        quick: Without re-ranking.

    Returns:
        Percents: mAP and rank-1 with a 95 % interval over queries, rank-5, rank-10, mINP, and the same of re-ranking.
    """
    protocol, settings = protocol_of(config), config.evaluation
    query_labels, gallery_labels = data.query.labels, data.gallery.labels
    plain = evaluate_features(query, gallery, query_labels, gallery_labels, protocol)
    summary = summary_of(plain)
    if settings.rerank and not quick:
        distances = rerank_blocks(query, gallery, k1=settings.k1, k2=settings.k2, weight=settings.weight)
        again = summary_of(evaluate_distances(distances, query_labels, gallery_labels, protocol))
        summary |= {f"{name}, re-ranked": value for name, value in again.items() if name != "queries"}
    for note in plain.notes:
        summary.setdefault("notes", []).append(note)
    if run is not None:
        for note in plain.notes:
            run.say(f"warning: {note}")
        write_scores(run, summary)
        write_cameras(run, data, query, gallery, protocol)
        write_roc(run, data, query, gallery, protocol)
        picture_rankings(run, data, query, gallery)
    return summary


def summary_of(scores: Scores) -> dict[str, Any]:
    """The numbers of a summary, in percent."""
    intervals = scores.intervals()
    return {
        "mAP": percent(intervals["mean_ap"]),
        "rank-1": percent(intervals["rank1"]),
        **{f"rank-{k}": round(100 * float(scores.cmc[min(k, len(scores.cmc)) - 1]), 2) for k in (5, 10)},
        "mINP": round(100 * scores.minp, 2),
        "queries": scores.num_valid,
    }


def write_scores(run: Run, summary: Mapping[str, Any]) -> None:
    """Writes the table of scores, without and with re-ranking."""
    from sextet.report.build import save_table

    names = [name for name in summary if ", re-ranked" not in name and name not in ("queries", "notes")]
    kinds = ["", ", re-ranked"] if f"{names[0]}, re-ranked" in summary else [""]
    save_table(
        run.artifact("10-scores"),
        title="Retrieval of people not seen in training (%)",
        columns=["ranking", *names],
        rows=[[kind.strip(", ") or "plain", *(_cell(summary[name + kind]) for name in names)] for kind in kinds],
        note=f"{summary['queries']} queries; 95 % intervals over queries, so not over trainings.",
    )


def _cell(value: Any) -> Any:
    return Interval(**value) if isinstance(value, Mapping) else value


def write_cameras(run: Run, data: ReIDData, query: Features, gallery: Features, protocol: Protocol) -> None:
    """Writes the table of scores by pairs of cameras."""
    from sextet.report.build import save_table

    pairs = camera_pairs(feature_blocks(query, gallery), data.query.labels, data.gallery.labels, protocol)
    save_table(
        run.artifact("30-cameras"),
        title="By query camera and gallery camera (%)",
        columns=["query camera", "gallery camera", "mAP", "rank-1", "queries"],
        rows=[
            [pair.query_camera + 1, pair.gallery_camera + 1, 100 * pair.mean_ap, 100 * pair.rank1, pair.queries]
            for pair in pairs
        ],
    )


def write_roc(run: Run, data: ReIDData, query: Features, gallery: Features, protocol: Protocol) -> None:
    """Writes points of the ROC curve, for those who accept or refuse pairs by a threshold."""
    from sextet.report.build import save_table

    points = true_positive_rates(feature_blocks(query, gallery), data.query.labels, data.gallery.labels, protocol)
    save_table(
        run.artifact("40-pairs"),
        title="Pairs of a query and a gallery image, accepted by a threshold (%)",
        columns=["pairs of different people accepted", "pairs of one person accepted"],
        rows=[[100 * false, 100 * true] for false, true in points.items()],
    )


def picture_rankings(run: Run, data: ReIDData, query: Features, gallery: Features) -> None:
    """Draws some queries with their nearest gallery images, right and wrong marked."""
    from sextet.report.build import save_figure

    figure = ranking_figure(data, query, gallery, run.rng("evaluate").numpy)
    save_figure(
        run.artifact("20-rankings"),
        figure,
        title="Queries and their nearest gallery images",
        note="Left: the query. Green and a tick: the same person from another camera; red and a cross: somebody else. "
        "Images of the query's person and camera are left out. The queries are drawn at random.",
    )


def ranking_figure(data: ReIDData, query: Features, gallery: Features, rng: np.random.Generator) -> Figure:
    """Returns the picture of :func:`picture_rankings`."""
    from matplotlib.figure import Figure

    rows = sorted(rng.choice(len(query), min(SHOWN, len(query)), replace=False).tolist())
    height, width = data.query.images.size
    tall, wide = height + 14, width + 8  # of a cell: the image, its frame and the mark above it
    canvas = np.full((tall * len(rows), wide * (DEEP + 1), 3), 255, np.uint8)
    figure = Figure(figsize=(9, 9 * canvas.shape[0] / canvas.shape[1]))
    axes = figure.add_axes((0, 0, 1, 1))

    def show(row: int, column: int, split: Split, index: int, text: str, color: str) -> None:
        top, left = row * tall + 10, column * wide + 2
        frame = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
        canvas[top : top + height + 4, left : left + width + 4] = frame
        pixels = split.images.read([index])[0].permute(1, 2, 0).numpy()
        canvas[top + 2 : top + 2 + height, left + 2 : left + 2 + width] = pixels
        axes.text(left + width / 2 + 2, top - 1, text, color=color, fontsize=8, ha="center", va="bottom")

    for place, number in enumerate(rows):
        same = data.gallery.ids == data.query.ids[number]
        kept = np.flatnonzero(~(same & (data.gallery.cameras == data.query.cameras[number])))
        order = kept[np.argsort(-(gallery[kept] @ query[number]), kind="stable")[:DEEP]].tolist()
        show(place, 0, data.query, number, "query", "#000000")
        for column, index in enumerate(order, 1):
            show(place, column, data.gallery, index, "✓" if same[index] else "✗", RIGHT if same[index] else WRONG)
    axes.imshow(canvas, interpolation="nearest")
    axes.axis("off")
    return figure
