"""What a run directory says about itself: who holds it, what it was made with, and the card of its final weights."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sextet.core.checkpoint import pack_tensors
from sextet.core.config import RunConfig, to_dict
from sextet.core.errors import UsageError
from sextet.core.files import atomic_write_bytes, atomic_write_text, read_json, write_json

if TYPE_CHECKING:
    import torch


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


def parts_of(run_dir: Path) -> Iterator[tuple[str, Path]]:
    """Yields the run itself as "", then its parts and theirs by name: ``parts/a/parts/b`` is ``a/b``."""
    yield "", run_dir
    for folder in sorted((run_dir / "parts").glob("*/")):
        for name, path in parts_of(folder):
            yield folder.name + (f"/{name}" if name else ""), path


def write_final(
    folder: Path,
    recipe: str,
    config: RunConfig,
    summary: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Writes the folder that ``sextet.load`` reads and people publish: weights, configuration, model card."""
    shutil.rmtree(folder, ignore_errors=True)
    atomic_write_bytes(folder / "model.safetensors", pack_tensors(weights))
    write_json(folder / "config.json", {"recipe": recipe, "config": to_dict(config)})
    results = "\n".join(f"- {name}: {value}" for name, value in sorted(summary.items()))
    card = (
        f"# {recipe}\n\nTrained with sextet, recipe `{recipe}`, seed {config.seed}. "
        f'Load with `sextet.load("PATH")`.\n\n## Results\n\n{results or "none recorded"}\n\n'
        "## Settings\n\nSee `config.json`. Licence of the code: Apache-2.0; "
        "the weights follow the licence of the data they were trained on.\n"
    )
    atomic_write_text(folder / "README.md", card)
