"""Several ranks on CPUs, with copies of the weights or shards of them: one gradient, one training, one checkpoint."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dapo import dapo_ranks
from faults.harness import result

pytestmark = pytest.mark.timeout(1800)
KINDS = ("copies", "shards")
FEW = ("dapo", "all", "one", "minibatches")


def start_ranks(size, task, folder, *more):
    """Runs a task of `dapo_ranks.py` in as many processes; returns their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(dapo_ranks.__file__)
    command = [sys.executable, "-W", "ignore", str(script), task, str(folder), *map(str, more)]
    path = os.pathsep.join([str(script.parents[1]), *filter(None, sys.path)])
    processes = []
    for rank in range(size):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), PYTHONPATH=path)
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
        processes.append(subprocess.Popen(command, env=env))
    try:
        return [process.wait(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()


def of_rank(folder, rank):
    return load_file(folder / f"rank-{rank}.safetensors"), json.loads((folder / f"rank-{rank}.json").read_text())


def check_ranks(size, folder, names):
    """Compares ranks to one with the whole batch: gradients, logs, weights after two updates and after a restart."""
    dapo_ranks.compute(folder, names, shard=False)
    expected, records = of_rank(folder, 0)
    assert all(record["same"] for record in records.values())
    assert all(expected[f"{name}.gradient"].norm() > 1e-3 for name in names)
    assert start_ranks(size, "compute", folder, *names) == [0] * size
    for kind in KINDS:
        for rank in range(size):
            found, others = of_rank(folder / kind, rank)
            assert found.keys() == expected.keys()
            for name in names:
                gradient, right = found[f"{name}.gradient"], expected[f"{name}.gradient"]
                assert (gradient - right).norm() < 1e-5 * right.norm(), (kind, name)
                assert others[name]["logs"] == pytest.approx(records[name]["logs"], rel=1e-4, abs=1e-6), (kind, name)
                assert others[name]["same"], f"{kind}, {name}: another weight after a restart"
            for name, right in expected.items():
                if ".weights." in name:
                    error = (found[name] - right).norm() / right.norm()
                    assert error < 1e-5, (kind, name, error)


def test_two_ranks_learn_what_one_does(tmp_path):
    check_ranks(2, tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_three_ranks_and_other_losses(size, tmp_path):
    pytest.importorskip("peft")
    check_ranks(size, tmp_path, tuple(dapo_ranks.CASES))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_dies_ends_the_others_and_the_resumed_run_is_the_same(kind, tmp_path):
    assert start_ranks(2, "train", tmp_path / "straight", kind, 0) == [0, 0]
    assert any(row["groups/trained"] for row in metrics_without_times(tmp_path / "straight")["metrics.jsonl"])
    codes = start_ranks(2, "train", tmp_path / "cut", kind, 1)
    assert codes[1] == 9 and codes[0] != 0 and not (tmp_path / "cut" / "summary.json").exists()
    assert start_ranks(2, "train", tmp_path / "cut", kind, 0) == [0, 0]
    straight, cut = (metrics_without_times(tmp_path / name) for name in ("straight", "cut"))
    assert straight == cut


def metrics_without_times(folder):
    found = result(folder)
    for name, content in found.items():
        if name.endswith(".jsonl"):
            rows = [json.loads(line) for line in content.splitlines()]
            found[name] = [{key: value for key, value in row.items() if "time" not in key} for row in rows]
    return found
