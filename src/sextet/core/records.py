"""What a run directory says about itself: who holds it, what it was made with, and the card of its final weights."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sextet.core.config import RunConfig
from sextet.core.errors import UsageError
from sextet.core.files import read_json, write_json


def lock_directory(directory: Path) -> Any:
    """Takes the directory's lock; the system frees it when the process ends, however it ends."""
    from filelock import FileLock, Timeout

    directory.mkdir(parents=True, exist_ok=True)
    lock, owner = FileLock(directory / "run.lock"), directory / "run.owner.json"
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        who = read_json(owner) if owner.exists() else {}
        raise UsageError(
            f"{directory} is in use by process {who.get('pid', '?')} on {who.get('host', '?')}; "
            "wait for it, or stop it with SIGTERM"
        ) from error
    write_json(owner, {"pid": os.getpid(), "host": socket.gethostname()})
    return lock


def environment() -> dict[str, Any]:
    """Returns what a result may depend on: versions, platform, cores."""
    versions = {}
    for package in ("sextet", "torch", "numpy", "scipy", "safetensors", "numba", "ray"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "versions": versions,
    }


def model_card(recipe: str, config: RunConfig, summary: Mapping[str, Any]) -> str:
    """Returns the README of a folder of final weights."""
    results = "\n".join(f"- {name}: {value}" for name, value in sorted(summary.items()))
    return (
        f"# {recipe}\n\nTrained with sextet, recipe `{recipe}`, seed {config.seed}. "
        f'Load with `sextet.load("PATH")`.\n\n## Results\n\n{results or "none recorded"}\n\n'
        "## Settings\n\nSee `config.json`. Licence of the code: Apache-2.0; "
        "the weights follow the licence of the data they were trained on.\n"
    )
