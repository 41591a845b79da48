"""A disk that fills up during a run: the checkpoint before stays whole and the exit code says what happened."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from faults.harness import call, start
from sextet.core import checkpoint

ARGUMENTS = (
    *("train", "mep", "--preset", "smoke", "--method", "sp", "--quiet", "--name", "run", "--save-every", "1"),
    *("--population.steps", "480000"),
)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_ends_the_run_with_code_3_and_keeps_the_checkpoint(small_disk):
    process = start(*ARGUMENTS, "--out", small_disk)
    root = small_disk / "mep" / "run" / "parts" / "population" / "checkpoints"
    while not (root.exists() and len(checkpoint.steps(root)) > 1):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    _fill(small_disk)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 3, err
    assert "cannot save" in err and "No space left" in err and "previous checkpoint is kept" in err
    assert "Traceback" not in err
    newest = checkpoint.steps(root)[-1]
    assert checkpoint.verify(root / str(newest))["step"] == newest
    assert not list(root.glob(".*.tmp"))

    (small_disk / "filler").unlink()
    session = start("resume", small_disk / "mep" / "run", "--quiet")
    while checkpoint.steps(root)[-1] <= newest:
        assert session.poll() is None, session.stderr.read()
        time.sleep(0.01)
    session.terminate()
    assert session.wait(timeout=60) == 4


def _fill(disk: Path):
    with (disk / "filler").open("wb", buffering=0) as handle:
        for size in (65536, 4096):
            try:
                while handle.write(os.urandom(size)) == size:
                    pass
            except OSError:
                continue


def test_a_disk_that_is_full_from_the_start_is_one_clear_line(small_disk):
    _fill(small_disk)
    code, _, err = call(*ARGUMENTS, "--out", small_disk)
    assert code == 3 and err.count("\n") == 1 and "cannot write" in err
