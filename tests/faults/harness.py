"""Starts real command lines and kills them: the pieces shared by the fault tests."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "sextet"]


def start(*arguments, **options):
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def call(*arguments, timeout=300, **options):
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def result(directory: Path):
    """Everything that must not depend on interruptions: weights and metrics of the run and of its parts."""
    names = ("model.safetensors", "metrics.jsonl")
    files = sorted(path for path in directory.rglob("*") if path.name in names and "checkpoints" not in path.parts)
    assert files
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def leftovers(directory: Path):
    """Whether a save was cut: its temporary folder is still there."""
    return any(True for _ in directory.glob("parts/*/checkpoints/.*.tmp"))


def kill_until_done(directory: Path, *, kills: int, seed: int, env=None):
    """Resumes the run again and again, signalling it at random moments; returns how often each thing happened.

    A session is given a little time to advance, so that all kills fall into the run and not only into its start.
    After ``kills`` signals, SIGKILL and SIGTERM in turn, the run is left to finish.
    """
    chance = random.Random(seed)
    tally = {"SIGKILL": 0, "SIGTERM": 0, "during a save": 0, "sessions": 1}
    while not (directory / "summary.json").exists():
        process = start("resume", directory, "--quiet", env=env)
        tally["sessions"] += 1
        number = None
        if tally["SIGKILL"] + tally["SIGTERM"] < kills:
            before = _progress(directory)
            while process.poll() is None and _progress(directory) == before:
                time.sleep(0.005)  # until the checkpoint is loaded and steps begin
            time.sleep(chance.uniform(0, 0.4))
            number = (signal.SIGKILL, signal.SIGTERM)[tally["sessions"] % 2]
            if tally["sessions"] % 4 == 0:  # every other SIGKILL waits for a save to begin
                while process.poll() is None and not leftovers(directory):
                    pass
            if process.poll() is None:
                os.kill(process.pid, number)
                tally[number.name] += 1
            else:
                number = None
        _, err = process.communicate(timeout=300)
        if number is signal.SIGKILL:
            tally["during a save"] += leftovers(directory)
        else:
            assert process.returncode in (0, 4, -signal.SIGTERM), err
    return tally


def _progress(directory):
    """What changes as soon as a session has loaded its checkpoint or, having none, saved one."""
    folders = [directory, *directory.glob("parts/*/")]
    restores = [path.read_text().count('"restored"') for path in (f / "events.jsonl" for f in folders) if path.exists()]
    return restores, [sorted(entry.name for entry in folder.glob("checkpoints/[0-9]*")) for folder in folders]
