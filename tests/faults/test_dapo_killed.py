"""DAPO's trainer, generators and judges killed at random moments: nothing is lost, and the result is the same."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from faults.harness import call, kill_until_done, start
from sextet.core.metrics import read_metrics

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
ARGUMENTS = (
    *("train", "dapo", "--preset", "smoke", "--quiet", "--name", "run", "--save-every", "1", "--device", "cpu"),
    *("--task.size", "20", "--sampling.prompts", "8", "--sampling.surplus", "carry", "--model.warm-steps", "40"),
    *("--optim.steps", "12"),
)
INLINE = ()
PROCESS = ("--workers", "process:2", "--rollout.tasks", "2")


def outcome(directory):
    """Weights, summary and metrics, without what a clock measured."""
    rows = [
        {name: value for name, value in row.items() if not name.startswith("time/")}
        for row in read_metrics(directory / "metrics.jsonl")
    ]
    summary = json.loads((directory / "summary.json").read_text())["summary"]
    weights = [(directory / part / "model.safetensors").read_bytes() for part in ("final", "parts/start/final")]
    return weights, summary, rows


@pytest.fixture(scope="module", params=[INLINE, PROCESS], ids=["inline", "process"])
def straight(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight")
    code, _, err = call(*ARGUMENTS, *request.param, "--out", out)
    assert code == 0, err
    found = outcome(out / "dapo" / "run")
    assert [row["step"] for row in found[2]] == list(range(12))
    return request.param, found


def begun(out, *more):
    """Starts a training and waits until it takes steps; returns it with its folder."""
    directory = out / "dapo" / "run"
    process = start(*ARGUMENTS, *more, "--out", out)
    wait(process, lambda: steps(directory) > 1)
    return process, directory


def steps(directory):
    path = directory / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait(process, condition):
    while not condition():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)


def below(pid):
    """Descendants of a process with their command lines, the youngest last."""
    found = {}
    for child in _children(pid):
        with contextlib.suppress(OSError):
            found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        found |= below(child)
    return found


def _children(pid):
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (task / "children").read_text().split())


def judges(pid):
    return [child for child, command in below(pid).items() if "verifier_host" in command]


def generators(pid):
    return [child for child, command in below(pid).items() if "workers_process" in command]


def alive(pids):
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.append(pid)
    return found


SLOW = pytest.param(30, 1, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])


@pytest.mark.parametrize("kills, seed", [(3, 0), SLOW])
def test_a_trainer_killed_at_random_moments_leaves_the_same(tmp_path, straight, kills, seed):
    more, expected = straight
    process, directory = begun(tmp_path, *more)
    family = below(process.pid)
    assert judges(process.pid) and len(generators(process.pid)) == (2 if more else 0)
    process.kill()
    process.communicate()
    wait_gone(family)
    tally = kill_until_done(directory, kills=kills - 1, seed=seed)
    assert tally["SIGKILL"] + tally["SIGTERM"] == kills - 1 or kills > 3
    assert outcome(directory) == expected


def wait_gone(pids):
    end = time.monotonic() + 60
    while alive(pids):
        assert time.monotonic() < end, f"left behind: {alive(pids)}"
        time.sleep(0.02)


@pytest.mark.parametrize("victims", [judges, generators])
def test_a_training_goes_on_when_its_helpers_are_killed(tmp_path, straight, victims):
    more, expected = straight
    if victims is generators and not more:
        pytest.skip("inline there are none")
    process, directory = begun(tmp_path, *more)
    killed = 0
    while process.poll() is None and killed < 4:
        before = steps(directory)
        for pid in victims(process.pid)[-1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        while process.poll() is None and steps(directory) == before:
            time.sleep(0.005)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert killed >= 2
    assert outcome(directory) == expected
