"""Several ranks on CPUs: one batch, one mapping of labels, one set of features, one loss; killed and resumed."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ranks

import sextet
from faults.harness import result
from sextet.core.metrics import read_metrics
from sextet.reid.data import load_data
from sextet.reid.evaluate import evaluate
from sextet.reid.sampler import PeopleSampler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def start_ranks(size, task, directory, *more):
    """Runs a task of `ranks.py` in as many processes; returns their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(ranks.__file__)), task, str(directory), *map(str, more)]
    processes = []
    for rank in range(size):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        processes.append(subprocess.Popen(command, env=env))
    try:
        return [process.wait(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    found = {}
    for size in (1, 2, 3):
        directory = tmp_path_factory.mktemp(f"size-{size}")
        assert start_ranks(size, "features", directory) == [0] * size
        arrays = [dict(np.load(directory / f"rank-{rank}.npz")) for rank in range(size)]
        found[size] = arrays, [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(size)]
    return found


def test_features_and_scores_do_not_depend_on_the_number_of_ranks(untrained):
    (alone,), (scores,) = untrained[1]
    for size in (2, 3):
        arrays, others = untrained[size]
        assert all(np.array_equal(one["features"], alone["features"]) for one in arrays)
        assert others[0] == scores
        assert all(one["mAP"]["mean"] == scores["mAP"]["mean"] for one in others)


@pytest.mark.parametrize("loss", ranks.LOSSES)
def test_gradients_are_those_of_one_rank_with_the_whole_batch(untrained, loss):
    (alone,), _ = untrained[1]
    assert np.abs(alone[loss]).max() > 0.01
    for size in (2, 3):
        for one in untrained[size][0]:
            np.testing.assert_allclose(one[loss], alone[loss], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    assert start_ranks(2, "train", directory) == [0, 0]
    return directory


def test_ranks_share_the_batches_of_one_and_the_mapping_of_labels(straight):
    seen = [json.loads((straight / f"rank-{rank}.json").read_text()) for rank in range(2)]
    model = sextet.load(str(straight))
    config = model.config
    data = load_data(config.data, config.size)
    labels = np.searchsorted(data.classes, data.train.ids)
    steps = len(read_metrics(straight / "metrics.jsonl"))
    assert steps == 11
    orders, targets = ([one[part][-steps:] for one in seen] for part in ("orders", "labels"))
    for first, second, of_first, of_second in zip(*orders, *targets, strict=True):
        batch = np.array(first + second)
        people = labels[batch].reshape(config.optim.people, config.optim.images)
        assert len(set(people[:, 0])) == config.optim.people and (people == people[:, :1]).all()
        assert of_first + of_second == labels[batch].tolist()
    from sextet.core.seeding import key

    sampler = PeopleSampler(labels, config.optim.people, config.optim.images, seed=key(config.seed, "data"))
    assert [first + second for first, second in zip(*orders, strict=True)] == [
        sampler[n].tolist() for n in range(steps)
    ]


def test_scores_are_those_of_the_network_that_is_saved(straight):
    summary = json.loads((straight / "summary.json").read_text())["summary"]
    again = evaluate(sextet.load(str(straight)).config, straight)
    assert again["mAP"] == summary["mAP"] and again["rank-1"] == summary["rank-1"]
    rows = read_metrics(straight / "metrics.jsonl")
    scored = [row["eval/mAP"] for row in rows if "eval/mAP" in row]
    assert len(scored) == 2 and all(0 < score < 100 for score in scored)


def test_a_rank_that_dies_ends_the_others_and_the_resumed_run_is_the_same(straight, tmp_path):
    codes = start_ranks(2, "train", tmp_path, 12)
    assert codes[1] == 9 and codes[0] != 0
    assert not (tmp_path / "summary.json").exists()
    assert start_ranks(2, "train", tmp_path) == [0, 0]
    assert result(tmp_path) == result(straight)
