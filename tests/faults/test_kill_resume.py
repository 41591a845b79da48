"""A run killed at random moments and resumed equals one that was left alone."""

import os
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


@pytest.mark.timeout(900)  # Ray's workers run at low priority and may wait for others
@pytest.mark.parametrize("workers", ["process:1", "process:2", pytest.param("ray:2", marks=pytest.mark.ray)])
def test_another_backend_leaves_the_same_result(tmp_path, straight, workers):
    if workers.startswith("ray"):
        pytest.importorskip("ray", reason="the extra ray is not installed")
    code, _, err = call(*ARGUMENTS, "--out", tmp_path, "--workers", workers, timeout=900)
    assert code == 0, err
    assert result(tmp_path / "mep" / "run") == straight


COMPARISON = (
    *("train", "mep", "--preset", "smoke", "--method", "compare", "--quiet", "--name", "run", "--save-every", "1"),
    *("--num-seeds", "2", "--games", "2", "--matrix-seeds", "2", "--matrix-alphas", "0", "0.3"),
    *("--layouts", "cramped_room,coordination_ring", "--population.size", "2", "--population.steps", "960"),
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Environment without human games and published agents: the comparison trains and plays, and is short."""
    nowhere = str(tmp_path_factory.mktemp("nowhere") / "absent")
    return {**os.environ, "SEXTET_HUMAN_DATA": nowhere, "SEXTET_DATA": nowhere}


@pytest.fixture(scope="module")
def straight_comparison(tmp_path_factory, bare):
    out = tmp_path_factory.mktemp("comparison")
    code, _, err = call(*COMPARISON, "--out", out, env=bare)
    assert code == 0, err
    return whole(out / "mep" / "run")


def whole(directory):
    """Weights and metrics of all parts, and every table of the report."""
    tables = {path.name: path.read_bytes() for path in sorted((directory / "artifacts").glob("*.json"))}
    assert "10-cramped_room.json" in tables and "20-coordination_ring.json" in tables
    return result(directory) | tables


RAY = pytest.param("ray:2", marks=[pytest.mark.ray, pytest.mark.slow])


@pytest.mark.parametrize("workers", ["process:2", RAY])
def test_another_backend_leaves_the_same_comparison(tmp_path, straight_comparison, bare, workers):
    code, _, err = call(*COMPARISON, "--out", tmp_path, "--workers", workers, env=bare)
    assert code == 0, err
    assert whole(tmp_path / "mep" / "run") == straight_comparison


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_comparison_killed_anywhere_goes_on_and_repeats_no_finished_part(tmp_path, straight_comparison, bare):
    directory = tmp_path / "mep" / "run"
    process = start(*COMPARISON, "--out", tmp_path, env=bare)
    while not list(directory.glob("parts/*/summary.json")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    process.kill()
    process.communicate()
    tally = kill_until_done(directory, kills=20, seed=3, env=bare)
    print(tally)
    assert tally["SIGKILL"] + tally["SIGTERM"] == 20
    assert whole(directory) == straight_comparison
    for part in directory.glob("parts/*/summary.json"):
        events = (part.parent / "events.jsonl").read_text()
        assert events.count('"event": "finished"') == 1, f"{part.parent.name} was repeated"
