"""A run killed at random moments and resumed equals one that was left alone."""

import time

import pytest

from faults.harness import call, kill_until_done, result, start

ARGUMENTS = (
    *("train", "mep", "--preset", "smoke", "--quiet", "--name", "run", "--save-every", "1"),
    *("--population.steps", "9600", "--response.steps", "9600"),
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    out = tmp_path_factory.mktemp("straight")
    code, _, err = call(*ARGUMENTS, "--out", out)
    assert code == 0, err
    return result(out / "mep" / "run")


SLOW = pytest.param(60, 1, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])


@pytest.mark.parametrize("kills, seed", [(4, 0), SLOW])
def test_kills_change_nothing(tmp_path, straight, kills, seed, record_property):
    directory = tmp_path / "mep" / "run"
    process = start(*ARGUMENTS, "--out", tmp_path)
    while not (directory / "config.json").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    process.kill()  # before anything was saved: the run must still be resumable
    process.communicate()
    tally = kill_until_done(directory, kills=kills - 1, seed=seed)
    record_property("signals", tally)
    print(tally)
    assert tally["SIGKILL"] + tally["SIGTERM"] == kills - 1
    assert kills < 60 or tally["during a save"] >= 3
    assert result(directory) == straight


@pytest.mark.parametrize("workers", ["process:1", "process:2", pytest.param("ray:2", marks=pytest.mark.ray)])
def test_another_backend_leaves_the_same_result(tmp_path, straight, workers):
    if workers.startswith("ray"):
        pytest.importorskip("ray", reason="the extra ray is not installed")
    code, _, err = call(*ARGUMENTS, "--out", tmp_path, "--workers", workers)
    assert code == 0, err
    assert result(tmp_path / "mep" / "run") == straight
