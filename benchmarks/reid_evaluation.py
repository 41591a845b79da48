"""How fast and how lean rankings are scored and re-ranked, beside public implementations, and whether all agree.

    python benchmarks/reid_evaluation.py --torchreid CHECKOUT --fastreid CHECKOUT --reid FOLDER [--parts PART ...]

The checkouts are KaiyangZhou/deep-person-reid and JDAI-CV/fast-reid with their Cython extensions built in place; the
folder holds the package of `pip download reid==0.1.0rc1 --no-deps`, unpacked. Only the modules that score are loaded,
for which their packages need not be installed. All contestants run in turns in one process on one thread; medians of
CPU seconds count. What reaches the size of MSMT17 runs in a process of its own, whose peak memory is reported.
Results of the given parts (default: all) go into results/reid_evaluation.json; other parts stay as they are there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np  # noqa: E402

from sextet.core.files import read_json, write_json  # noqa: E402
from sextet.core.records import environment  # noqa: E402
from sextet.reid.metrics import Labels, Protocol, evaluate_distances, evaluate_features  # noqa: E402
from sextet.reid.rerank import rerank, rerank_blocks, rerank_distances  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "reid_evaluation.json"
ROUNDS = 5
MARKET, MSMT = (3368, 15913, 751, 6), (11659, 82161, 3060, 15)  # queries, gallery images, people, cameras
Features = np.ndarray


def load(root: Path, module: str) -> Any:
    """Imports a module of a package by its folder, without what its parents import."""
    parents = module.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        stub = types.ModuleType(".".join(parents[:depth]))
        stub.__path__ = [str(root.joinpath(*parents[:depth]))]
        sys.modules[stub.__name__] = stub
    return importlib.import_module(module)


def draw_labels(shape: tuple[int, int, int, int], seed: int = 0) -> tuple[Labels, Labels]:
    rng = np.random.default_rng(seed)
    sides = [(rng.integers(0, shape[2], count), rng.integers(0, shape[3], count)) for count in shape[:2]]
    return Labels(ids=sides[0][0], cameras=sides[0][1]), Labels(ids=sides[1][0], cameras=sides[1][1])


def draw_features(
    labels: Labels, people: int, size: int, noise: float, seed: int, out: Features | None = None
) -> Features:
    """L2-normalised float32 features: a centre for each person and as much noise for each number."""
    centres = np.random.default_rng(0).standard_normal((people, size), dtype=np.float32)
    rng = np.random.default_rng(seed)
    out = np.empty((len(labels), size), np.float32) if out is None else out
    for start in range(0, len(labels), 4096):
        part = centres[labels.ids[start : start + 4096]]
        part += np.float32(noise) * rng.standard_normal(part.shape, dtype=np.float32)
        out[start : start + 4096] = part / np.linalg.norm(part, axis=1, keepdims=True)
    return out


def race(contestants: dict[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns the median of CPU seconds and the last result of each, all having run in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    results = {}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            start = time.process_time()
            results[name] = contestant()
            seconds[name].append(time.process_time() - start)
    return {name: round(statistics.median(values), 4) for name, values in seconds.items()}, results


class Peers:
    """The peers as functions of a ranking, each returning (mAP, mINP or None, CMC at ranks 1, 5 and 10)."""

    def __init__(self, torchreid: Path, fastreid: Path, reid: Path) -> None:
        self.torchreid = load(torchreid, "torchreid.metrics.rank")
        self.fastreid = load(fastreid, "fastreid.evaluation.rank")
        self.reid = load(reid, "reid.eval.metrics")
        self.rerank = {
            "torchreid": load(torchreid, "torchreid.utils.rerank").re_ranking,
            "fast-reid": load(fastreid, "fastreid.evaluation.rerank").re_ranking,
        }
        if not (self.torchreid.IS_CYTHON_AVAI and self.fastreid.IS_CYTHON_AVAI):
            sys.exit("build the peers' extensions first: python setup.py build_ext --inplace in each rank_cylib")

    def rankers(self, distances: Features, query: Labels, gallery: Labels) -> dict[str, Callable[[], Any]]:
        """Each peer as a function of nothing that scores the ranking."""
        given = distances, query.ids, gallery.ids, query.cameras, gallery.cameras
        at = [0, 4, 9]

        def torchreid(cython: bool) -> Any:
            cmc, mean_ap = self.torchreid.evaluate_rank(*given, max_rank=50, use_cython=cython)
            return float(mean_ap), None, cmc[at]

        def fastreid(cython: bool) -> Any:
            cmc, ap, inp = self.fastreid.evaluate_rank(*given, max_rank=50, use_cython=cython)
            return float(np.mean(ap)), float(np.mean(inp)), cmc[at]

        def reid() -> Any:
            found = self.reid._compute_reid_metrics(*given)
            cmc = np.array([found.rank1, found.rank5, found.rank10]) / 100
            return found.mean_average_precision / 100, found.minp / 100, cmc

        return {
            "fast-reid Cython": lambda: fastreid(True),
            "torchreid Cython": lambda: torchreid(True),
            "reid 0.1.0rc1": reid,
            "fast-reid Python": lambda: fastreid(False),
            "torchreid Python": lambda: torchreid(False),
        }


def ours(distances: Features, query: Labels, gallery: Labels) -> Any:
    found = evaluate_distances(distances, query, gallery)
    return found.mean_ap, found.minp, found.cmc[[0, 4, 9]]


def gap(found: Any, expected: Any) -> float:
    """Largest absolute difference of two results of rankers."""
    gaps = [abs(found[0] - expected[0]), *np.abs(found[2] - expected[2])]
    return float(max(gaps if expected[1] is None else [*gaps, abs(found[1] - expected[1])]))


def agreement(peers: Peers) -> dict[str, Any]:
    """Scores of 500 x 3000 random rankings by all."""
    query, gallery = draw_labels((500, 3000, 100, 6))
    distances = np.random.default_rng(1).random((500, 3000), dtype=np.float32)
    mine = ours(distances, query, gallery)
    gaps = {name: gap(mine, ranker()) for name, ranker in peers.rankers(distances, query, gallery).items()}
    result = {"mean_ap": mine[0], "largest_difference": gaps}
    try:
        from sklearn.metrics import average_precision_score
    except ImportError:
        return result | {"sklearn": "not installed"}
    rounded = np.round(distances, 2)
    found = evaluate_distances(rounded, query, gallery, Protocol(ap="sklearn")).ap
    stays = (query.ids[:, None] != gallery.ids) | (query.cameras[:, None] != gallery.cameras)
    right = query.ids[:, None] == gallery.ids
    theirs = [average_precision_score(right[q][stays[q]], -rounded[q][stays[q]]) for q in range(500)]
    gaps["scikit-learn, AP with ties"] = float(np.abs(found - theirs).max())
    return result


def distances_of_market_size(peers: Peers, noise: float | None, python: bool = False) -> dict[str, Any]:
    """Scores of 3368 x 15913 distances by all contestants without loops in Python, or by ours and those, once."""
    query, gallery = draw_labels(MARKET)
    if noise is None:
        distances = np.random.default_rng(3).random((len(query), len(gallery)), dtype=np.float32)
    else:
        left, right = (draw_features(side, MARKET[2], 64, noise, seed) for seed, side in ((1, query), (2, gallery)))
        distances = 1 - left @ right.T
    rankers = {
        name: run for name, run in peers.rankers(distances, query, gallery).items() if python == ("Python" in name)
    }
    seconds, found = race({"sextet": lambda: ours(distances, query, gallery)} | rankers, 1 if python else ROUNDS)
    mine = found["sextet"]
    return {
        "mean_ap": mine[0],
        "minp": mine[1],
        "rank1": float(mine[2][0]),
        "cpu_seconds": seconds,
        "times_ours": {name: round(seconds[name] / seconds["sextet"], 1) for name in rankers},
        "largest_difference": {name: gap(mine, found[name]) for name in rankers},
    }


def rerank_beside_dense(peers: Peers) -> dict[str, Any]:
    """Re-ranking of 1400 x 6600 images with 256 numbers; the peers are one algorithm, so torchreid's runs once."""
    query, gallery = draw_labels((1400, 6600, 700, 6))
    left, right = (draw_features(side, 700, 256, 1.6, seed) for seed, side in enumerate((query, gallery), 1))
    both = np.concatenate((left, right)).astype(np.float64)
    whole = np.sqrt(np.maximum(2 - 2 * both @ both.T, 0)).astype(np.float32)
    given = whole[:1400, 1400:], whole[:1400, :1400], whole[1400:, 1400:]
    contestants = {
        "sextet, distances": lambda: rerank_distances(*given),
        "sextet, features": lambda: rerank(left, right),
        "fast-reid": lambda: peers.rerank["fast-reid"](*given),
    }
    seconds, found = race(contestants, ROUNDS)
    once, more = race({"torchreid": lambda: peers.rerank["torchreid"](*given)}, 1)
    seconds, found = seconds | once, found | more
    mine, theirs = [key for key in found if "sextet" in key], [key for key in found if "sextet" not in key]
    return {
        "cpu_seconds": seconds,
        "times_ours": {f"{b} / {a}": round(seconds[b] / seconds[a], 1) for a in mine for b in theirs},
        "largest_difference": {f"{b}, {a}": float(np.abs(found[a] - found[b]).max()) for a in mine for b in theirs},
        "mean_ap": {
            "before": evaluate_distances(given[0], query, gallery).mean_ap,
            "after": evaluate_distances(found["sextet, features"], query, gallery).mean_ap,
        },
    }


def child(task: str, shape: tuple[int, int, int, int], size: int, noise: float) -> dict[str, Any]:
    """Runs a task on features on disk in a process of its own."""
    query, gallery = draw_labels(shape)
    with tempfile.TemporaryDirectory() as folder:
        for seed, (name, labels) in enumerate({"query": query, "gallery": gallery}.items(), 1):
            out = np.lib.format.open_memmap(f"{folder}/{name}.npy", "w+", np.float32, (len(labels), size))
            draw_features(labels, shape[2], size, noise, seed, out)
            del out
        command = [sys.executable, __file__, "--child", task, "--folder", folder, "--shape", json.dumps(shape)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def run_child(task: str, folder: str, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    labels = draw_labels(shape)
    query, gallery = (np.load(f"{folder}/{name}.npy", mmap_mode="r") for name in ("query", "gallery"))
    start = time.process_time()
    if task == "features":
        found = evaluate_features(query, gallery, *labels)
    elif task == "rerank":
        found = evaluate_distances(rerank(query, gallery), *labels)
    else:
        found = evaluate_distances(rerank_blocks(query, gallery), *labels)
    return {
        "queries": len(query),
        "gallery": len(gallery),
        "numbers": query.shape[1],
        "cpu_seconds": round(time.process_time() - start, 1),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "mean_ap": found.mean_ap,
        "rank1": found.rank1,
    }


PARTS: dict[str, Callable[[Peers], dict[str, Any]]] = {
    "agreement_500x3000": agreement,
    "distances_3368x15913_usual": lambda peers: distances_of_market_size(peers, 1.25),
    "distances_3368x15913_poor": lambda peers: distances_of_market_size(peers, 1.6),
    "distances_3368x15913_random": lambda peers: distances_of_market_size(peers, None),
    "distances_3368x15913_usual_python_loops": lambda peers: distances_of_market_size(peers, 1.25, python=True),
    "rerank_1400x6600": rerank_beside_dense,
    "rerank_market_size": lambda _: child("rerank", MARKET, 256, 2.5),
    "features_msmt_size_streamed": lambda _: child("features", MSMT, 2048, 5.0),
    "rerank_msmt_size_streamed": lambda _: child("blocks", MSMT, 256, 2.5),
    "rerank_msmt_size_matrix": lambda _: child("rerank", MSMT, 256, 2.5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchreid", type=Path)
    parser.add_argument("--fastreid", type=Path)
    parser.add_argument("--reid", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_child(options.child, options.folder, tuple(json.loads(options.shape)))))
        return
    if not (options.torchreid and options.fastreid and options.reid):
        parser.error("needs --torchreid, --fastreid and --reid")
    peers = Peers(options.torchreid, options.fastreid, options.reid)
    results = read_json(RESULTS) if RESULTS.exists() else {}
    results["what"] = (
        "CPU seconds on one thread, median of five in turns in one process (loops in pure Python and what has one "
        "number: once), as other programs ran on the machine; peak memory of a process of its own, features mapped "
        "from disk included"
    )
    results["machine"] = environment()
    for part in options.parts:
        results[part] = PARTS[part](peers)
        print(part, json.dumps(results[part], indent=1), flush=True)
        write_json(RESULTS, results)


if __name__ == "__main__":
    main()
